"""The state of the block pool as a client knows it: a snapshot with the deltas since applied to it."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from chatd.errors import ChatdError
from chatd.protocol import (
    Cells,
    PoolDelta,
    PoolSnapshot,
    PoolSubscribe,
    PoolTotals,
    SessionBlocks,
    TenantBlocks,
    TierBlocks,
    unpack_cells,
)

Detail = Literal["summary", "sessions", "map"]
Counts = tuple[int, int, int, int]
_DETAILS: tuple[Detail, ...] = ("summary", "sessions", "map")


class CellMap(msgspec.Struct, frozen=True):
    """All cells of the pool.

    Attributes:
        blocks_per_cell: Consecutive blocks in each cell but perhaps the last.
        counts: For each cell its free, cached, active and shared blocks.
    """

    blocks_per_cell: int
    counts: tuple[Counts, ...]


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at one step; what the subscription does not ask for is None."""

    step: int
    totals: PoolTotals
    tenants: tuple[TenantBlocks, ...]
    tiers: tuple[TierBlocks, ...] = ()
    sessions: tuple[SessionBlocks, ...] | None = None
    cells: CellMap | None = None


def apply_frame(state: PoolState | None, frame: PoolSnapshot | PoolDelta) -> PoolState | None:
    """Return the state after `frame`; None for a delta with no snapshot before it.

    A delta whose cells are of another folding than the map's (it was sent before the map was asked for anew) changes
    everything but the map.
    """
    if isinstance(frame, PoolDelta) and state is None:
        return None
    before = None if isinstance(frame, PoolSnapshot) else state
    sessions = before.sessions if frame.sessions is None and before else frame.sessions
    return PoolState(
        step=frame.step,
        totals=frame.totals,
        tenants=tuple(frame.tenants),
        tiers=tuple(frame.tiers),
        sessions=None if sessions is None else tuple(sessions),
        cells=_apply_cells(before.cells if before else None, frame.cells),
    )


def _apply_cells(before: CellMap | None, cells: Cells | None) -> CellMap | None:
    if cells is None:
        return before
    counts = unpack_cells(cells.data)
    if cells.index is None:
        return CellMap(cells.blocks_per_cell, tuple(counts)) if len(counts) == cells.count else before
    if before is None or len(before.counts) != cells.count or before.blocks_per_cell != cells.blocks_per_cell:
        return before
    merged = list(before.counts)
    for index, count in zip(cells.index, counts, strict=False):
        if 0 <= index < len(merged):
            merged[index] = count
    return CellMap(before.blocks_per_cell, tuple(merged))


def combined(wishes: list[PoolSubscribe]) -> PoolSubscribe | None:
    """Return the one subscription that serves all of them, or None for none."""
    if not wishes:
        return None
    maps = [wish.cells for wish in wishes if wish.detail == "map"]
    return PoolSubscribe(
        hz=max(wish.hz for wish in wishes),
        detail=_DETAILS[max(_DETAILS.index(wish.detail) for wish in wishes)],
        cells=max(maps) if maps else wishes[0].cells,
    )


class PoolReader:
    """The latest pool state for one reader."""

    def __init__(self, wish: PoolSubscribe) -> None:
        self.wish = wish
        self._latest: PoolState | None = None
        self._error: ChatdError | None = None
        self._ready = asyncio.Event()

    def put(self, state: PoolState) -> None:
        """Replace what was not read."""
        self._latest = state
        self._ready.set()

    def fail(self, error: ChatdError) -> None:
        """End the reader once it has read what is there."""
        self._error = error
        self._ready.set()

    async def get(self) -> PoolState:
        """Return the latest state that was not read yet."""
        while self._latest is None:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        state, self._latest = self._latest, None
        return state
