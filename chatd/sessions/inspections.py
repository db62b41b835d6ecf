"""Questions to the engine about single blocks, each with its answer. Knows no sessions: an answer names leases."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from chatd.engine.messages import InspectBlocks, Inspected
from chatd.errors import Unavailable
from chatd.sessions.ports import EngineGateway

INTERVAL_S_PER_BLOCK = 4e-6
"""The engine looks through the block tables for an answer, 0.2 us a block: a few percent of its time at most."""


class Inspections:
    """Questions that are not answered yet; the engine gets one at a time, of tenants that have several by turns.

    Args:
        engine: Where they go.
        monotonic: Gives seconds.
        sleep: Waits so many of them.

    Attributes:
        num_held: Blocks of all tables, as the engine's last frame told.
    """

    def __init__(
        self,
        engine: EngineGateway,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.num_held = 0
        self._engine = engine
        self._monotonic = monotonic
        self._sleep = sleep
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Inspected]] = {}
        self._turn = asyncio.Lock()
        self._lines: dict[str | None, asyncio.Lock] = {}  # A tenant's own, of which the first stands in the common one.
        self._free_at = float("-inf")

    async def ask(self, first: int, num_blocks: int, tenant: str | None) -> Inspected:
        """Return what the engine knows of some blocks; arguments as for `InspectBlocks`.

        Raises:
            Unavailable: No engine serves, or it ended meanwhile.
        """
        async with self._lines.setdefault(tenant, asyncio.Lock()), self._turn:
            wait_s = self._free_at - self._monotonic()
            if wait_s > 0:
                await self._sleep(wait_s)
            question = next(self._numbers)
            answer: asyncio.Future[Inspected] = asyncio.get_running_loop().create_future()
            self._waiting[question] = answer
            try:
                self._engine.send(InspectBlocks(question, first, num_blocks, tenant))
                return await answer
            finally:
                self._waiting.pop(question, None)
                self._free_at = self._monotonic() + INTERVAL_S_PER_BLOCK * self.num_held

    def on_inspected(self, inspected: Inspected) -> None:
        """Take an answer; nobody may be waiting for it any more."""
        answer = self._waiting.get(inspected.question)
        if answer is not None and not answer.done():
            answer.set_result(inspected)

    def on_died(self) -> None:
        """Answer everybody that the engine is gone."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(
                    Unavailable("the engine ended while it was asked", code="engine_unavailable", retry_after_ms=1000)
                )
