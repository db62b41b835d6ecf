"""What must always hold in the engine (the numbers are those of the design), checked from outside.

`check` is one pass; `slices` does the same work in short pieces for an engine that is idle. Both only read.
"""

from __future__ import annotations

from collections.abc import Iterator

from chatd.engine.request import RequestStatus
from chatd.engine.scheduler import Scheduler
from chatd.kvcache.block import KVCacheBlock
from chatd.kvcache.block_pool import ACTIVE, CACHED, EMPTY, NOBODY, SHARED, Account, BlockPool
from chatd.kvcache.lease import Lease, LeaseState
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.prefix_index import PrefixEntry

SLICE_UNITS = 2000


def check(scheduler: Scheduler) -> None:
    """Check everything between two steps.

    Raises:
        AssertionError: Names the invariant and the thing that breaks it.
    """
    for _ in _steps(scheduler):
        pass


def slices(scheduler: Scheduler) -> Iterator[None]:
    """Check everything, `SLICE_UNITS` blocks or table entries between two yields; state must not change meanwhile.

    Raises:
        AssertionError: As `check`.
    """
    units = 0
    for cost in _steps(scheduler):
        units += cost
        if units >= SLICE_UNITS:
            units = 0
            yield


def _steps(scheduler: Scheduler) -> Iterator[int]:
    pool, leases = scheduler.kv.pool, scheduler.leases
    expected = [0] * pool.num_blocks
    _count_flights(scheduler, expected)
    num_idle = num_tokens = 0
    held: dict[str | None, tuple[int, int]] = {}
    for lease in leases:
        _check_lease(scheduler, lease, expected)
        num_idle += lease.state in (LeaseState.IDLE, LeaseState.ATTACHED)
        num_tokens += len(lease.token_ids)
        number, ids = held.get(lease.tenant, (0, 0))
        held[lease.tenant] = (number + 1, ids + len(lease.token_ids))
        yield len(lease.table.block_ids) + 4
    assert leases.num_tokens == num_tokens, "the sum of the leases' ids is wrong"
    for tenant, counted in held.items():
        assert leases.num_held(tenant) == counted, f"{tenant} has {counted} leases and ids"
    assert num_idle + len(scheduler.requests) == len(leases), "a lease is neither idle nor in use"
    yield from _check_requests(scheduler, leases)
    yield from _check_blocks(pool, expected)
    yield from _check_queues(pool)
    yield from _check_index(pool)
    loads = [block for flight in scheduler.flights for draft in flight.drafts.values() for block in draft.loads]
    yield from scheduler.moves.tiers.check(loads)


def _count_flights(scheduler: Scheduler, expected: list[int]) -> None:
    """Count what plans in flight hold beside the tables."""
    for flight in scheduler.flights:
        for block_id in flight.stores.held:
            expected[block_id] += 1
        for draft in flight.drafts.values():
            request, table = draft.request, draft.request.lease.table
            if draft.is_void:
                assert request.status is RequestStatus.FINISHED, f"{request}'s part in plan {flight.plan.step} is void"
                continue
            assert request.status is RequestStatus.RUNNING, f"{request} is in plan {flight.plan.step}"
            end = draft.start + draft.num_tokens
            assert table.num_computed_tokens < end <= table.num_planned_tokens, f"{request} is not planned to {end}"
            if draft.allocation.copy_source is not None:
                expected[draft.allocation.copy_source] += 1
    for block_ids in scheduler.kv.limbo:
        assert scheduler.flights, f"blocks {block_ids} are held by no plan"
        for block_id in block_ids:
            expected[block_id] += 1


