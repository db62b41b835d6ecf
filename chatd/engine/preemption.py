"""Who gives way when blocks or slots are short.

A victim's blocks are saved below the pool where that takes less than computing them again; else it loses them and
starts over from what the cache still has. It is safe afterwards until it has advanced by what it lost, so two requests
cannot take turns at destroying each other's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chatd.engine.cost_model import CostModel, num_pairs
from chatd.engine.engine_config import EngineConfig
from chatd.engine.fairness import Tenant, VirtualCounters
from chatd.engine.request import Request
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.manager import KVCacheManager


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

    Who would be over its share afterwards has to wait: the other one could take the blocks back at once. Only tenants
    that have been served as much give way, as for slots: a pool that holds few requests has no whole one in each share.
    """
    if pool.account(needy.tenant).num_active + num_needed > counters.share(needy.tenant, pool.num_blocks):
        return None
    behind = counters.counter(needy.tenant)
    over = {
        tenant
        for tenant in {request.tenant for request in running}
        if pool.account(tenant).num_active > counters.share(tenant, pool.num_blocks)
        and counters.counter(tenant) >= behind
    }
    return max(_unsafe_of(running, over - {needy.tenant}), key=_blocks_over_share, default=None)


def choose_over_slot_share(
    running: Sequence[Request], needy: Request, counters: VirtualCounters, max_num_seqs: int
) -> Request | None:
    """Return whom a tenant under its share of slots may preempt: the youngest of the one most over its own.

    Everybody may have one slot. Only tenants that have been served as much give way: else one whose requests need few
    steps, or one of small weight among few slots, would be served more than its weight by what others lose.
    """
    slots: dict[Tenant, int] = {}
    for request in running:
        slots[request.tenant] = slots.get(request.tenant, 0) + 1

    def share(tenant: Tenant) -> float:
        return max(1.0, counters.share(tenant, max_num_seqs))

    if slots.get(needy.tenant, 0) + 1 > share(needy.tenant):
        return None
    behind = counters.counter(needy.tenant)
    over = {t for t, count in slots.items() if count > share(t) and counters.counter(t) >= behind}
    return max(
        _unsafe_of(running, over - {needy.tenant}),
        key=lambda request: (slots[request.tenant] / counters.weight(request.tenant), request.admission),
        default=None,
    )


class SwapEstimate:
    """What a victim costs: its blocks copied down and up again, or computed again. Measured rates, predicted seconds.

    Args:
        config: The engine core's, with what copies take.
        kv: Block tables.
        cost: What computing takes.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager, cost: CostModel) -> None:
        self._config = config
        self._kv = kv
        self._cost = cost

    def is_swap_cheaper(self, request: Request, num_own: int, num_missing: int) -> bool:
        """Return whether a victim comes back sooner by copies.

        Args:
            request: The victim, with its blocks.
            num_own: Full blocks that it alone holds.
            num_missing: Of those, the ones that are not below the pool yet.
        """
        return self._swap_s(request.num_computed_tokens, num_own, num_missing) < self._recompute_s(request)

    def compute_s(self, start: int, num_tokens: int) -> float:
        """Return what rows take beside the rows of others; where a prompt takes steps of its own, those too."""
        parameters = self._cost.parameters
        rows_s = parameters.step_s(num_tokens, num_pairs(start, num_tokens)) - parameters.fixed_s
        return rows_s + parameters.fixed_s * (num_tokens // self._config.max_num_batched_tokens)

    def _swap_s(self, computed: int, num_own: int, num_missing: int) -> float:
        costs = self._config.transfer_costs
        # The tail that is no full block is computed in any case.
        tail = computed % self._config.block_size
        seconds = costs.host_fixed_s + num_own * costs.host_in_s_per_block
        if num_missing:
            seconds += costs.host_fixed_s + num_missing * costs.host_out_s_per_block
        return seconds + self.compute_s(computed - tail, tail)

    def _recompute_s(self, request: Request) -> float:
        """Return what it takes to compute again what a request alone holds: what others hold too stays."""
        table, blocks = request.lease.table, self._kv.pool.blocks
        num_kept = 0
        for block_id in table.block_ids:
            if blocks[block_id].ref_count == 1:
                break
            num_kept += 1
        start = min(num_kept * self._config.block_size, table.num_computed_tokens)
        return self.compute_s(start, table.num_computed_tokens - start)


def _unsafe_of(running: Iterable[Request], tenants: set[Tenant]) -> list[Request]:
    return [request for request in running if request.tenant in tenants and not is_safe(request)]


def _blocks_over_share(request: Request) -> tuple[float, int]:
    account = request.lease.table.account
    return (account.num_active / account.weight, request.admission)
