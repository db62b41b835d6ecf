"""How a waiting request begins to run: a slot, room for its whole prompt, and blocks for its first chunk."""

from __future__ import annotations

from chatd.engine.cost_model import StepRoom
from chatd.engine.draft import Draft
from chatd.engine.messages import WaitReason
from chatd.engine.preemption import choose_over_block_share, choose_over_slot_share
from chatd.engine.request import Request
from chatd.engine.roster import Roster
from chatd.kvcache.block import BlockId
from chatd.kvcache.lease import LeaseState
from chatd.kvcache.manager import Allocation


class Admission:
    """Finds out whether a request can run now, and takes what its first chunk needs.

    Args:
        roster: Says who runs, and sends one of them back to the queue for another one's sake.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._config = roster.config
        self._kv = roster.kv
        self._leases = roster.leases
        self._counters = roster.counters
        self._moves = roster.moves
        self._joins = roster.joins
        self._running = roster.running
        self._beams = roster.beams

    def is_hopeless(self, request: Request) -> bool:
        """Return whether a request found too few blocks, and no more can have become available since."""
        return request.retry_at == self._num_changes()

    def is_under_block_share(self, request: Request) -> bool:
        """Return whether a request's tenant holds less than its share of the blocks."""
        pool = self._kv.pool
        return pool.account(request.tenant).num_active < self._counters.share(request.tenant, pool.num_blocks)

    def find_slot(self, request: Request) -> bool:
        """Make sure of a slot, if need be at the cost of a tenant over its share of them; else say why not."""
        wanted = self._beams.num_slots_of(request)
        while wanted and self._beams.num_slots() + wanted > self._config.max_num_seqs:
            if self.join(request):
                return False
            victim = choose_over_slot_share(self._running, request, self._counters, self._config.max_num_seqs)
            if victim is None or not self._roster.may_preempt():
                request.why = WaitReason.SLOTS
                return False
            self._roster.preempt(victim, request, WaitReason.SLOTS)
        return True

    def join(self, request: Request) -> bool:
        """Set a request aside that needs what a running one is about to compute.

        Nothing is looked up again before another request of its tenant has been admitted.
        """
        if not self._joins.has_news(request):
            return False
        lease = request.lease
        return self._joins.join(
            request, self._kv.get_computed_blocks(lease.table, lease.token_ids, last_too=request.compute_only)
        )

    def take_first_chunk(self, request: Request, room: StepRoom, most: int | None) -> Draft | None:
        """Take the slots of the first chunk, if need be at the cost of a tenant over its share of blocks.

        Args:
            request: Waits; its lease stays reclaimable where it gets nothing.
            room: Of the step.
            most: Tokens that its class may take now; None is no limit.

        Returns:
            None for "not now"; `request.why` says what is missing, or it was set aside since another request computes
            what it needs. No rows where only the prompt is to be computed,
            and all of it was found.
        """
        table = request.lease.table
        self._leases.set_state(request.lease, LeaseState.ACTIVE)
        if request.num_remaining_tokens == 0 and not request.compute_only:
            self._kv.trim(table, request.num_tokens - 1)  # The last token's logits are needed.
        computed = self._kv.get_computed_blocks(table, request.lease.token_ids, last_too=request.compute_only)
        start = self._kv.num_tokens_with(table, computed)
        if start == request.num_tokens:
            if computed:
                self._kv.allocate_slots(table, start, computed)
            return Draft(request, Allocation(table, len(table.block_ids)), start, 0, is_decode=False)
        if self._joins.join(request, computed):
            self._leases.set_state(request.lease, LeaseState.QUEUED, is_offer=False)
            return None
        if self._moves.must_wait(request, start):
            self._leases.set_state(request.lease, LeaseState.QUEUED, is_offer=False)
            return None
        loads = self._moves.take_loads(request, start, room)
        start += len(loads) * self._config.block_size
        num_tokens = self._moves.rows_of(request, start, room, most, after_loads=bool(loads))
        while not (allocation := self._allocate(request, start + num_tokens, computed)):
            needed = self._kv.num_missing_blocks(table, request.num_tokens + 1, computed)
            victim = choose_over_block_share(self._running, request, needed, self._counters, self._kv.pool)
            if victim is None or not self._roster.may_preempt():
                self._moves.release(loads)
                self._leases.set_state(request.lease, LeaseState.QUEUED, is_offer=False)
                request.why = WaitReason.NO_BLOCKS
                request.retry_at = self._num_changes() if victim is None else (-1, -1)
                return None
            self._roster.preempt(victim, request, WaitReason.NO_BLOCKS)
        return Draft(request, allocation, start, num_tokens, is_decode=False, loads=loads)

    def _allocate(self, request: Request, num_tokens: int, computed: list[BlockId]) -> Allocation | None:
        """Allocate the first chunk, if the whole prompt has room beside the prompts that are being computed."""
        kv, table = self._kv, request.lease.table
        if self._running:
            wanted = kv.num_missing_blocks(table, request.num_tokens + 1, computed)
            for other in self._running:
                wanted += max(1, kv.num_blocks_of(other.num_tokens + 1) - len(other.lease.table.block_ids))
            if not self._leases.can_reclaim(table.account, wanted - kv.pool.available(table.account)):
                return None
        return self._leases.allocate_slots(table, num_tokens, computed)

    def _num_changes(self) -> tuple[int, int]:
        """Return what stands still for as long as no more blocks can have become available."""
        return (self._kv.pool.num_freed, self._leases.num_offered)
