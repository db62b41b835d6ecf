"""Tells an engine that works from one that hangs: by what it says, by what it does, and by what its step should take.

```
stopped, or waits for what never comes      silent, uses no CPU          hangs after `quiet_s`
a loop or a native call without an end      silent, uses the CPU         stalls after `quiet_s`, hangs after `busy_s`
a long step                                 silent, uses the CPU         neither, where it was said to be long
```
A stalled engine is given time, since a step on a machine full of other work ends at last; nobody is sent to it
meanwhile. Silent ticks are counted, not seconds, so that a machine that slept does not look like an engine that hangs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from chatd.engine.engine_process import EngineProcess
from chatd.engine.messages import Ping, encode

_TICKS = 5  # that `quiet_s` is divided into
# A step stalls, hangs, and hangs although it uses the CPU, after so many times what it should take at least.
_STALL_FACTOR = 3.0
_QUIET_FACTOR = 5.0
_BUSY_FACTOR = 20.0


@dataclass(frozen=True, slots=True)
class HangLimits:
    """How long silence may last.

    Attributes:
        quiet_s: Of an engine that does nothing; then one that is busy counts as stalled.
        busy_s: Of one that uses the CPU, or waits for it.
        busy_share: Part of the last `quiet_s` of a silence that must be CPU time of an engine that uses the CPU.
    """

    quiet_s: float
    busy_s: float
    busy_share: float


async def wait_for_ready(process: EngineProcess, limits: HangLimits) -> float | None:
    """Return None once a process that loads is ready, or how long it was silent once that is too long.

    Each phase of loading is said as it begins, and all of them work.
    """
    silence = _Silence(process, limits)
    while True:
        await asyncio.wait((process.ready,), timeout=silence.tick_s)
        if process.ready.done():
            return None
        if silence.has_ended():
            continue
        if silence.is_too_long(0.0):
            return silence.seconds


async def wait_for_hang(process: EngineProcess, limits: HangLimits, on_stall: Callable[[str | None], None]) -> str:
    """Return why a process that serves counts as hanging.

    Args:
        process: Which.
        limits: Of its silence.
        on_stall: Called with what is wrong when it stalls, and with None when it goes on after all.
    """
    silence = _Silence(process, limits)
    is_stalled = False
    number = 0
    last = process.pulse.read()
    while True:
        number += 1
        process.send(encode(Ping(number)))
        await asyncio.sleep(silence.tick_s)
        reading = process.pulse.read()
        has_moved, last = reading.num_turns != last.num_turns, reading
        if silence.has_ended() or has_moved:
            silence.restart()
            if is_stalled:
                is_stalled = False
                on_stall(None)
            continue
        expected_s = reading.expected_s
        if silence.is_too_long(expected_s):
            return f"no sign of life for {silence.seconds:.1f} s{_expectation(expected_s)}"
        if not is_stalled and silence.seconds >= max(limits.quiet_s, _STALL_FACTOR * expected_s):
            is_stalled = True
            on_stall(f"no progress for {silence.seconds:.1f} s{_expectation(expected_s)}")


def _expectation(expected_s: float) -> str:
    return f", in a step that should take {expected_s:.2f} s" if expected_s else ""


class _Silence:
    """Ticks since a process was last heard, and what it did in them."""

    def __init__(self, process: EngineProcess, limits: HangLimits) -> None:
        self._process = process
        self._limits = limits
        self.tick_s = limits.quiet_s / _TICKS
        self._num_ticks = 0
        # CPU seconds at each tick of the last `quiet_s`.
        self._cpu_s: deque[float] = deque(maxlen=_TICKS + 1)
        process.heard = False

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return self._num_ticks * self.tick_s

    def restart(self) -> None:
        """Count from here."""
        self._num_ticks = 0

    def has_ended(self) -> bool:
        """Count a tick; return whether the process was heard in it, or is not listened to."""
        process = self._process
        is_heard, process.heard = process.heard, False
        if is_heard or process.is_paused:
            self._num_ticks = 0
            return True
        if self._num_ticks == 0:
            self._cpu_s.clear()
        self._cpu_s.append(process.cpu_s())
        self._num_ticks += 1
        return False

    def is_too_long(self, expected_s: float) -> bool:
        """Return whether silence of such a length is a hang."""
        limits, process = self._limits, self._process
        if self.seconds < max(limits.quiet_s, _QUIET_FACTOR * expected_s):
            return False
        used_s, window_s = self._cpu_s[-1] - self._cpu_s[0], (len(self._cpu_s) - 1) * self.tick_s
        is_busy = process.is_runnable() or used_s > limits.busy_share * window_s
        return not is_busy or self.seconds >= max(limits.busy_s, _BUSY_FACTOR * expected_s)
