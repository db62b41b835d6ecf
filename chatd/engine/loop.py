"""The engine's main loop: take what has arrived, compute a step, send what it says. No torch.

Busy, it never waits; idle, it sleeps in the pipe until something arrives or is due, after it has looked over its own
state in short slices and collected garbage. So no step pays for either.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from chatd.engine.messages import EngineMessage, FrontMessage, Ping, Pong, PoolFrame, decode_front, encode
from chatd.engine.pipe import EnginePipe
from chatd.engine.pulse import Pulse

if TYPE_CHECKING:
    from chatd.engine.core import EngineCore

MAX_BACKLOG_BYTES = 8 * 2**20
"""With so much unsent no step is run: the front does not read, and tokens would only pile up."""

FRAME_BACKLOG_BYTES = 256 * 2**10
"""With so much unsent frames of the pool are dropped; the next one shows the same pool, only newer."""

SLICE_INTERVAL_S = 0.005
"""Between two slices of the checks that an idle engine makes."""

COLLECT_AFTER_S = 1.0
"""An engine that was idle for so long collects garbage once."""

# A step that could compute nothing is tried again after this, or when a message arrives.
_RETRY_S = 0.002


class Core(Protocol):
    """What the loop needs of the engine's core."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        ...

    @property
    def is_shutting_down(self) -> bool:
        """Whether the front has asked for the end."""
        ...

    @property
    def is_checked(self) -> bool:
        """Whether `idle` has looked over everything since the last message or step."""
        ...

    def handle(self, message: FrontMessage, now: float) -> list[EngineMessage]:
        """Do what the front asks."""
        ...

    def step(self, now: float) -> list[EngineMessage]:
        """Compute one step."""
        ...

    def idle(self, now: float) -> list[EngineMessage]:
        """Return what is due, and check a slice of the invariants."""
        ...

    def next_due(self) -> float | None:
        """Return when `idle` will have something to send, or None."""
        ...


class EngineLoop:
    """Drives a core from a pipe.

    Args:
        core: The engine.
        pipe: To the front.
        clock: Seconds; the core's `now`.
        pulse: Told of each turn.
    """

    def __init__(
        self, core: Core | EngineCore, pipe: EnginePipe, clock: Callable[[], float], pulse: Pulse | None = None
    ) -> None:
        self._core = core
        self._pipe = pipe
        self._clock = clock
        self._pulse = pulse
        self._idle_since: float | None = None
        self._must_collect = False

    def run(self, bodies: Sequence[bytes] = ()) -> None:
        """Serve until the front asks for the end.

        Args:
            bodies: Messages that have arrived already.

        Raises:
            PipeClosed: The front is gone.
            FrameError: The front sends nonsense; so does `msgspec.DecodeError`.
        """
        while True:
            timeout_s = self.turn(bodies)
            if self._core.is_shutting_down:
                return
            bodies = self._pipe.receive(timeout_s)

    def turn(self, bodies: Sequence[bytes]) -> float | None:
        """Do everything that can be done now, and return how long to wait for more; None is for ever."""
        core = self._core
        if self._pulse is not None:
            self._pulse.begin_turn()
        messages: list[EngineMessage] = []
        for body in bodies:
            message = decode_front(body)
            if isinstance(message, Ping):
                messages.append(Pong(message.nonce))
            else:
                messages += core.handle(message, self._clock())
        if core.has_work:
            self._idle_since = None
            if self._pipe.backlog_bytes > MAX_BACKLOG_BYTES:
                self._send(messages)
                return None
            said = core.step(self._clock())
            self._send(messages + said)
            return 0.0 if said else _RETRY_S
        now = self._clock()
        if self._idle_since is None:
            self._idle_since, self._must_collect = now, True
        idle_s = now - self._idle_since
        messages += core.idle(now)
        self._send(messages)
        if self._must_collect and idle_s >= COLLECT_AFTER_S:
            self._must_collect = False
            gc.collect()
        return self._idle_timeout(idle_s)

    def _idle_timeout(self, idle_s: float) -> float | None:
        if not self._core.is_checked:
            return SLICE_INTERVAL_S
        waits = [COLLECT_AFTER_S - idle_s] if self._must_collect else []
        due = self._core.next_due()
        if due is not None:
            waits.append(due - self._clock())
        return max(0.0, min(waits)) if waits else None

    def _send(self, messages: Sequence[EngineMessage]) -> None:
        """Send in one go; frames of the pool only to a front that keeps up."""
        is_slow = self._pipe.backlog_bytes > FRAME_BACKLOG_BYTES
        self._pipe.send([encode(m) for m in messages if not (is_slow and isinstance(m, PoolFrame))])
