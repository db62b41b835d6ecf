from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from chatd.engine.engine_process import EngineProcess, thread_states
from chatd.engine.hang_watch import HangLimits, wait_for_hang
from chatd.engine.pulse import Reading

LIMITS = HangLimits(quiet_s=0.05, busy_s=0.2, busy_share=0.1)


class SilentProcess:
    """A process that says nothing and uses the CPU as it is told, once at each tick."""

    def __init__(self, used_s: list[float]) -> None:
        self.heard = False
        self.is_paused = False
        self.pulse = self
        self._used_s = used_s
        self._num_ticks = 0

    def read(self) -> Reading:
        return Reading(num_turns=1, expected_s=0.0)

    def send(self, frame: bytes) -> None:
        pass

    def is_runnable(self) -> bool:
        return False

    def cpu_s(self) -> float:
        self._num_ticks += 1
        return sum(self._used_s[i % len(self._used_s)] for i in range(self._num_ticks))


@pytest.mark.parametrize(
    ("used_s", "silent_s"),
    [
        ([0.0], "0.1 s"),
        # It works in bursts and waits between them: a tick without any is no sign.
        ([0.006, 0.0, 0.0], "0.2 s"),
        ([0.01], "0.2 s"),
    ],
)
async def test_a_process_that_works_now_and_then_is_given_the_time_of_a_busy_one(
    used_s: list[float], silent_s: str
) -> None:
    process = cast(EngineProcess, SilentProcess(used_s))
    assert await wait_for_hang(process, LIMITS, lambda _why: None) == f"no sign of life for {silent_s}"


BUSY_BESIDE_ITS_MAIN_THREAD = """
import threading
def work():
    while True:
        pass
worker = threading.Thread(target=work)
worker.start()
worker.join()
"""


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        pass


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are told apart by Linux's /proc")
def test_a_process_whose_main_thread_waits_for_another_that_works_is_seen_to_work() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY_BESIDE_ITS_MAIN_THREAD]) as process:
        try:
            until(lambda: "".join(sorted(thread_states(process.pid))) == "RS")
            process.send_signal(signal.SIGSTOP)
            until(lambda: "R" not in thread_states(process.pid))
        finally:
            process.kill()
    assert thread_states(process.pid) == ""
