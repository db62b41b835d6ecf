"""Blocks that a plan moves between the pool and the tiers below it, and when that is worth its time.

Three kinds: a prompt's next blocks are loaded in place of being computed; a preempted request's are saved, where
computing them again would take longer; idle leases' are copied down ahead of need, so that reclaiming them is a drop.
Like everything in a plan they count only when it is committed. Decides nothing by a clock and reads no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chatd.engine.cost_model import CostModel, StepRoom
from chatd.engine.draft import Draft
from chatd.engine.engine_config import EngineConfig
from chatd.engine.fairness import WaitingRequests
from chatd.engine.lower_blocks import LowerBlocks
from chatd.engine.messages import WaitReason
from chatd.engine.plan import BlockMove
from chatd.engine.preemption import SwapEstimate
from chatd.engine.request import Request, RequestStatus
from chatd.kvcache.block import BlockId
from chatd.kvcache.block_table import BlockTable
from chatd.kvcache.host_block import HostBlock
from chatd.kvcache.lease import Lease, LeaseState
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.tiers import Tiers

IDLE_SLICE_S = 2e-3
"""What one slice of copying takes while nothing runs."""

BUSY_PART = 0.02
"""Part of the steps' time that goes to copying ahead of need."""

MAX_STORES = 64
"""Copied ahead of need by one plan at most, however fast that is said to be."""

# What looking at one more block of a lease takes, copied or not.
_VISIT_S = 5e-6
# Beyond this nothing is saved up for later: a long step must not be followed by a burst.
_MAX_CREDIT_S = 5e-3


@dataclass(slots=True)
class PlannedStores:
    """What one plan copies down.

    Attributes:
        blocks: Each move, and where it goes.
        held: Blocks of idle leases, which must stay as they are until the plan has ended.
        tables: That these are in.
    """

    blocks: list[tuple[BlockMove, HostBlock]] = field(default_factory=list)
    held: list[BlockId] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)


