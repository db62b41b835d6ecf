"""Leases: what an idle session keeps, in which order it gives it up, and what is left."""

import pytest

from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.lease import LeaseState
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.prefix_index import Namespace, PrefixIndex

SIZE = 4


class Leases:
    """A table of leases over a pool of its own."""

    def __init__(self, num_blocks=16, max_leases=100, max_tokens=1000, **tenants):
        pool = BlockPool(num_blocks, PrefixIndex())
        for tenant, (weight, floor) in tenants.items():
            pool.account(tenant, weight, floor)
        self.kv = KVCacheManager(pool, SIZE, Namespace("w", "fp16", "float16", 1, None, None))
        self.table = LeaseTable(self.kv, max_leases, max_tokens)

    def idle(self, lease_id, length, tenant="acme", attached=False):
        """Open a lease, compute its ids, and leave it idle."""
        lease = self.table.open(lease_id, tenant)
        self.table.extend(lease, [lease_id * 100 + i for i in range(length)])
        self.kv.commit(self.kv.allocate_slots(lease.table, length), length, lease.token_ids)
        lease.attached = attached
        self.table.set_idle(lease)
        return lease

    def allocate(self, num_tokens, tenant="acme"):
        return self.table.allocate_slots(self.kv.open_table(tenant), num_tokens)


def computed(*leases):
    return [lease.table.num_computed_tokens for lease in leases]


def test_the_longest_idle_lease_shrinks_first_and_from_its_tail():
    t = Leases(8)
    first, second = t.idle(1, 16), t.idle(2, 16)
    assert t.allocate(2 * SIZE) is not None
    assert computed(first, second) == [8, 16]
    assert len(first.token_ids) == 16
    assert list(t.table.shrunk) == [1]


def test_the_partial_block_stays_with_an_idle_lease():
    t = Leases(8)
    lease = t.idle(1, 6)
    assert len(lease.table.block_ids) == 2
    assert computed(lease) == [6]


def test_a_lease_that_was_used_again_is_no_longer_the_longest_idle():
    t = Leases(8)
    first, second = t.idle(1, 16), t.idle(2, 16)
    t.table.set_state(first, LeaseState.ACTIVE)
    t.table.set_idle(first)
    t.allocate(SIZE)
    assert computed(first, second) == [16, 12]


def test_nobody_attached_goes_before_attached_and_a_queued_turn_goes_last_but_goes():
    t = Leases(12)
    attached, queued, idle = t.idle(1, 16, attached=True), t.idle(2, 16), t.idle(3, 16)
    t.table.set_state(queued, LeaseState.QUEUED)
    t.allocate(SIZE)
    assert computed(attached, queued, idle) == [16, 16, 12]
    t.allocate(4 * SIZE)
    assert computed(attached, queued, idle) == [12, 16, 0]
    t.allocate(12 * SIZE)
    assert computed(attached, queued, idle) == [12, 16, 0]
    assert t.allocate(8 * SIZE) is None


def test_an_active_lease_is_never_reclaimed():
    t = Leases(8)
    active = t.idle(1, 16)
    t.table.set_state(active, LeaseState.ACTIVE)
    assert t.allocate(5 * SIZE) is None
    assert t.allocate(4 * SIZE) is not None
    assert computed(active) == [16]


def test_tenants_over_their_share_give_first():
    t = Leases(12, acme=(1.0, 0), blue=(3.0, 0))
    blue, acme = t.idle(1, 16, "blue"), t.idle(2, 16, "acme")
    filler = t.allocate(4 * SIZE, "blue")
    assert filler is not None
    t.allocate(SIZE, "blue")
    assert computed(acme, blue) == [12, 16]


def test_a_floor_holds_against_others_and_not_against_oneself():
    t = Leases(8, acme=(1.0, 4), blue=(1.0, 0))
    first = t.idle(1, 24, "acme")
    assert t.allocate(5 * SIZE, "blue") is None
    assert t.allocate(4 * SIZE, "blue") is not None
    assert computed(first) == [16]
    assert t.allocate(4 * SIZE, "acme") is not None
    assert computed(first) == [0]


def test_a_lease_below_its_tenants_floor_is_not_shrunk_for_others_at_all():
    t = Leases(8, acme=(1.0, 4), blue=(1.0, 0))
    lease = t.idle(1, 14, "acme")
    t.allocate(4 * SIZE, "blue")
    assert t.allocate(SIZE, "blue") is None
    assert computed(lease) == [14]


