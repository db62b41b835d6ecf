"""Who gives way: the youngest of the tenant most over its share, but nobody who has just lost its work."""

from types import SimpleNamespace

import pytest

from chatd.engine.cost_model import CostModel, CostParameters
from chatd.engine.fairness import VirtualCounters
from chatd.engine.preemption import SwapEstimate, choose_over_block_share, choose_over_slot_share, choose_victim
from chatd.engine.transfer_costs import TransferCosts
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.prefix_index import PrefixIndex
from chatd.testing.engine import engine_config


class FakeTable:
    def __init__(self, account):
        self.account = account


class FakeLease:
    def __init__(self, account):
        self.table = FakeTable(account)


class FakeRequest:
    """What preemption reads of a request."""

    def __init__(self, pool, admission, tenant="acme", blocks=1, computed=10, safe_until=0):
        self.tenant = tenant
        self.admission = admission
        self.num_computed_tokens = computed
        self.safe_until = safe_until
        self.lease = FakeLease(pool.account(tenant))
        assert pool.allocate(pool.account(tenant), blocks) is not None


@pytest.fixture
def pool():
    pool = BlockPool(32, PrefixIndex())
    pool.account("blue", 3.0)
    return pool


def counters_of(*tenants):
    counters = VirtualCounters({"blue": 3.0})
    for tenant in tenants:
        counters.enter(tenant)
    return counters


def test_the_youngest_gives_way_even_if_it_is_the_one_in_need(pool):
    old, young = FakeRequest(pool, 1), FakeRequest(pool, 2)
    assert choose_victim([old, young], old) is young
    assert choose_victim([old, young], young) is young


def test_the_tenant_most_over_its_share_gives_way_by_weight(pool):
    acme, blue = FakeRequest(pool, 1, "acme", 3), FakeRequest(pool, 2, "blue", 6)
    assert choose_victim([acme, blue], blue) is acme


def test_a_victim_is_safe_until_it_has_advanced_by_what_it_lost(pool):
    old, young = FakeRequest(pool, 1), FakeRequest(pool, 2, computed=10, safe_until=11)
    assert choose_victim([old, young], old) is old
    young.num_computed_tokens = 11
    assert choose_victim([old, young], old) is young


def test_where_all_are_safe_nobody_gives_way_unless_it_must(pool):
    requests = [FakeRequest(pool, number, safe_until=99) for number in (1, 2, 3)]
    assert choose_victim(requests, requests[0]) is None
    assert choose_victim(requests, requests[0], safe_too=True) is requests[2]
    assert choose_victim(requests, requests[2], safe_too=True) is requests[1]


def test_who_runs_alone_has_nobody_to_preempt(pool):
    request = FakeRequest(pool, 1)
    assert choose_victim([request], request) is None
    assert choose_victim([request], request, safe_too=True) is None


def test_a_tenant_within_its_share_of_blocks_preempts_one_that_is_over_its_own(pool):
    counters = counters_of("acme", "blue")  # Shares of 8 and 24 blocks.
    old, young = FakeRequest(pool, 1, "acme", 6), FakeRequest(pool, 2, "acme", 6)
    needy = FakeRequest(pool, 0, "blue", 2)
    assert choose_over_block_share([old, young], needy, 22, counters, pool) is young
    assert choose_over_block_share([old, young], needy, 23, counters, pool) is None


def test_nobody_is_preempted_who_is_within_its_share_or_safe(pool):
    counters = counters_of("acme", "blue")
    within = FakeRequest(pool, 1, "acme", 8)
    needy = FakeRequest(pool, 0, "blue", 2)
    assert choose_over_block_share([within], needy, 1, counters, pool) is None
    over = FakeRequest(pool, 2, "acme", 1, safe_until=99)
    assert choose_over_block_share([within, over], needy, 1, counters, pool) is within
    within.safe_until = 99
    assert choose_over_block_share([within, over], needy, 1, counters, pool) is None


def test_blocks_are_not_taken_from_a_tenant_that_was_served_less(pool):
    counters = counters_of("acme", "blue")
    over, needy = FakeRequest(pool, 1, "acme", 12), FakeRequest(pool, 0, "blue", 2)
    counters.charge("blue", 3.0)
    assert choose_over_block_share([over], needy, 1, counters, pool) is None
    counters.charge("acme", 1.0)
    assert choose_over_block_share([over], needy, 1, counters, pool) is over


def test_a_tenant_never_preempts_its_own_for_a_share(pool):
    counters = counters_of("acme")
    old, needy = FakeRequest(pool, 1, "acme", 20), FakeRequest(pool, 2, "acme", 1)
    assert choose_over_block_share([old], needy, 1, counters, pool) is None
    assert choose_over_slot_share([old], needy, counters, 1) is None


def test_slots_are_shared_by_weight_and_everybody_may_have_one(pool):
    counters = counters_of("acme", "blue", "crow")  # Of 5 slots: 1, 3, 1.
    running = [FakeRequest(pool, number, "acme") for number in range(1, 6)]
    assert choose_over_slot_share(running, FakeRequest(pool, 9, "blue"), counters, 5) is running[-1]
    assert choose_over_slot_share(running, FakeRequest(pool, 9, "crow"), counters, 5) is running[-1]
    running[-1] = FakeRequest(pool, 6, "crow")
    assert choose_over_slot_share(running, FakeRequest(pool, 9, "crow"), counters, 5) is None
    assert choose_over_slot_share(running, FakeRequest(pool, 9, "blue"), counters, 5) is running[-2]


def test_swapping_is_cheaper_or_not_by_what_copies_and_rows_take():
    cost = CostModel(CostParameters(1e-3, 1e-3, 0.0))
    request = SimpleNamespace(num_computed_tokens=18, lease=SimpleNamespace(table=SimpleNamespace(block_ids=range(5))))
    request.lease.table.num_computed_tokens = 18
    kv = SimpleNamespace(pool=SimpleNamespace(blocks=[SimpleNamespace(ref_count=n) for n in (2, 1, 1, 1, 1)]))

    def is_swap_cheaper(out_s, in_s, num_missing):
        costs = TransferCosts(0.5e-3, out_s, in_s)
        config = engine_config(transfer_costs=costs)
        return SwapEstimate(config, kv, cost).is_swap_cheaper(request, 3, num_missing)

    # 14 rows are lost, 14 ms; of those the 2 of the tail are computed in any case.
    assert is_swap_cheaper(1.8e-3, 1.8e-3, 3)
    assert not is_swap_cheaper(1.9e-3, 1.9e-3, 3)
    # What was copied down before has to come up only.
    assert is_swap_cheaper(1.9e-3, 3.8e-3, 0)
    assert not is_swap_cheaper(1.9e-3, 3.9e-3, 0)
