"""How the terminal client feels while an answer streams: `python -m chatd.bench tui`.

The client runs on a pseudo-terminal of 100×30 against a scripted daemon at a given rate. Measured from outside: the
time from a key's byte to the byte that draws it. Measured inside: how late the event loop runs what is due, which is
how long the screen stands still. One JSON line per scenario; never a pass or fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from chatd.bench.record import write_json
from chatd.config import child_environment
from chatd.testing.scripted_daemon import Script, ScriptedDaemon

TICK_S = 0.005
KEYS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEY_INTERVAL_S = 0.08
END = "endofanswer"
WARM = "warmanswer"


def prose(words: int) -> list[str]:
    """Return an answer of paragraphs, lists and emphasis, a word a piece; all lower case, unlike the keys."""
    pieces: list[str] = []
    for n in range(words):
        word = ("cache", "**block**", "`token`", "of", "the", "prefix", "is", "held", "by", "a", "session")[n % 11]
        pieces.append("\n\n" if n % 60 == 59 else "\n- " if n % 60 in (30, 36, 42, 48) else f"{word} ")
    return [*pieces, f"\n\n{END}"]


def code(lines: int) -> list[str]:
    """Return one long code fence, a token a piece."""
    pieces = ["```", "python\n"]
    for n in range(lines):
        pieces += ["    ", f"value_{n}", " = ", "step", "(", f"{n}", ")", "  # a row\n"]
    return [*pieces, "```\n", f"\n{END}"]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def measure(name: str, pieces: Sequence[str], tok_s: float) -> dict[str, float | str]:
    """Run one scenario and return its figures in milliseconds."""
    script = Script(deltas=pieces, delay_s=1 / tok_s)
    with tempfile.TemporaryDirectory() as folder:
        lags = Path(folder) / "lags.json"
        async with ScriptedDaemon([Script(deltas=[WARM]), script]) as daemon:
            latencies = await _drive([sys.executable, "-m", "chatd.bench.tui", "--child", daemon.url, str(lags)])
        stalls = [1000 * lag for lag in json.loads(lags.read_text())]
    return {
        "scenario": name,
        "tok_s": tok_s,
        "keys": len(latencies),
        "key_p50_ms": round(percentile(latencies, 0.50), 1),
        "key_p95_ms": round(percentile(latencies, 0.95), 1),
        "key_max_ms": round(max(latencies, default=0.0), 1),
        "stall_p50_ms": round(percentile(stalls, 0.50), 2),
        "stall_p99_ms": round(percentile(stalls, 0.99), 1),
        "stall_max_ms": round(max(stalls, default=0.0), 1),
    }


async def _drive(command: Sequence[str]) -> list[float]:
    """Run the client, ask, type while the answer streams, quit; return key latencies in milliseconds."""
    loop = asyncio.get_running_loop()
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environment = child_environment(TERM="xterm-256color", COLORTERM="truecolor")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    os.set_blocking(master, False)
    output = bytearray()
    arrived = asyncio.Event()

    def read() -> None:
        try:
            output.extend(os.read(master, 65536))
        except OSError:
            loop.remove_reader(master)
        arrived.set()

    async def drawn(text: str, timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while text.encode() not in output:
                arrived.clear()
                await arrived.wait()

    loop.add_reader(master, read)
    try:
        await drawn("connected")
        os.write(master, b"go\r")
        await drawn(WARM)
        output.clear()
        os.write(master, b"go\r")
        await drawn("answering")
        latencies = await _type(master, output)
        os.write(master, b"\x11")
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        loop.remove_reader(master)
        os.close(master)
    return latencies


async def _type(master: int, output: bytearray) -> list[float]:
    """Type capitals, one after another, until the answer has ended."""
    latencies: list[float] = []
    count = 0
    while END.encode() not in output:
        key = KEYS[count % len(KEYS)]
        count += 1
        del output[: max(0, len(output) - 2 * len(END))]
        before = output.count(key.encode())
        started = time.perf_counter()
        os.write(master, key.encode())
        while output.count(key.encode()) <= before and time.perf_counter() - started < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
        latencies.append(1000 * (time.perf_counter() - started))
        if count % 40 == 0:
            os.write(master, b"\x15")
        await asyncio.sleep(KEY_INTERVAL_S)
    return latencies


def _run_child(url: str, path: Path) -> None:
    """Run the client and write how late its event loop was, in seconds, while it was connected."""
    from chatd_tui.app import ChatApp

    lags: list[float] = []

    class Measured(ChatApp):
        """The client, with a watch on its event loop."""

        def on_mount(self) -> None:
            self.run_worker(self._watch_loop(), name="lag")

        async def _watch_loop(self) -> None:
            due = time.perf_counter() + TICK_S
            while True:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                now = time.perf_counter()
                if self.chat.status_line.view.text == "answering":
                    lags.append(max(0.0, now - due))
                due = now + TICK_S

    Measured(url, copies=path.parent).run()
    path.write_text(json.dumps(lags))


def main(arguments: Sequence[str]) -> int:
    """Run the scenarios and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench tui", description=__doc__)
    parser.add_argument("--tok-s", type=float, default=100.0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", nargs=2, metavar=("URL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _run_child(options.child[0], Path(options.child[1]))
        return 0
    runs = []
    for name, pieces in (("prose, 800 words", prose(800)), ("code, one fence of 180 lines", code(180))):
        runs.append(asyncio.run(measure(name, pieces, options.tok_s)))
        print(json.dumps(runs[-1]), flush=True)
    write_json(options.json, "tui", {"runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