def test_blocks_that_only_one_lease_holds_go_before_shared_ones():
    t = Leases(8)
    parent = t.idle(1, 16)
    fork = t.table.fork(parent, 2, 16)
    t.table.set_idle(fork)
    single = t.idle(3, 16)
    assert t.allocate(4 * SIZE) is not None
    assert computed(parent, fork, single) == [16, 16, 0]
    assert t.allocate(1 * SIZE) is not None
    assert min(computed(parent, fork)) < 16


def test_shared_blocks_go_when_there_is_nothing_else():
    t = Leases(4)
    parent = t.idle(1, 16)
    fork = t.table.fork(parent, 2, 16)
    t.table.set_idle(fork)
    assert t.allocate(4 * SIZE) is not None
    assert computed(parent, fork) == [0, 0]


def test_what_a_lease_gave_up_can_still_be_found_until_it_is_evicted():
    t = Leases(8)
    lease = t.idle(1, 17)
    t.allocate(4 * SIZE)
    assert computed(lease) == [16]
    assert t.kv.get_computed_blocks(lease.table, lease.token_ids) == []
    t.kv.trim(lease.table, 8)
    assert len(t.kv.get_computed_blocks(lease.table, lease.token_ids)) == 2


def test_found_blocks_are_not_taken_to_make_room_for_what_follows_them():
    t = Leases(6)
    lease = t.idle(1, 12)
    other = t.idle(2, 12)
    t.kv.free(lease.table)
    table = t.kv.open_table("acme")
    found = t.kv.get_computed_blocks(table, lease.token_ids)
    assert len(found) == 2
    allocation = t.table.allocate_slots(table, 20, found)
    assert allocation is not None
    assert table.block_ids[:2] == found
    assert computed(other) == [4]


def test_can_reclaim_counts_what_leases_alone_hold_and_takes_nothing():
    t = Leases(8, acme=(1.0, 2), blue=(1.0, 0))
    lease = t.idle(1, 16, "acme")
    acme, blue = t.kv.pool.account("acme"), t.kv.pool.account("blue")
    assert t.table.can_reclaim(acme, 4)
    assert not t.table.can_reclaim(acme, 5)
    assert t.table.can_reclaim(blue, 2)
    assert not t.table.can_reclaim(blue, 3)
    assert computed(lease) == [16]


def test_too_many_leases_forget_the_longest_idle_one():
    t = Leases(16, max_leases=2)
    t.idle(1, 5)
    t.idle(2, 5)
    t.idle(3, 5)
    assert [lease.lease_id for lease in t.table] == [2, 3]
    assert t.table.get(1) is None
    assert t.table.num_tokens == 10


def test_too_many_ids_forget_the_longest_idle_lease_but_never_the_growing_one():
    t = Leases(16, max_tokens=12)
    t.idle(1, 5)
    lease = t.idle(2, 5)
    t.table.set_state(lease, LeaseState.ACTIVE)
    t.table.extend(lease, range(20))
    assert [held.lease_id for held in t.table] == [2]
    assert t.table.num_tokens == 25


def test_many_leases_of_one_tenant_cost_another_one_none():
    t = Leases(16, max_leases=4)
    t.idle(1, 5, "blue")
    for lease_id in range(2, 9):
        t.idle(lease_id, 5)
    assert [lease.lease_id for lease in t.table] == [1, 6, 7, 8]
    t.idle(9, 5, "blue")
    assert [lease.lease_id for lease in t.table] == [1, 7, 8, 9]


def test_a_tenant_may_have_as_many_leases_as_its_weight_says():
    t = Leases(16, max_leases=4, acme=(3.0, 0), blue=(1.0, 0))
    for lease_id in range(1, 4):
        t.idle(lease_id, 5)
    for lease_id in range(4, 9):
        t.idle(lease_id, 5, "blue")
    assert [lease.lease_id for lease in t.table] == [2, 3, 7, 8]


def test_many_ids_of_one_tenant_cost_another_one_none():
    t = Leases(32, max_tokens=40)
    t.idle(1, 12, "blue")
    for lease_id in range(2, 12):
        t.idle(lease_id, 5)
    assert t.table.get(1) is not None
    assert t.table.num_held("acme") == (5, 25)


