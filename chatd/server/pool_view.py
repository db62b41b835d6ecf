"""The block pool as a caller may see it.

The operator, and a tenant that has the machine to itself, see every block where it lies. Any other tenant sees its own
blocks only, counted and packed together: where its blocks lie, how many steps the engine took and what is free would
all tell it what the others do. So while a tenant stays within its floor, its frames do not depend on anybody else.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from chatd.engine.messages import LeaseId, PoolFrame, TenantPool
from chatd.protocol import (
    CELL_STATES,
    Cells,
    Event,
    PoolDelta,
    PoolSnapshot,
    PoolSubscribe,
    PoolTotals,
    SessionBlocks,
    TenantBlocks,
    TierBlocks,
)
from chatd.server.auth import Principal

if TYPE_CHECKING:
    from chatd.sessions.manager import LeaseHolder

TENANT_MAX_HZ = 1.0
RATE_WINDOW_S = 5.0
_FREE, _CACHED, _ACTIVE, _SHARED = range(len(CELL_STATES))
_Counts = npt.NDArray[np.int64]


class PoolStep:
    """One frame of the engine with what is computed of it once for all who look."""

    def __init__(self, frame: PoolFrame, sessions: Mapping[LeaseId, LeaseHolder]) -> None:
        self.frame = frame
        self.sessions = sessions
        self._folded: dict[int, _Counts] = {}

    def fold(self, cells: int) -> _Counts:
        """Return the counts of the four states in each of at most `cells` cells, [num_cells, 4]."""
        counts = self._folded.get(cells)
        if counts is None:
            states = np.frombuffer(self.frame.states, dtype=np.uint8)
            counts = self._folded[cells] = fold_states(states, blocks_per_cell(len(states), cells))
        return counts

    def own_counts(self, tenant: str) -> tuple[int, int, int]:
        """Return a tenant's (cached, active and not shared, shared) blocks; the frame must have the map."""
        index = next((i for i, row in enumerate(self.frame.tenants) if row.tenant == tenant), None)
        if index is None:
            return 0, 0, 0
        row = self.frame.tenants[index]
        owners = np.frombuffer(self.frame.owners, dtype="<u2")
        states = np.frombuffer(self.frame.states, dtype=np.uint8)
        shared = int(np.count_nonzero((owners == index) & (states == _SHARED)))
        return row.num_cached, row.num_active - shared, shared


