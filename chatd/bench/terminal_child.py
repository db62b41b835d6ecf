"""What the terminal's benchmark runs: the client, or nothing at all, each with a watch on its event loop.

The watch asks to be called every few milliseconds and notes how late that was, which is for how long nothing else
could happen: no key taken, no line drawn. Beside it stands for how long the thread waited for a processor meanwhile,
which is the machine's part of it and not the program's. `python -m chatd.bench.terminal_child FILE [URL]`: without a
URL the loop has nothing to do, and is late by what the machine is late. It ends with the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TICK_S = 0.005


class LoopWatch:
    """Notes how late an event loop is.

    Attributes:
        samples: When a call was due by `time.monotonic`, how late it came, for how long the thread waited for a
            processor since the last call, and the process' CPU time since then, all in seconds.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float, float]] = []
        self._waited_s = self._cpu_s = self._due = 0.0
        self._schedule = -1

    def start(self) -> None:
        """Watch the loop that runs now until it ends."""
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._waited_s, self._cpu_s = self._waited(), time.process_time()
        self._due = time.monotonic() + TICK_S
        asyncio.get_running_loop().call_at(self._due, self._called)

    def _waited(self) -> float:
        return int(os.pread(self._schedule, 100, 0).split()[1]) / 1e9

    def _called(self) -> None:
        now, waited_s, cpu_s = time.monotonic(), self._waited(), time.process_time()
        late_s = max(0.0, now - self._due)
        self.samples.append((self._due, late_s, waited_s - self._waited_s, cpu_s - self._cpu_s))
        self._waited_s, self._cpu_s = waited_s, cpu_s
        self._due = now + TICK_S
        asyncio.get_running_loop().call_at(self._due, self._called)


def run_client(url: str, watch: LoopWatch, folder: Path) -> None:
    """Run the client until the person quits."""
    from chatd_tui.app import ChatApp

    class WatchedApp(ChatApp):
        """The client, watched."""

        def on_mount(self) -> None:
            watch.start()

    WatchedApp(url, copies=folder).run()


async def idle(watch: LoopWatch) -> None:
    """Do nothing until the input ends."""
    watch.start()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    # Nothing is ever written to it, so that it can be read once it has ended.
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())


def main(arguments: Sequence[str]) -> int:
    """Run, and write the samples to the file."""
    path = Path(arguments[0])
    watch = LoopWatch()
    if len(arguments) > 1:
        run_client(arguments[1], watch, path.parent)
    else:
        asyncio.run(idle(watch))
    path.write_text(json.dumps(watch.samples))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