def test_a_public_lease_is_forgotten_last():
    t = Leases(16, max_leases=2)
    t.idle(1, 5, None)
    for lease_id in range(2, 5):
        t.idle(lease_id, 5)
    assert [lease.lease_id for lease in t.table] == [1, 4]


def test_no_lease_opens_while_all_are_in_use():
    t = Leases(16, max_leases=1)
    lease = t.table.open(1, "acme")
    assert t.table.open(2, "acme") is None
    t.table.set_idle(lease)
    assert t.table.open(2, "acme") is not None


def test_a_fork_has_the_ids_and_blocks_up_to_its_token():
    t = Leases(16)
    parent = t.idle(1, 14)
    fork = t.table.fork(parent, 2, 10)
    assert list(fork.token_ids) == list(parent.token_ids[:10])
    assert fork.table.block_ids == parent.table.block_ids[:3]
    assert parent.state is LeaseState.IDLE
    assert t.table.num_tokens == 24


def test_a_fork_never_pushes_out_its_own_source():
    t = Leases(16, max_leases=1)
    parent = t.idle(1, 8)
    assert t.table.fork(parent, 2, 8) is None
    assert t.table.get(1) is parent


def test_closing_gives_everything_back_and_closing_again_changes_nothing():
    t = Leases(8)
    lease = t.idle(1, 6)
    t.table.close(lease)
    t.table.close(lease)
    assert (len(t.table), t.table.num_tokens, t.kv.pool.num_active) == (0, 0, 0)


def test_ids_that_are_too_large_are_refused_whole():
    t = Leases(8)
    lease = t.table.open(1, "acme")
    with pytest.raises(OverflowError):
        t.table.extend(lease, [1, 2, 2**40])
    assert list(lease.token_ids) == []


def test_a_queued_turn_goes_after_everything_idle_shared_blocks_included():
    t = Leases(12)
    queued = t.idle(3, 16)
    parent = t.idle(1, 16)
    t.table.set_idle(t.table.fork(parent, 2, 16))
    t.table.set_state(queued, LeaseState.QUEUED)
    assert t.allocate(4 * SIZE) is not None
    assert t.allocate(3 * SIZE) is not None
    assert computed(queued) == [16]
    assert t.allocate(2 * SIZE) is not None
    assert computed(queued) == [12]


def test_a_hopeless_need_shrinks_nobody():
    t = Leases(12)
    first, second = t.idle(1, 16), t.idle(2, 16)
    assert t.allocate(13 * SIZE) is None
    assert computed(first, second) == [16, 16]


def test_of_one_tenant_what_is_kept_below_goes_before_what_has_been_idle_longer():
    t = Leases(8)
    t.table.is_below = lambda lease, place: lease is second
    first, second = t.idle(1, 16), t.idle(2, 16)
    for lease in (first, second):
        lease.num_clean = 4
    assert t.allocate(3 * SIZE) is not None
    assert computed(first, second) == [16, 4]
    assert t.allocate(2 * SIZE) is not None
    assert computed(first, second) == [12, 0]


def test_what_was_not_copied_down_is_not_asked_for():
    t = Leases(4)
    asked = []
    t.table.is_below = lambda lease, place: asked.append(place) or True
    lease = t.idle(1, 16)
    lease.next_dirty = 3
    assert t.allocate(2 * SIZE) is not None
    assert asked == [3]


def test_a_lease_is_dirty_from_the_end_of_its_turn_until_it_shrinks_to_what_was_copied():
    t = Leases(8)
    t.table.is_below = lambda lease, place: False
    lease = t.idle(1, 16)
    assert list(t.table.dirty) == [1]
    t.table.dirty.clear()
    lease.num_clean = 4
    t.table.set_attached(1, True)
    assert not t.table.dirty
    assert t.allocate(6 * SIZE) is not None
    assert lease.num_clean == 2


def test_digests_are_cut_with_the_ids_and_shared_by_forks():
    t = Leases(8)
    lease = t.idle(1, 16)
    lease.chain, lease.digests = [b"a", b"b", b"c", b"d"], [b"w", b"x", b"y", b"z"]
    fork = t.table.fork(lease, 2, 11)
    assert (fork.chain, fork.digests) == ([b"a", b"b"], [b"w", b"x"])
    t.table.trim(lease, 13)
    assert (lease.chain, lease.digests) == ([b"a", b"b", b"c"], [b"w", b"x", b"y"])
