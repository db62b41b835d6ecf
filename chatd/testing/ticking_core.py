"""The engine core inside the front's process, stepped by its loop: for daemons that are tested without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

from chatd.engine.client import EngineState
from chatd.testing.sessions import CoreEngine


class TickingCore(CoreEngine):
    """Serves by itself, for as long as `tick` runs.

    Args:
        pace_s: Seconds from one step to the next, so that something can happen in the middle of an answer.
        options: Of `CoreEngine`.
    """

    def __init__(self, *, pace_s: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.state = EngineState.READY
        self.phase = ("ready", 1.0)
        self.num_restarts = 0
        self.held = False
        self._pace_s = pace_s

    async def tick(self) -> None:
        """Step while there is work, until cancelled."""
        while True:
            await asyncio.sleep(self._pace_s if self.core.has_work else 0.001)
            if self.core.has_work:
                self.step()
            else:
                self.clock.advance(0.01)
                self._outbox += self.core.idle(self.clock())
                self._deliver()
