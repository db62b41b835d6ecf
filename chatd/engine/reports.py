"""What the engine tells about itself: pool frames, counters, places in queues, tiers of leases. Decides nothing."""

from __future__ import annotations

import math
import sys
from array import array
from collections import deque

from chatd.engine.block_moves import BlockMoves
from chatd.engine.draft import TenantCounts
from chatd.engine.explanations import Explanations
from chatd.engine.fairness import Tenant
from chatd.engine.messages import (
    EngineMessage,
    EngineStats,
    LeaseId,
    LeasePool,
    LeaseTier,
    LeaseUse,
    PoolFrame,
    TenantPool,
    Tier,
    TierPool,
    WatchPool,
)
from chatd.engine.plan import StepOutput
from chatd.engine.request import RequestStatus
from chatd.engine.scheduler import Scheduler
from chatd.kvcache.holdings import holdings_of
from chatd.kvcache.lease import Lease, LeaseState

STATS_INTERVAL_S = 1.0

LEASE_ROW_INTERVAL_S = 50e-6
"""Frames with a row per lease come no more often than this for each of them: they take a few percent of the time."""

_RATE_WINDOW_S = 5.0
_USES = {
    LeaseState.IDLE: LeaseUse.IDLE,
    LeaseState.ATTACHED: LeaseUse.ATTACHED,
    LeaseState.QUEUED: LeaseUse.QUEUED,
    LeaseState.ACTIVE: LeaseUse.ANSWERING,
}
_NO_COUNTS = TenantCounts()


def tier_of(lease: Lease, moves: BlockMoves) -> Tier:
    """Return where most of a lease's KV is; the upper one of two that have as much of it."""
    device, total = lease.table.num_computed_tokens, len(lease.token_ids)
    if 2 * device >= total:
        return Tier.DEVICE
    host, disk = moves.below.counts(lease)
    parts = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk, Tier.TOKENS: total - device - host - disk}
    return max(parts, key=lambda tier: parts[tier])


