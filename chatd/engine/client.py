"""The front's side of the engine: starts its process, talks to it, sees its death, starts another. No torch.

```
engine = EngineClient(options, on_messages=sessions.on_engine_messages)
ready = await engine.start(on_progress)       raises what the engine cannot start for
engine.send(Submit(...))                      never waits
await engine.close()                          no process is left
```

When the process ends or hangs, one `EngineDied` is delivered after the last message of that process, and another
process is started after a pause. Nothing of the old one is known to it: requests in flight are over, and leases are
answered with `LeaseLost` until they are sent again from their start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from typing import IO

import msgspec

from chatd.engine.engine_process import EngineProcess, ProcessEnd
from chatd.engine.hang_watch import HangLimits, wait_for_hang, wait_for_ready
from chatd.engine.messages import (
    EngineMessage,
    Erase,
    EraseTenant,
    Fork,
    FrontMessage,
    InspectBlocks,
    Loading,
    Pong,
    Ready,
    SetTenant,
    Shutdown,
    Submit,
    WatchPool,
    encode,
)
from chatd.engine.options import EngineOptions
from chatd.engine.pulse import NOT_KNOWN
from chatd.errors import Unavailable

MAX_UNSENT_BYTES = 64 * 2**20
"""The engine takes messages at every step; one that lets so much pile up is not there."""

MAX_UNREAD_BATCHES = 1024
"""Batches kept for `batches`; beyond them the pipe is not read, and the engine stops when its own buffer is full."""

HANG_TIMEOUT_S = 3.0
"""Without a sign of life for so long, and without using the CPU or waiting for it, the engine hangs."""

BUSY_TIMEOUT_S = 30.0
"""Without one for so long, although it computes, the engine hangs as well; until then it is stalled."""

START_HANG_TIMEOUT_S = 120.0
"""As `HANG_TIMEOUT_S`, for an engine that loads: it tells each phase, and works in all of them."""

START_BUSY_TIMEOUT_S = 900.0
"""As `BUSY_TIMEOUT_S`, for an engine that loads: no phase is silent for so long on the slowest machine."""

MAX_HUNG_STARTS = 3
"""So many first starts in a row may hang; then the engine cannot be started."""

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0
"""An engine that served for so long is restarted without a longer pause than the first."""

_log = logging.getLogger(__name__)


class EngineState(StrEnum):
    """Where the engine is in its life, as `/ready` tells it; stalled, it takes messages and makes no progress."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


_SERVING = (EngineState.READY, EngineState.STALLED)


class EngineDied(msgspec.Struct, frozen=True):
    """Not a message of the pipe: the process that sent all before it is gone, with every request in flight.

    Attributes:
        reason: For logs and for the error of the turns that it ends.
        exit_code: Of the process; negative is a signal.
        alone: The suspect that was computed alone as it ended, or `pulse.NO_SUSPECT`, or `pulse.NOT_KNOWN`.
    """

    reason: str
    exit_code: int | None
    alone: int = NOT_KNOWN


EngineEvent = EngineMessage | EngineDied
OnMessages = Callable[[list[EngineEvent]], None]
OnProgress = Callable[[str, float], None]