def _check_lease(scheduler: Scheduler, lease: Lease, expected: list[int]) -> None:
    pool, table, size = scheduler.kv.pool, lease.table, scheduler.config.block_size
    computed = table.num_computed_tokens
    assert computed <= len(lease.token_ids), f"lease {lease.lease_id} computed {computed} of {len(lease.token_ids)}"
    planned = table.num_planned_tokens
    assert planned == computed or scheduler.kv.is_in_flight(table), f"lease {lease.lease_id} is planned to {planned}"
    assert len(table.block_ids) == -(-planned // size), f"lease {lease.lease_id} holds blocks that it does not need"
    assert table.num_registered_blocks <= computed // size, f"I7: lease {lease.lease_id} registered what is not full"
    adopted = bool(table.adoptions)
    previous: PrefixEntry | None = None
    for block_id in table.block_ids:
        expected[block_id] += 1
        block = pool.blocks[block_id]
        entry = block.entry
        if entry is not None:
            assert entry.namespace == table.namespace or block.account is pool.public, (
                f"I9: lease {lease.lease_id} holds block {block_id} of another namespace"
            )
            assert adopted or entry.parent is previous, f"lease {lease.lease_id} holds {block} after another parent"
        previous = entry
    for _, block_id in table.adoptions:
        expected[block_id] += 1


def _check_requests(scheduler: Scheduler, leases: LeaseTable) -> Iterator[int]:
    running, waiting = set(scheduler.running), set(scheduler.waiting)
    assert not running & waiting, "I13: a request waits and runs"
    assert running | waiting == set(scheduler.requests.values()), "I13: a request is nowhere"
    assert len(running) == len(scheduler.running), "I13: a request runs twice"
    assert len(running) <= scheduler.config.max_num_seqs, f"{len(running)} requests run"
    assert len(scheduler.waiting) == len(waiting), "I13: a request waits twice"
    for request in scheduler.requests.values():
        is_running = request in running
        assert leases.get(request.lease.lease_id) is request.lease, f"{request}'s lease is closed"
        assert (request.status is RequestStatus.RUNNING) == is_running, f"I13: {request} is in the wrong state"
        state = LeaseState.ACTIVE if is_running else LeaseState.QUEUED
        assert request.lease.state is state, f"{request}'s lease is {request.lease.state}"
        may_hold = not request.is_preempted or request.group is not None
        assert is_running or may_hold or not request.lease.table.block_ids, f"{request} holds blocks"
        has_work = request.num_remaining_tokens >= 1 or request.is_stalled
        assert not is_running or has_work, f"I8: {request} has nothing to compute"
    for request in scheduler.requests.values():
        if scheduler.samples.is_waiting(request):
            assert scheduler.waiting.is_aside(request), f"{request} waits for another one's prompt and is a candidate"
        if request.is_stalled and request.status is RequestStatus.WAITING:
            assert scheduler.waiting.is_aside(request), f"{request} waits for other beams and is a candidate"
    for group in scheduler.joins.groups:
        leader = group.leader
        assert leader.request_id in scheduler.requests, f"I13: {leader} has ended and leads"
        assert not scheduler.joins.has_joined(leader), f"{leader} leads and waits for another one's prefix"
        assert group.joiners, f"{leader} leads nobody"
        for joiner, num_shared in group.joiners.values():
            assert scheduler.waiting.is_aside(joiner), f"{joiner} has joined and is a candidate"
            assert joiner.tenant == leader.tenant, f"{joiner} has joined a request of another tenant"
            assert num_shared < joiner.num_tokens or joiner.compute_only, f"I8: {joiner} waits for all of its prompt"
            assert leader.num_computed_tokens < num_shared, f"{joiner} waits for what is computed"
    busy = {request.lease.lease_id for request in scheduler.requests.values()}
    assert len(busy) == len(scheduler.requests), "two requests on one lease"
    yield len(scheduler.requests)


def _check_blocks(pool: BlockPool, expected: list[int]) -> Iterator[int]:
    states, owners = pool.states, pool.owners
    num_active = dict.fromkeys([*pool.accounts, pool.public], 0)
    num_shared = num_registered = 0
    for block, count in zip(pool.blocks, expected, strict=True):
        ref_count = block.ref_count
        assert ref_count == count, f"I2: {block} is held {count} times"
        assert (block.prev is not None) == (ref_count == 0), f"I3: {block} is in a queue and held, or in neither"
        if block.entry is not None:
            num_registered += 1
            assert block.entry.block_id == block.block_id, f"I5: {block}'s entry names block {block.entry.block_id}"
        state = _state_of(block)
        assert states[block.block_id] == state, f"{block} is shown as {states[block.block_id]}"
        account = block.account
        assert (account is None) == (state == EMPTY), f"{block} is charged to {account}"
        assert owners[block.block_id] == (NOBODY if account is None else account.index), f"{block}'s owner is wrong"
        if account is not None and ref_count:
            num_active[account] += 1
            num_shared += ref_count > 1
        if block.block_id % SLICE_UNITS == 0:
            yield SLICE_UNITS
    assert num_registered == len(pool.index), f"I5: {len(pool.index)} entries for {num_registered} blocks"
    assert num_shared == pool.num_shared, f"{num_shared} blocks are shared, the pool counts {pool.num_shared}"
    assert sum(num_active.values()) == pool.num_active, "I1: free + cached + in use is not all"
    for account, number in num_active.items():
        assert number == account.num_active, f"I1: {account.tenant} has {number} blocks, not {account.num_active}"


def _state_of(block: KVCacheBlock) -> int:
    if block.ref_count:
        return ACTIVE if block.ref_count == 1 else SHARED
    return EMPTY if block.entry is None else CACHED


def _check_queues(pool: BlockPool) -> Iterator[int]:
    accounts: list[Account | None] = [None, pool.public, *pool.accounts]
    for account in accounts:
        queue = pool.empty if account is None else account.cached
        length = 0
        seen: set[PrefixEntry | None] = set()
        for block in queue:
            length += 1
            if block.entry is not None and block.entry.parent is not None:
                seen.add(block.entry)
                assert block.entry.parent not in seen, f"{block} is evicted after what it hangs on"
            assert length <= len(queue), "I3: a queue is longer than it counts"
            assert block.ref_count == 0, f"I3: {block} is in a queue"
            assert (block.entry is None) == (account is None), f"{block} is in the wrong queue"
            assert block.account is account, f"{block} is in another account's queue"
            if length % SLICE_UNITS == 0:
                yield SLICE_UNITS
        assert length == len(queue), f"I3: a queue counts {len(queue)} and has {length}"
        yield length
    cached = sum(len(account.cached) for account in accounts if account is not None)
    assert cached == pool.num_cached, f"I1: {cached} blocks are cached, the pool counts {pool.num_cached}"
    for owner in pool.accounts:
        kept = len(owner.cached) - max(0, owner.num_resident - owner.floor)
        assert owner.num_protected == max(0, kept), f"{owner.tenant}'s floor protects {owner.num_protected} blocks"
        if owner.cached:
            assert owner.heap_key is not None, f"{owner.tenant} has cached blocks that nobody could take"
            assert owner.heap_key <= -owner.over_share, f"{owner.tenant} is further down than it should be"
    protected = sum(owner.num_protected for owner in pool.accounts)
    given = len(pool.empty) + cached - protected
    assert pool.available(pool.public) == given, f"{given} blocks are beyond all floors, the pool counts otherwise"


def _check_index(pool: BlockPool) -> Iterator[int]:
    for number, entry in enumerate(pool.index):
        block = pool.blocks[entry.block_id]
        assert block.entry is entry, f"I5: entry {entry.serial} is not its block's"
        if entry.parent is not None:
            parent = pool.blocks[entry.parent.block_id]
            assert parent.entry is entry.parent, f"I6: block {entry.block_id} hangs on a block that is gone"
            assert not block.ref_count or parent.ref_count, f"block {entry.block_id} is held, its parent is not"
        if number % SLICE_UNITS == 0:
            yield SLICE_UNITS
