"""Asks the daemon what is in the cell that a person points at: one question at a time, always about the last cell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from chatd.errors import ChatdError
from chatd.protocol import PoolInspected

Inspect = Callable[[int, int], Awaitable[PoolInspected]]
"""Asks the daemon: (cell, blocks per cell)."""


class CellLook:
    """Questions about cells, of which only the last one counts.

    Args:
        inspect: Asks the daemon.
        run: Runs what asks, in the event loop.
        on_answer: Takes an answer, or why there is none.
    """

    def __init__(
        self,
        inspect: Inspect,
        run: Callable[[Callable[[], Coroutine[Any, Any, None]]], object],
        on_answer: Callable[[PoolInspected | ChatdError], None],
    ) -> None:
        self._inspect = inspect
        self._run = run
        self._on_answer = on_answer
        self._wanted: tuple[int, int] | None = None
        self._is_asking = False

    def look(self, cell: int, blocks_per_cell: int) -> None:
        """Ask about a cell, as soon as the question before it is answered."""
        self._wanted = (cell, blocks_per_cell)
        if not self._is_asking:
            self._is_asking = True
            self._run(self._ask)

    def leave(self) -> None:
        """Ask no more; an answer that still comes is not shown."""
        self._wanted = None

    async def _ask(self) -> None:
        try:
            while self._wanted is not None:
                wanted, self._wanted = self._wanted, None
                try:
                    answer: PoolInspected | ChatdError = await self._inspect(*wanted)
                except ChatdError as error:
                    answer = error
                self._on_answer(answer)
        finally:
            self._is_asking = False
