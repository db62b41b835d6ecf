"""A cell of the pool's map as a caller may see it: what is in its blocks, and whose they are.

The operator, and a tenant that has the machine to itself, may point at every block. Any other tenant points at its own
blocks, packed as its frames count them, and is told nothing that depends on anybody else. Sessions are named to their
own user; the operator is told the tenant and the session of others, without the title, which is what somebody wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from chatd.engine.messages import MAX_INSPECTED, BlockFacts, Inspected, LeaseId
from chatd.errors import RateLimited
from chatd.protocol import CELL_STATES, CellBlock, CellHolder, Event, PoolInspect, PoolInspected
from chatd.server.auth import Principal
from chatd.server.pool_view import TENANT_MAX_HZ
from chatd.sessions.engine_events import LeaseHolder

MAX_HZ = 10.0

Inspect = Callable[[int, int, "str | None"], Awaitable[Inspected]]
"""Asks the engine: (first block, how many, the tenant whose blocks are counted or None)."""


class CellPointer:
    """One connection's questions about cells: one at a time, and no more of them than frames.

    Args:
        principal: Who asks.
        clock: Seconds, monotonic.
        sleep: Waits so many of them.
    """

    def __init__(
        self,
        principal: Principal,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._principal = principal
        self._clock = clock
        self._sleep = sleep
        self._is_busy = False
        self._free_at = float("-inf")

    def begin(self) -> None:
        """Take a question; `answer` ends it.

        Raises:
            RateLimited: The last one is not answered yet.
        """
        if self._is_busy:
            raise RateLimited("1 question about a cell is not answered yet", code="busy", retry_after_ms=1000)
        self._is_busy = True

    async def answer(
        self,
        command: PoolInspect,
        inspect: Inspect,
        sessions: Mapping[LeaseId, LeaseHolder],
        sees_all: Callable[[], bool],
        num_blocks: int,
    ) -> Event:
        """Return what the caller may know of a cell, when it is time for it.

        Args:
            command: Names the cell.
            inspect: Asks the engine.
            sessions: Of each lease, as far as they are known.
            sees_all: Whether the caller sees the whole pool.
            num_blocks: Of the map, whose last cell may have fewer than the others.

        Raises:
            Unavailable: No engine serves, or it ended meanwhile.
        """
        try:
            wait_s = self._free_at - self._clock()
            if wait_s > 0:
                await self._sleep(wait_s)
            is_everything = sees_all()
            self._free_at = self._clock() + 1.0 / (MAX_HZ if is_everything else TENANT_MAX_HZ)
            size = command.blocks_per_cell
            tenant = None if is_everything else self._principal.tenant
            first = command.cell * size
            inspected = await inspect(first, size, tenant)
            return PoolInspected(
                cell=command.cell,
                blocks_per_cell=size,
                blocks=[
                    cell_block(facts, sessions, self._principal, sees_all=is_everything) for facts in inspected.blocks
                ],
                left_out=max(0, min(size, num_blocks - first) - MAX_INSPECTED),
                re=command.id,
            )
        finally:
            self._is_busy = False


def cell_block(
    facts: BlockFacts, sessions: Mapping[LeaseId, LeaseHolder], principal: Principal, *, sees_all: bool
) -> CellBlock:
    """Return what a caller may know of one block."""
    named = []
    for held in facts.holders:
        holder = sessions.get(held.lease)
        if holder is None:
            continue
        is_own = (holder.owner.tenant, holder.owner.user) == (principal.tenant, principal.user)
        if is_own or sees_all:
            named.append(
                CellHolder(
                    session=holder.session_id,
                    title=holder.title if is_own else "",
                    own=is_own,
                    tenant=holder.owner.tenant if sees_all else None,
                    tokens=held.num_tokens,
                )
            )
    return CellBlock(
        block=facts.number,
        state=CELL_STATES[facts.state],
        references=facts.ref_count,
        tenant=(facts.tenant or None) if sees_all else None,
        public=not facts.tenant,
        registered=facts.is_registered,
        place=facts.place if facts.place >= 0 else None,
        tokens=facts.num_tokens,
        age_s=facts.age_s,
        hit_age_s=facts.hit_age_s,
        holders=named,
        others=max(0, facts.ref_count - len(named)),
    )