class Reporter:
    """Makes the messages that are due.

    Args:
        scheduler: What is told about.
        waiting_interval_s: Places in queues are told no more often than this.
    """

    def __init__(self, scheduler: Scheduler, waiting_interval_s: float) -> None:
        self._scheduler = scheduler
        self._moves = scheduler.moves
        self._waiting_interval_s = waiting_interval_s
        self._waiting_at = -math.inf
        self._explanations = Explanations(scheduler.waiting)
        self._watch = WatchPool(0.0)
        self._frame_at = -math.inf
        self._stats_at = -math.inf
        self._frame_changed = self._stats_changed = False
        self._output: deque[tuple[float, int]] = deque()
        self._num_output = 0
        self.steps = 0
        self.num_failed_steps = self.num_oversized_steps = 0
        self.integrity_errors = 0
        self.step_s = self.model_s = self.move_s = 0.0

    def watch(self, watch: WatchPool) -> None:
        """Change how often frames are sent and what is in them; the next one is due at once."""
        self._watch = watch
        self._frame_at = -math.inf
        self._frame_changed = True

    def mark_changed(self) -> None:
        """Note that something happened which a frame would show."""
        self._frame_changed = True

    def count_failed_step(self) -> None:
        """Count a step that was discarded."""
        self._stats_changed = True
        self.num_failed_steps += 1

    def count_oversized_step(self) -> None:
        """Count a step that was discarded since the device has too little memory for it."""
        self.num_oversized_steps += 1

    def count_integrity_error(self) -> None:
        """Count an invariant that was found broken."""
        self._stats_changed = self._frame_changed = True
        self.integrity_errors += 1

    def count_step(self, now: float, step_s: float, output: StepOutput, num_output: int) -> None:
        """Count a committed step."""
        self._stats_changed = True
        self.steps += 1
        self.step_s += step_s
        self.model_s += output.model_s
        self.move_s += output.move_s
        if num_output:
            self._output.append((now, num_output))
            self._num_output += num_output
        self._forget_output(now)

    def due(self, now: float, *, planned: bool) -> list[EngineMessage]:
        """Return the messages that are due; places in queues only after a plan, which may have emptied them."""
        messages: list[EngineMessage] = []
        if planned and now - self._waiting_at >= self._waiting_interval_s and self._scheduler.waiting:
            self._waiting_at = now
            messages += self._explanations.tell()
        if self._frame_changed and 0 < self._frame_interval_s() <= now - self._frame_at:
            messages.append(self.frame(now))
            # The rate goes on falling after the last token, until there is none within its window.
            self._frame_at, self._frame_changed = now, bool(self._output)
        if self._stats_changed and now - self._stats_at >= STATS_INTERVAL_S:
            self._stats_at, self._stats_changed = now, False
            messages.append(self.stats())
        return messages

    def next_due(self) -> float | None:
        """Return when `due` will have something although nothing happens before, or None."""
        times = []
        if self._frame_changed and self._watch.interval_s > 0:
            times.append(self._frame_at + self._frame_interval_s())
        if self._stats_changed:
            times.append(self._stats_at + STATS_INTERVAL_S)
        return min(times, default=None)

    def tiers(self) -> list[EngineMessage]:
        """Return a line for each lease that lost KV, or has it back, since the last call."""
        leases = self._scheduler.leases
        messages: list[EngineMessage] = []
        for lease in leases.shrunk.values():
            lease.tier = tier_of(lease, self._moves)
            if lease.lease_id >= 0:  # Others are the engine's own.
                messages.append(_lease_tier(lease, "pressure"))
        leases.shrunk.clear()
        for lease in leases.used.values():
            if lease.tier != Tier.DEVICE and tier_of(lease, self._moves) is Tier.DEVICE:
                lease.tier = Tier.DEVICE
                messages.append(_lease_tier(lease, "used"))
        leases.used.clear()
        changed = self._moves.tiers.changed
        for lease_id in changed:
            # What fell further, of a lease that is not on the device any more.
            fallen = leases.get(lease_id) if lease_id >= 0 else None
            if fallen is not None and fallen.tier != Tier.DEVICE and fallen.state is not LeaseState.ACTIVE:
                tier = tier_of(fallen, self._moves)
                if tier != fallen.tier:
                    fallen.tier = tier
                    messages.append(_lease_tier(fallen, "pressure"))
        changed.clear()
        return messages

    def stats(self) -> EngineStats:
        """Return the counters."""
        return EngineStats(
            self.steps,
            self.step_s,
            self.model_s,
            self._scheduler.num_preemptions,
            self.num_failed_steps,
            self.integrity_errors,
            self._scheduler.num_swapped,
            self._scheduler.joins.num_joins,
            self.move_s,
            self.num_oversized_steps,
        )

    def frame(self, now: float) -> PoolFrame:
        """Return the pool as it is between two steps."""
        scheduler, watch = self._scheduler, self._watch
        pool = scheduler.kv.pool
        self._forget_output(now)
        return PoolFrame(
            step=scheduler.step,
            num_blocks=pool.num_blocks,
            num_free=len(pool.empty),
            num_cached=pool.num_cached,
            num_active=pool.num_active,
            num_shared=pool.num_shared,
            num_evictions=pool.num_evictions,
            output_tokens_per_s=self._num_output / _RATE_WINDOW_S,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            tenants=self._tenants(),
            leases=[self._lease(lease, now) for lease in scheduler.leases if lease.lease_id >= 0]
            if watch.with_leases
            else [],
            states=bytes(pool.states) if watch.with_map else b"",
            owners=_little_endian(pool.owners) if watch.with_map else b"",
            tiers=self._tiers(),
            num_held=sum(len(lease.table.block_ids) for lease in scheduler.leases),
            num_public=pool.public.num_active,
            num_wanted_again=pool.num_wanted_again,
        )

    def _frame_interval_s(self) -> float:
        watch = self._watch
        if not watch.with_leases or watch.interval_s <= 0:
            return watch.interval_s
        return max(watch.interval_s, LEASE_ROW_INTERVAL_S * len(self._scheduler.leases))

    def _forget_output(self, now: float) -> None:
        while self._output and self._output[0][0] <= now - _RATE_WINDOW_S:
            self._num_output -= self._output.popleft()[1]

    def _tenants(self) -> list[TenantPool]:
        scheduler = self._scheduler
        running: dict[Tenant, int] = {}
        waiting: dict[Tenant, int] = {}
        for request in scheduler.requests.values():
            counted = running if request.status is RequestStatus.RUNNING else waiting
            counted[request.tenant] = counted.get(request.tenant, 0) + 1
        rows = []
        for account in scheduler.kv.pool.accounts:
            counts = scheduler.ledger.counts.get(account.tenant, _NO_COUNTS)
            rows.append(
                TenantPool(
                    account.tenant or "",
                    account.num_active,
                    len(account.cached),
                    running.get(account.tenant, 0),
                    waiting.get(account.tenant, 0),
                    counts.prompt_tokens,
                    counts.cached_tokens,
                    counts.output_tokens,
                    account.weight,
                    account.floor,
                    account.num_evicted,
                    account.num_wanted_again,
                )
            )
        return rows

    def _lease(self, lease: Lease, now: float) -> LeasePool:
        is_in_use = lease.state in (LeaseState.ACTIVE, LeaseState.QUEUED)
        holdings = holdings_of(lease.table, self._scheduler.kv.pool)
        return LeasePool(
            LeaseId(lease.lease_id),
            lease.tenant or "",
            holdings.num_blocks,
            holdings.num_shared,
            len(lease.token_ids),
            _row_tier(lease),
            is_in_use,
            holdings.bill,
            _USES[lease.state],
            0.0 if is_in_use else round(now - lease.idle_since, 3),
        )

    def _tiers(self) -> list[TierPool]:
        tiers = self._moves.tiers
        disk = tiers.disk
        rows = []
        if tiers.num_slots:
            rows.append(TierPool(Tier.HOST, tiers.num_slots, tiers.num_used, tiers.num_stored, tiers.num_loaded, 0))
        if disk is not None:
            rows.append(
                TierPool(Tier.DISK, disk.num_blocks, disk.num_used, disk.num_stored, disk.num_loaded, disk.num_refused)
            )
        return rows


def _row_tier(lease: Lease) -> Tier:
    """Return where most of a lease's KV is, as far as that is known without looking below the pool."""
    if 2 * lease.table.num_computed_tokens >= len(lease.token_ids):
        return Tier.DEVICE
    return Tier.TOKENS if lease.tier == Tier.DEVICE else Tier(lease.tier)


def _lease_tier(lease: Lease, why: str) -> LeaseTier:
    return LeaseTier(LeaseId(lease.lease_id), Tier(lease.tier), why, lease.table.num_computed_tokens)


def _little_endian(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