def blocks_per_cell(num_blocks: int, cells: int) -> int:
    """Return how many consecutive blocks go into a cell so that `cells` cells are enough."""
    return max(1, -(-num_blocks // cells))


def fold_states(states: npt.NDArray[np.uint8], per_cell: int) -> _Counts:
    """Return the counts of the four states in each cell of `per_cell` consecutive blocks, [num_cells, 4]."""
    num_cells = -(-len(states) // per_cell)
    keys = (np.arange(len(states), dtype=np.int64) // per_cell) * len(CELL_STATES) + states
    counts = np.bincount(keys, minlength=num_cells * len(CELL_STATES))
    return counts.reshape(num_cells, len(CELL_STATES)).astype(np.int64)


def pack_counts(counts: _Counts) -> str:
    """Return `Cells.data` for an array of counts; equal to `protocol.pack_cells`."""
    return base64.b64encode(np.minimum(counts, 0xFFFF).astype("<u2").tobytes()).decode()


class PoolSubscription:
    """One connection's look at the pool.

    Args:
        principal: Who looks.
        command: What it asked for.
        sees_all: Tells whether it is the operator, or its tenant has the machine to itself; asked at each frame,
            since keys come and go.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, principal: Principal, command: PoolSubscribe, *, sees_all: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self.principal = principal
        self.detail = command.detail
        self._hz = command.hz
        self._cells = command.cells
        self._re: str | None = command.id
        self._sees_all = sees_all
        self._clock = clock
        self._sent: _Counts | None = None
        self._num_sent = 0
        self._due_at = float("-inf")
        self._step: PoolStep | None = None
        self._rate = _TokenRate()

    @property
    def interval_s(self) -> float:
        """Seconds between frames."""
        return 1.0 / (self._hz if self._sees_all() else min(self._hz, TENANT_MAX_HZ))

    @property
    def wants_map(self) -> bool:
        """True where the engine has to send the state of every block."""
        return self.detail == "map"

    @property
    def wants_leases(self) -> bool:
        """True where the engine has to send its leases."""
        return self.detail != "summary"

    def offer(self, step: PoolStep) -> float | None:
        """Take a step; return 0 where `take` has something to send now, or in how many seconds it is time for one.

        None for a step that does not have what this caller asked for: one that has follows.
        """
        if self.wants_map and not step.frame.states:
            return None
        now = self._clock()
        wait_s = self._due_at - now
        # A tenth of slack: the engine's own interval has jitter, and a frame just before its time is not put off.
        if wait_s > 0.1 * self.interval_s:
            return wait_s
        self._due_at = now + self.interval_s
        self._step = step
        return 0.0

    def take(self) -> Event | None:
        """Return the latest step as this caller may see it: all of it at first, then what changed."""
        step, self._step = self._step, None
        if step is None:
            return None
        frame = step.frame
        sees_all = self._sees_all()
        view = self._everything(step) if sees_all else self._own(step)
        sessions = self._session_rows(step, sees_all=sees_all) if self.wants_leases else None
        is_first = self._num_sent == 0 or (
            view.counts is not None and (self._sent is None or len(self._sent) != len(view.counts))
        )
        cells = self._cells_frame(view.counts, frame.num_blocks, whole=is_first)
        self._sent = view.counts
        self._num_sent += 1
        number = frame.step if sees_all else self._num_sent
        shown = PoolDelta(
            step=number, totals=view.totals, tenants=view.tenants, tiers=view.tiers, sessions=sessions, cells=cells
        )
        if not is_first:
            return shown
        re, self._re = self._re, None
        return PoolSnapshot(**msgspec.structs.asdict(shown), re=re)

    def _everything(self, step: PoolStep) -> _View:
        frame = step.frame
        prompt = sum(row.prompt_tokens for row in frame.tenants)
        cached = sum(row.cached_tokens for row in frame.tenants)
        totals = PoolTotals(
            blocks=frame.num_blocks,
            free=frame.num_free,
            cached=frame.num_cached,
            active=frame.num_active,
            shared=frame.num_shared,
            evictions=frame.num_evictions,
            hit_rate=_ratio(cached, prompt),
            tok_s=round(frame.output_tokens_per_s, 2),
            running=frame.num_running,
            waiting=frame.num_waiting,
            public=frame.num_public,
            wanted_again=frame.num_wanted_again,
        )
        counts = step.fold(self._cells) if self.wants_map else None
        tiers = [TierBlocks(tier=str(row.tier), blocks=row.num_blocks, used=row.num_used) for row in frame.tiers]
        weights = sum(row.weight for row in frame.tenants)
        tenants = [_tenant_row(row, share=round(frame.num_blocks * row.weight / weights, 1)) for row in frame.tenants]
        return _View(totals, tenants, counts, tiers)

    def _own(self, step: PoolStep) -> _View:
        frame = step.frame
        row = next((row for row in frame.tenants if row.tenant == self.principal.tenant), None)
        row = row or TenantPool(self.principal.tenant, 0, 0, 0, 0, 0, 0, 0)
        # Without a map of its own a look says nothing of sharing, even if somebody else has asked for the map.
        cached, active, shared = (
            step.own_counts(self.principal.tenant) if self.wants_map else (row.num_cached, row.num_active, 0)
        )
        totals = PoolTotals(
            blocks=frame.num_blocks,
            free=frame.num_blocks - row.num_active - row.num_cached,
            cached=row.num_cached,
            active=row.num_active,
            shared=shared,
            evictions=row.num_evicted,
            hit_rate=_ratio(row.cached_tokens, row.prompt_tokens),
            tok_s=self._rate.observe(self._clock(), row.output_tokens),
            running=row.num_running,
            waiting=row.num_waiting,
            public=0,
            wanted_again=row.num_wanted_again,
        )
        counts = None
        if self.wants_map:
            packed = np.zeros(frame.num_blocks, dtype=np.uint8)
            position = 0
            for state, number in ((_SHARED, shared), (_ACTIVE, active), (_CACHED, cached)):
                packed[position : position + number] = state
                position += number
            counts = fold_states(packed, blocks_per_cell(frame.num_blocks, self._cells))
        # How full a tier is would tell what the others have there.
        return _View(totals, [_tenant_row(row)], counts, [])

    def _session_rows(self, step: PoolStep, *, sees_all: bool) -> list[SessionBlocks]:
        rows = []
        for lease in step.frame.leases:
            entry = step.sessions.get(lease.lease)
            if entry is None:
                continue
            is_own = (entry.owner.tenant, entry.owner.user) == (self.principal.tenant, self.principal.user)
            if not is_own and not sees_all:
                continue
            rows.append(
                SessionBlocks(
                    session=entry.session_id,
                    # A title is what somebody wrote: not even the operator reads other people's.
                    title=entry.title if is_own else "",
                    held=lease.num_blocks,
                    shared=lease.num_shared,
                    tokens=lease.num_tokens,
                    tier=str(lease.tier),
                    active=lease.active,
                    bill=round(lease.bill, 6),
                    lease=str(lease.use),
                    idle_s=lease.idle_s,
                    release_s=None if lease.active else _whole(entry.release_s),
                    tenant=entry.owner.tenant if sees_all else None,
                )
            )
        return rows

    def _cells_frame(self, counts: _Counts | None, num_blocks: int, *, whole: bool) -> Cells | None:
        if counts is None:
            return None
        per_cell = blocks_per_cell(num_blocks, self._cells)
        if whole or self._sent is None:
            return Cells(count=len(counts), blocks_per_cell=per_cell, data=pack_counts(counts))
        changed = np.flatnonzero((counts != self._sent).any(axis=1))
        return Cells(
            count=len(counts), blocks_per_cell=per_cell, data=pack_counts(counts[changed]), index=changed.tolist()
        )


@dataclass(frozen=True, slots=True)
class _View:
    totals: PoolTotals
    tenants: list[TenantBlocks]
    counts: _Counts | None
    tiers: list[TierBlocks]


class _TokenRate:
    """Tokens per second of one tenant, from its own counter."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def observe(self, now: float, num_tokens: int) -> float:
        """Return the rate over the last seconds; 0 at first and after the counter began anew."""
        if self._seen and num_tokens < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, num_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_WINDOW_S:
            del self._seen[0]
        (then, before), (_, after) = self._seen[0], self._seen[-1]
        return round((after - before) / (now - then), 2) if now > then else 0.0


def _tenant_row(row: TenantPool, *, share: float | None = None) -> TenantBlocks:
    return TenantBlocks(
        tenant=row.tenant,
        active=row.num_active,
        cached=row.num_cached,
        running=row.num_running,
        waiting=row.num_waiting,
        weight=row.weight,
        share=share,
        floor=row.floor,
        evicted=row.num_evicted,
        wanted_again=row.num_wanted_again,
    )


def _whole(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
