"""Questions to the engine about single blocks, each with its answer. Knows no sessions: an answer names leases."""

from __future__ import annotations

import asyncio
import itertools

from chatd.engine.messages import InspectBlocks, Inspected
from chatd.errors import Unavailable
from chatd.sessions.ports import EngineGateway


class Inspections:
    """Questions that are not answered yet.

    Args:
        engine: Where they go.
    """

    def __init__(self, engine: EngineGateway) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Inspected]] = {}

    async def ask(self, first: int, num_blocks: int, tenant: str | None) -> Inspected:
        """Return what the engine knows of some blocks; arguments as for `InspectBlocks`.

        Raises:
            Unavailable: No engine serves, or it ended meanwhile.
        """
        question = next(self._numbers)
        answer: asyncio.Future[Inspected] = asyncio.get_running_loop().create_future()
        self._waiting[question] = answer
        try:
            self._engine.send(InspectBlocks(question, first, num_blocks, tenant))
            return await answer
        finally:
            self._waiting.pop(question, None)

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
