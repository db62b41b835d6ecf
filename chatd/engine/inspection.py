"""What is known of single blocks of the pool, for a person who points at them. Reads, and changes nothing.

No step pays for it: a block keeps two times, and who holds it is looked up in the block tables when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from chatd.engine.engine_messages import Inspected
from chatd.engine.front_messages import InspectBlocks
from chatd.engine.pool_messages import MAX_INSPECTED, BlockFacts, BlockHolder
from chatd.engine.scheduler import Scheduler
from chatd.engine.vocabulary import LeaseId
from chatd.kvcache.block import BlockId, KVCacheBlock
from chatd.kvcache.block_pool import EMPTY, SHARED
from chatd.kvcache.lease import Lease
from chatd.kvcache.leases import LeaseTable


def inspect_blocks(message: InspectBlocks, scheduler: Scheduler, now: float) -> Inspected:
    """Return what is known of the blocks that a message names, between two steps."""
    pool = scheduler.kv.pool
    first = max(0, message.first)
    numbers = range(first, first + min(max(0, message.num_blocks), MAX_INSPECTED))
    if message.tenant is None:
        numbered = [(number, BlockId(number)) for number in numbers if number < pool.num_blocks]
    else:
        numbered = _own_blocks(scheduler, message.tenant, numbers)
    taken = [(number, block_id) for number, block_id in numbered if pool.states[block_id] != EMPTY]
    holders = _holders({block_id for _, block_id in taken}, scheduler.leases, scheduler.config.block_size)
    rows = [_facts(number, scheduler, pool.blocks[block_id], holders[block_id], now) for number, block_id in taken]
    return Inspected(message.question, scheduler.step, rows)


def _own_blocks(scheduler: Scheduler, tenant: str, numbers: range) -> list[tuple[int, BlockId]]:
    """Return those of a tenant's blocks that have these numbers; the counts of its pool frames number them alike.

    Held ones are in the order of the leases and of the places in them, cached ones in that in which they go, so that
    nothing of it tells where in the pool they are.
    """
    pool = scheduler.kv.pool
    account = pool.find_account(tenant)
    if account is None:
        return []
    shared: dict[BlockId, None] = {}
    active: dict[BlockId, None] = {}
    for lease in scheduler.leases:
        if lease.tenant == tenant:
            for block_id in lease.table.block_ids:
                if pool.owners[block_id] == account.index:
                    (shared if pool.states[block_id] == SHARED else active)[block_id] = None
    held = [*shared, *active]
    numbered = [(number, held[number]) for number in numbers if number < len(held)]
    # What plans in flight alone hold has numbers too, and there is nothing to tell of it.
    first_cached = account.num_active
    wanted = range(max(numbers.start, first_cached), max(numbers.stop, first_cached))
    cached = islice(account.cached, wanted.start - first_cached, wanted.stop - first_cached)
    numbered += [(number, block.block_id) for number, block in zip(wanted, cached, strict=False)]
    return numbered


def _holders(
    block_ids: set[BlockId], leases: LeaseTable | Iterable[Lease], block_size: int
) -> dict[BlockId, list[BlockHolder]]:
    """Return for each block the leases of the front's that have it in their tables."""
    holders: dict[BlockId, list[BlockHolder]] = {block_id: [] for block_id in block_ids}
    for lease in leases:
        table = lease.table
        if lease.lease_id < 0 or block_ids.isdisjoint(table.block_ids):
            continue
        for place, block_id in enumerate(table.block_ids):
            if block_id in block_ids:
                num_tokens = max(0, min(block_size, table.num_computed_tokens - place * block_size))
                holders[block_id].append(BlockHolder(LeaseId(lease.lease_id), place, num_tokens))
    return holders


def _facts(
    number: int, scheduler: Scheduler, block: KVCacheBlock, holders: list[BlockHolder], now: float
) -> BlockFacts:
    entry, account = block.entry, block.account
    if entry is not None:
        place, num_tokens = entry.place, scheduler.config.block_size
    else:
        place = holders[0].place if holders else -1
        num_tokens = max((holder.num_tokens for holder in holders), default=0)
    return BlockFacts(
        number,
        scheduler.kv.pool.states[block.block_id],
        (account.tenant or "") if account is not None else "",
        block.ref_count,
        entry is not None,
        place,
        num_tokens,
        round(now - block.since, 3),
        None if block.hit_at is None else round(now - block.hit_at, 3),
        holders,
    )
