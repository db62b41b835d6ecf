"""Who looks at the block pool, and what the engine is asked for on their behalf."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatd.engine.messages import LeaseId, PoolFrame
from chatd.protocol import Event
from chatd.server.pool_view import PoolStep, PoolSubscription

if TYPE_CHECKING:
    from chatd.sessions.manager import LeaseHolder

IDLE_INTERVAL_S = 1.0
"""Frames that `/metrics` needs, while nobody looks at the pool."""

SendPool = Callable[[Callable[[], Event | None]], None]
"""Queues a frame that is made when its turn comes; replaces one that still waits."""


@dataclass(slots=True)
class _Look:
    subscription: PoolSubscription
    send: SendPool
    later: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if self.later is not None:
            self.later.cancel()
            self.later = None


class PoolHub:
    """Passes the engine's frames on to whoever looks, and asks the engine for no more than that.

    The engine sends a frame only when something changed, so one that comes too early for a caller is kept for it.

    Args:
        watch: Asks the engine for frames: (seconds between them, with the map, with the leases).
        clock: Seconds, monotonic.
    """

    def __init__(self, watch: Callable[[float, bool, bool], Any], clock: Callable[[], float]) -> None:
        self._watch = watch
        self._clock = clock
        self._looks: dict[str, _Look] = {}
        self._watched: tuple[float, bool, bool] | None = None
        self._is_attended = False
        self._latest: PoolStep | None = None

    @property
    def latest(self) -> PoolFrame | None:
        """The engine's last frame."""
        return self._latest.frame if self._latest is not None else None

    def start(self) -> None:
        """Ask for the frames that are needed with nobody looking."""
        self._rewatch()

    def set_attended(self, is_attended: bool) -> None:
        """Say whether anybody is connected: then the engine tells its leases too, which `session.usage` is made of."""
        if is_attended != self._is_attended:
            self._is_attended = is_attended
            self._rewatch()

    def subscribe(self, connection_id: str, subscription: PoolSubscription, send: SendPool) -> None:
        """Let a connection look, instead of how it looked before."""
        self._drop(connection_id)
        self._looks[connection_id] = _Look(subscription, send)
        self._rewatch(again=True)

    def unsubscribe(self, connection_id: str) -> None:
        """Let a connection look no more."""
        if self._drop(connection_id):
            self._rewatch()

    def on_frame(self, frame: PoolFrame, sessions: Mapping[LeaseId, LeaseHolder]) -> None:
        """Take a frame of the engine."""
        self._latest = PoolStep(frame, sessions)
        for look in self._looks.values():
            self._offer(look)

    def close(self) -> None:
        """Let nobody look any more."""
        for connection_id in list(self._looks):
            self._drop(connection_id)

    def _offer(self, look: _Look) -> None:
        look.cancel()
        assert self._latest is not None, "there is no frame to offer"
        wait_s = look.subscription.offer(self._latest)
        if wait_s == 0.0:
            look.send(look.subscription.take)
        elif wait_s is not None:
            look.later = asyncio.get_running_loop().call_later(wait_s, self._offer, look)

    def _drop(self, connection_id: str) -> bool:
        look = self._looks.pop(connection_id, None)
        if look is not None:
            look.cancel()
        return look is not None

    def _rewatch(self, *, again: bool = False) -> None:
        looks = [look.subscription for look in self._looks.values()]
        wanted = (
            min([IDLE_INTERVAL_S, *(look.interval_s for look in looks)]),
            any(look.wants_map for look in looks),
            self._is_attended or any(look.wants_leases for look in looks),
        )
        # Said again for a new look too: the engine answers with a frame at once.
        if again or wanted != self._watched:
            self._watched = wanted
            self._watch(*wanted)