class BlockMoves:
    """The moves of the plan that is being made, and what becomes of those of plans in flight.

    Args:
        config: The engine core's.
        kv: Block tables.
        leases: Of the same manager.
        waiting: Where a request is set aside while the disk reads for it.
        tiers: Below the pool.
        cost: What computing takes.

    Attributes:
        below: What leases have there.
        is_on: There is something below the pool.
        is_waiting: A running request could not be placed in this plan because the disk reads for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        leases: LeaseTable,
        waiting: WaitingRequests,
        tiers: Tiers,
        cost: CostModel,
    ) -> None:
        self.tiers = tiers
        self.below = LowerBlocks(config, kv, tiers)
        self.is_on = self.below.is_on
        self._config = config
        self._kv = kv
        self._leases = leases
        self._waiting = waiting
        self._estimate = SwapEstimate(config, kv, cost)
        self._planned = PlannedStores()
        self._credit_s = 0.0
        self._full_at: tuple[int, int] | None = None
        self.is_waiting = False
        # By request that was set aside, what the disk was reading for it then.
        self._restoring: dict[Request, list[bytes]] = {}
        if self.is_on:
            leases.is_below = self.below.is_below

    @property
    def num_restoring(self) -> int:
        """Requests that are set aside until the disk has read for them."""
        return len(self._restoring)

    def is_restoring(self, request: Request) -> bool:
        """Return whether a request is set aside until the disk has read for it."""
        return request in self._restoring

    @property
    def has_chores(self) -> bool:
        """Whether an idle engine has something to copy, or waits for the disk."""
        return self.tiers.is_moving or (bool(self._leases.dirty) and not self._is_full)

    # A plan.

    def poll(self, now: float) -> None:
        """Take in what the disk has done since the last plan, and give it more to do."""
        self.is_waiting = False
        self.tiers.poll(now)
        self.tiers.write_out()
        for request in list(self._restoring):
            digests = self._restoring[request]
            while digests and not self.tiers.is_coming(digests[-1]):
                digests.pop()
            if not digests:
                del self._restoring[request]
                if self._waiting.is_aside(request):
                    self._waiting.put_back(request)

    def take_stores(self) -> PlannedStores:
        """Return what the plan that is made copies down; the next one begins with nothing."""
        stores, self._planned = self._planned, PlannedStores()
        return stores

    def commit(self, stores: PlannedStores, drafts: Iterable[Draft]) -> None:
        """Let what was stored be found, and let go of what was loaded."""
        for _, block in stores.blocks:
            self.tiers.settle(block)
        for draft in drafts:
            self.release(draft.loads)
            self.tiers.num_loaded += len(draft.loads)
        self._kv.pool.release(stores.held)

    def discard(self, stores: PlannedStores, drafts: Iterable[Draft]) -> None:
        """Undo a plan that failed. What it loaded may be why, so that is given up; a retry computes it."""
        for _, block in stores.blocks:
            self.tiers.cancel(block)
        for draft in drafts:
            self.release(draft.loads)
            for block in draft.loads:
                self.tiers.forget(block.digest)
        self._kv.pool.release(stores.held)

    def release(self, loads: Sequence[HostBlock]) -> None:
        """Let go of what a request has loaded, or will not; tails first, so that they are given up first."""
        for block in reversed(loads):
            self.tiers.unpin(block)

    # Coming back.

    def must_wait(self, request: Request, start: int) -> bool:
        """Ask the disk for what goes on at `start`; True while it reads any of that, so that waiting spares computing.

        A request that waits for admission is set aside meanwhile, and stands in nobody's way.
        """
        if start % self._config.block_size or self.tiers.is_empty or self.tiers.disk is None:
            return False
        # What has come already must not be given up for what comes after it.
        ready: list[HostBlock] = []
        coming: list[bytes] = []
        is_busy = False
        for place in range(start // self._config.block_size, self._num_loadable(request.lease)):
            block = self.below.find(request.lease, place)
            if block is not None:
                self.tiers.pin(block)
                ready.append(block)
                continue
            digest = self._find_on_disk(request, place)
            if digest is None:
                break
            if not self.tiers.is_coming(digest) and not self._fetch(request, place, digest):
                is_busy = self.tiers.is_reading
                break
            coming.append(digest)
        self.release(ready)
        if not coming and (ready or not is_busy):
            return False
        if request.status is RequestStatus.WAITING:
            self._restoring[request] = coming
            request.why = WaitReason.RESTORE
            self._waiting.set_aside(request)
        else:
            self.is_waiting = True
        return True

    def take_loads(self, request: Request, start: int, room: StepRoom) -> list[HostBlock]:
        """Return the blocks, now pinned, that go on at `start` and that the step has room to load."""
        size = self._config.block_size
        if start % size or not self.is_on or self.tiers.is_empty:
            return []
        lease, first = request.lease, start // size
        end = self._num_loadable(lease)
        costs = self._config.transfer_costs
        most = room.loads_within(costs.host_fixed_s, costs.host_in_s_per_block)
        found: list[HostBlock] = []
        for place in range(first, min(end, first + most)):
            block = self.below.find(lease, place)
            if block is None:
                break
            self.tiers.pin(block)
            found.append(block)
        request.has_loaded |= bool(found)
        if found:
            room.take_loads(costs.host_fixed_s + len(found) * costs.host_in_s_per_block)
        return found

    def rows_of(self, request: Request, start: int, room: StepRoom, most: int | None, *, after_loads: bool) -> int:
        """Return how many rows of a prompt from `start` on the step has room for, up to the next block to be loaded.

        At least one; but none in a step that was filled by loads, or where more is to be loaded in the next.
        """
        if after_loads and (room.is_full or self._is_below_next(request, start // self._config.block_size)):
            return 0
        num_rows = room.rows_of(start, request.num_tokens - start, most)
        if not request.has_loaded:
            return num_rows
        size = self._config.block_size
        end = min((start + num_rows) // size, self._num_loadable(request.lease))
        for place in range(start // size + 1, end):
            if self.below.find(request.lease, place) is not None:
                return place * size - start
        return num_rows

    # Going down.

    def stays_cached(self, request: Request) -> bool:
        """Return whether what a request gives up will likely be in the pool when it comes back.

        It is what was used last, so all else that is empty or cached goes first; beside a step's rows a copy costs so
        little that it is worth its price where less than the request's own number of blocks stands before them.
        """
        table = request.lease.table
        return self._config.preemption != "swap" and self._kv.pool.available(table.account) >= len(table.block_ids)

    def save(self, request: Request) -> int:
        """Store the full blocks of a request that is being preempted, where that beats computing them again.

        Returns:
            How many are below the pool now; 0 where they are given up.
        """
        lease, mode = request.lease, self._config.preemption
        size, computed = self._config.block_size, lease.table.num_computed_tokens
        num_full = computed // size
        if not self.is_on or mode == "recompute" or not num_full:
            return 0
        own = [place for place in range(num_full) if self._kv.pool.blocks[lease.table.block_ids[place]].ref_count == 1]
        missing = [place for place in own if not self.below.is_below(lease, place)]
        if not own or (mode == "auto" and not self._estimate.is_swap_cheaper(request, len(own), len(missing))):
            return 0
        num_saved = len(own) - len(missing)
        # Room may end before the blocks do, and what comes first is of use without the rest.
        blocks = []
        for place in missing:
            block = self._store(lease, place, is_ahead=False)
            if block is None:
                break
            blocks.append(block)
        # Tails first, so that they are given up before what they hang on.
        self._planned.blocks += reversed(blocks)
        return num_saved + len(blocks)

    def store_ahead(self, step_s: float) -> None:
        """Copy down some blocks of idle leases beside a step that takes so long."""
        if self._leases.dirty:
            most_s = max(_MAX_CREDIT_S, self._config.transfer_costs.host_out_s_per_block)
            self._credit_s = min(most_s, self._credit_s + BUSY_PART * step_s)
            self._credit_s -= self._store_ahead(self._credit_s)

    def store_idle(self) -> None:
        """Copy down a slice of what idle leases hold, with nothing else to do."""
        self._store_ahead(max(IDLE_SLICE_S, self._config.transfer_costs.host_out_s_per_block))

    # Parts.

    @property
    def _is_full(self) -> bool:
        """Nothing could be stored the last time, and nothing has changed since."""
        return self._full_at == self._num_changes()

    def _num_changes(self) -> tuple[int, int]:
        return (self._kv.pool.num_evictions, self.tiers.num_offers)

    def _num_loadable(self, lease: Lease) -> int:
        """Full blocks, but never the one with the last token, whose logits are needed."""
        return (len(lease.token_ids) - 1) // self._config.block_size

    def _is_below_next(self, request: Request, place: int) -> bool:
        """Return whether a block can be loaded, or fetched, instead of being computed."""
        if place >= self._num_loadable(request.lease):
            return False
        return self.below.find(request.lease, place) is not None or self._find_on_disk(request, place) is not None

    def _find_on_disk(self, request: Request, place: int) -> bytes | None:
        """Return the name of a block that the disk reads already, or would read for this request."""
        for _, digest in self.below.names.of(request.lease, place):
            if self.tiers.is_coming(digest):
                return digest
            # What was fetched for this request and is gone again would be gone the next time as well.
            if place >= request.num_fetched_blocks and self.tiers.is_on_disk(digest) and self._is_worth_reading:
                return digest
        return None

    def _fetch(self, request: Request, place: int, digest: bytes) -> bool:
        lease = request.lease
        tenant = lease.tenant if digest == lease.digests[place] else None
        origin = self.below.names.origin(tenant, lease, place)
        if not self.tiers.fetch(digest, origin, tenant, lease.lease_id):
            return False
        request.num_fetched_blocks = place + 1
        request.has_loaded = True
        return True

    @property
    def _is_worth_reading(self) -> bool:
        """Whether the disk reads a block sooner than it is computed."""
        size = self._config.block_size
        return self._config.transfer_costs.disk_in_s_per_block <= self._estimate.compute_s(0, size)

    def _store(self, lease: Lease, place: int, *, is_ahead: bool) -> tuple[BlockMove, HostBlock] | None:
        tenant, digest = self.below.names.in_pool(lease, place)
        block_id = lease.table.block_ids[place]
        origin = self.below.names.origin(tenant, lease, place)
        entry = self._kv.pool.blocks[block_id].entry
        block = self.tiers.store(digest, origin, tenant, lease.lease_id, entry, is_ahead=is_ahead)
        return None if block is None else (BlockMove(block_id, block.slot), block)

    def _store_ahead(self, seconds: float) -> float:
        """Copy down until the time is spent; return what was."""
        per_block_s = self._config.transfer_costs.host_out_s_per_block
        spent_s = 0.0
        dirty = self._leases.dirty
        if self._is_full:
            return 0.0
        while dirty and spent_s + per_block_s <= seconds and len(self._planned.blocks) < MAX_STORES:
            lease = next(iter(dirty.values()))
            num_full = lease.table.num_computed_tokens // self._config.block_size
            if not 0 <= lease.next_dirty <= num_full:
                lease.next_dirty = num_full
            if lease.state is LeaseState.ACTIVE or not lease.next_dirty:
                # One that is in use comes again when its turn ends.
                if lease.state is not LeaseState.ACTIVE:
                    lease.num_clean = num_full
                lease.next_dirty = -1
                del dirty[lease.lease_id]
                continue
            # From the tail, which is what the pool wants back first, and so what the tiers give up first.
            place = lease.next_dirty - 1
            spent_s += _VISIT_S
            _, digest = self.below.names.in_pool(lease, place)
            if self.tiers.is_below(digest):
                self.tiers.touch(digest, lease.lease_id)
            else:
                store = self._store(lease, place, is_ahead=True)
                if store is None:
                    self._full_at = self._num_changes()
                    break
                self._planned.blocks.append(store)
                self._hold(lease.table, place)
                spent_s += per_block_s
            lease.next_dirty = place
        return spent_s

    def _hold(self, table: BlockTable, place: int) -> None:
        block_id = table.block_ids[place]
        self._kv.pool.hold((block_id,))
        self._planned.held.append(block_id)
        if not self._planned.tables or self._planned.tables[-1] is not table:
            self._planned.tables.append(table)