class EngineClient:
    """One engine at a time, kept alive.

    Args:
        options: Given to each process.
        on_messages: Called in the loop with all that one read brought, in order; `batches` is for those without one.
        hang_timeout_s: See `HANG_TIMEOUT_S`.
        busy_timeout_s: See `BUSY_TIMEOUT_S`.
        start_hang_timeout_s: See `START_HANG_TIMEOUT_S`.
        first_backoff_s: Pause before the first restart; doubled for each that follows at once.
        command: What is run; its last two arguments are the descriptors of its end of the pipe, and of its pulse.
        stderr: Where the engine's log goes; the front's own stderr where None.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        on_messages: OnMessages | None = None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        start_hang_timeout_s: float = START_HANG_TIMEOUT_S,
        first_backoff_s: float = FIRST_BACKOFF_S,
        command: Sequence[str] = (sys.executable, "-P", "-m", "chatd.engine.process"),
        stderr: IO[bytes] | int | None = None,
    ) -> None:
        self._options = options
        self._on_messages = on_messages or self._keep_batch
        self._limits = HangLimits(hang_timeout_s, busy_timeout_s, busy_share=0.1)
        self._start_limits = HangLimits(start_hang_timeout_s, START_BUSY_TIMEOUT_S, busy_share=0.01)
        self._first_backoff_s = first_backoff_s
        self._command = tuple(command)
        self._stderr = stderr
        self._state = EngineState.STARTING
        self._phase = "starting"
        self._progress = 0.0
        self._ready: Ready | None = None
        self._num_restarts = 0
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Ready] | None = None
        self._on_progress: OnProgress | None = None
        self._watch_pool: WatchPool | None = None
        self._shares: dict[str, SetTenant] = {}
        self._unread: deque[list[EngineEvent]] = deque()
        self._unread_changed = asyncio.Event()

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def phase(self) -> tuple[str, float]:
        """The phase of start-up and its progress from 0 to 1."""
        return self._phase, self._progress

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it was last ready; None before."""
        return self._ready

    @property
    def num_restarts(self) -> int:
        """How often a process had to be replaced."""
        return self._num_restarts

    @property
    def pid(self) -> int | None:
        """The running process."""
        return self._process.process.pid if self._process else None

    async def start(self, on_progress: OnProgress | None = None) -> Ready:
        """Start the process and wait until it serves.

        Args:
            on_progress: Called with each phase and its progress from 0 to 1, at restarts as well.

        Raises:
            StartupError: What the engine refused to start for, in the class that has the command's exit code.
        """
        assert self._supervisor is None, "an engine client is started once"
        self._on_progress = on_progress
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        try:
            return await asyncio.shield(self._started)
        except BaseException:
            await self.close()
            raise

    def _raised_floor(self, limits: SetTenant) -> float:
        """Return how much a floor grows since the start: the others make room first."""
        share = self._options.tenants.get(limits.tenant)
        return limits.floor - (0.0 if share is None else share.floor)

    def send(self, message: FrontMessage) -> None:
        """Send a message without waiting.

        While no engine serves, what is waited for (`Submit`, `Fork`, `Erase`, `EraseTenant`, `InspectBlocks`) is
        refused; the other messages are about what died with it, and are dropped. An engine that takes nothing gets no
        more work, but is told all else. The last `WatchPool`, and the last `SetTenant` of each tenant, are repeated to
        each new process.

        Raises:
            Unavailable: No engine serves, or it does not take what was sent before.
        """
        if isinstance(message, WatchPool):
            self._watch_pool = message
        elif isinstance(message, SetTenant):
            self._shares[message.tenant] = message
        process = self._process
        if self._state not in _SERVING or process is None:
            if isinstance(message, Submit | Fork | Erase | EraseTenant | InspectBlocks):
                raise Unavailable(
                    f"the engine is {self._state} ({self._phase})", code="engine_unavailable", retry_after_ms=1000
                )
            return
        if process.unsent_bytes > MAX_UNSENT_BYTES and isinstance(message, Submit | Fork):
            raise Unavailable("the engine takes no messages", code="engine_unavailable", retry_after_ms=1000)
        process.send(encode(message))

    async def batches(self) -> AsyncIterator[list[EngineEvent]]:
        """Yield what each read brought, until the client is closed; for clients without `on_messages`."""
        while self._unread or self._state not in (EngineState.CLOSED, EngineState.FAILED):
            if not self._unread:
                self._unread_changed.clear()
                await self._unread_changed.wait()
                continue
            batch = self._unread.popleft()
            if len(self._unread) < MAX_UNREAD_BATCHES // 2 and self._process:
                self._process.resume()
            yield batch

    async def messages(self) -> AsyncIterator[EngineEvent]:
        """Yield what `batches` does, one by one."""
        async for batch in self.batches():
            for message in batch:
                yield message

    async def close(self, timeout_s: float = 5.0) -> None:
        """End the process: asked first, killed after `timeout_s`. May be called in any state, and again."""
        supervisor, self._supervisor = self._supervisor, None
        if self._state is not EngineState.FAILED:
            self._state = EngineState.CLOSED
        if supervisor is not None:
            supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervisor
        process, self._process = self._process, None
        if process is not None:
            process.send(encode(Shutdown()))
            await process.end(timeout_s)
        self._unread_changed.set()

    def _keep_batch(self, batch: list[EngineEvent]) -> None:
        self._unread.append(batch)
        self._unread_changed.set()
        if len(self._unread) >= MAX_UNREAD_BATCHES and self._process:
            self._process.pause()

    async def _supervise(self) -> None:
        """Start a process, watch it to its end, and so on; ends only when the first start fails, or cancelled."""
        assert self._started is not None
        backoff_s = self._first_backoff_s
        num_hung_starts = 0
        while True:
            served_s, end, alone = await self._run_process()
            num_hung_starts += end.has_hung
            if not self._started.done() and not (end.has_hung and num_hung_starts < MAX_HUNG_STARTS):
                self._state = EngineState.FAILED
                self._started.set_exception(end.error)
                return
            if self._started.done():
                self._state = EngineState.RESTARTING
            self._num_restarts += 1
            backoff_s = self._first_backoff_s if (served_s or 0.0) >= STABLE_AFTER_S else backoff_s
            _log.warning("the engine is started again in %.1f s: %s", backoff_s, end.reason)
            self._report(f"restarting: {end.reason}", 0.0)
            if served_s is not None:
                self._deliver([EngineDied(end.reason, end.exit_code, alone)])
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _run_process(self) -> tuple[float | None, ProcessEnd, int]:
        """Run one process to its end.

        Returns:
            How long it served, None if it never did; why it ended; and what suspect it was at.
        """
        loop = asyncio.get_running_loop()
        try:
            process = await EngineProcess.open(self._command, self._options, self._stderr, self._on_batch)
        except OSError as error:
            return None, ProcessEnd(f"the engine's process cannot be started: {error}", None), NOT_KNOWN
        self._process = process
        watch = asyncio.create_task(self._watch(process), name="engine watch")
        ready_at: float | None = None
        try:
            await asyncio.wait((process.ready, process.closed), return_when=asyncio.FIRST_COMPLETED)
            if process.ready.done():
                ready_at = loop.time()
            await asyncio.shield(process.closed)
            if self._state in _SERVING:
                self._state = EngineState.RESTARTING
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        served_s = loop.time() - ready_at if ready_at is not None else None
        alone = process.pulse.read().alone
        end = await process.end(timeout_s=2.0)
        self._process = None
        return served_s, end, alone

    def _on_batch(self, process: EngineProcess, batch: list[EngineMessage]) -> None:
        """Keep track of what the process says of itself, and pass everything on but pongs."""
        events: list[EngineEvent] = []
        for message in batch:
            match message:
                case Pong():
                    continue
                case Loading():
                    self._report(message.phase, message.progress)
                case Ready():
                    self._ready = message
                    self._state = EngineState.READY
                    self._report("ready", 1.0)
                    if self._watch_pool is not None:
                        process.send(encode(self._watch_pool))
                    for share in sorted(self._shares.values(), key=self._raised_floor):
                        process.send(encode(share))
                    if self._started is not None and not self._started.done():
                        self._started.set_result(message)
            events.append(message)
        if events:
            self._deliver(events)

    def _report(self, phase: str, progress: float) -> None:
        self._phase, self._progress = phase, progress
        if self._on_progress is not None:
            self._on_progress(phase, progress)

    def _deliver(self, events: list[EngineEvent]) -> None:
        self._on_messages(events)

    async def _watch(self, process: EngineProcess) -> None:
        """Kill a process that hangs, while it loads or later."""
        silent_s = await wait_for_ready(process, self._start_limits)
        if silent_s is not None:
            await process.kill_hung(f"its start made no progress for {silent_s:.1f} s after {self._phase!r}")
            return
        reason = await wait_for_hang(process, self._limits, self._on_stall)
        # Nothing is sent to it any more, and whoever asks is told before it is gone.
        self._state = EngineState.RESTARTING
        self._report(f"restarting: {reason}", 0.0)
        await process.kill_hung(reason)

    def _on_stall(self, reason: str | None) -> None:
        """Note that the process makes no progress, or does again."""
        if reason is None:
            self._state = EngineState.READY
            self._report("ready", 1.0)
            return
        self._state = EngineState.STALLED
        self._report(reason, 0.0)
        _log.warning("the engine stalls: %s", reason)
