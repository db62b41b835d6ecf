"""Who gives way when blocks or slots are short.

A victim loses its blocks and starts over from what the cache still has. It is safe afterwards until it has advanced by
what it lost, so two requests cannot take turns at destroying each other's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chatd.engine.fairness import Tenant, VirtualCounters
from chatd.engine.request import Request
from chatd.kvcache.block_pool import BlockPool


def is_safe(request: Request) -> bool:
    """Return whether a request must not be preempted now."""
    return request.num_computed_tokens < request.safe_until


def choose_victim(running: Sequence[Request], needy: Request, *, safe_too: bool = False) -> Request | None:
    """Return the youngest request of the tenant most over its share of blocks, which may be `needy` itself.

    Args:
        running: All that hold blocks.
        needy: Wants a block.
        safe_too: Choose among the safe ones as well, but never `needy`.

    Returns:
        None where nobody can give way.
    """
    if safe_too:
        candidates = [request for request in running if request is not needy]
    else:
        candidates = [request for request in running if not is_safe(request)]
    if candidates == [needy] and len(running) == 1:
        return None
    return max(candidates, key=_blocks_over_share, default=None)


def choose_over_block_share(
    running: Sequence[Request], needy: Request, num_needed: int, counters: VirtualCounters, pool: BlockPool
) -> Request | None:
    """Return whom a tenant may preempt that stays within its share of blocks: the youngest of one over its own.

    Who would be over its share afterwards has to wait: the other one could take the blocks back at once.
    """
    if pool.account(needy.tenant).num_active + num_needed > counters.share(needy.tenant, pool.num_blocks):
        return None
    over = {
        tenant
        for tenant in {request.tenant for request in running}
        if pool.account(tenant).num_active > counters.share(tenant, pool.num_blocks)
    }
    return max(_unsafe_of(running, over - {needy.tenant}), key=_blocks_over_share, default=None)


def choose_over_slot_share(
    running: Sequence[Request], needy: Request, counters: VirtualCounters, max_num_seqs: int
) -> Request | None:
    """Return whom a tenant under its share of slots may preempt: the youngest of the one most over its own."""
    slots: dict[Tenant, int] = {}
    for request in running:
        slots[request.tenant] = slots.get(request.tenant, 0) + 1

    def share(tenant: Tenant) -> float:
        return max(1.0, counters.share(tenant, max_num_seqs))

    if slots.get(needy.tenant, 0) + 1 > share(needy.tenant):
        return None
    over = {tenant for tenant, count in slots.items() if count > share(tenant)}
    return max(
        _unsafe_of(running, over - {needy.tenant}),
        key=lambda request: (slots[request.tenant] / counters.weight(request.tenant), request.admission),
        default=None,
    )


def _unsafe_of(running: Iterable[Request], tenants: set[Tenant]) -> list[Request]:
    return [request for request in running if request.tenant in tenants and not is_safe(request)]


def _blocks_over_share(request: Request) -> tuple[float, int]:
    account = request.lease.table.account
    return (account.num_active / account.weight, request.admission)
