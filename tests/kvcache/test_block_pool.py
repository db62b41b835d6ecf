"""The pool: exact block ids, the order of eviction, shares and floors, and the map that is always exact."""

from array import array

import pytest

from chatd.kvcache.block_pool import NOBODY, BlockPool
from chatd.kvcache.prefix_index import Namespace, PrefixIndex


class Pool:
    """A pool with a way to make cached blocks."""

    def __init__(self, num_blocks, **floors):
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index)
        for tenant, (weight, floor) in floors.items():
            self.pool.account(tenant, weight, floor)
        self._next = 0

    def namespace(self, tenant):
        return self.index.namespace_id(Namespace("w", "fp16", "float16", 1, None, tenant))

    def hold_chain(self, tenant, length):
        """Allocate and register a chain of blocks."""
        taken = self.pool.allocate(self.pool.account(tenant), length)
        parent = None
        for block_id in taken:
            self._next += 1
            parent = self.pool.register(block_id, self.namespace(tenant), parent, array("i", [self._next]).tobytes())
        return taken

    def cache_chain(self, tenant, length):
        taken = self.hold_chain(tenant, length)
        self.pool.release(taken)
        return taken


def cached(pool, tenant):
    return [block.block_id for block in pool.account(tenant).cached]


def test_a_fresh_pool_gives_its_blocks_in_order():
    pool = BlockPool(4, PrefixIndex())
    acme = pool.account("acme")
    assert pool.allocate(acme, 2) == [0, 1]
    assert pool.allocate(acme, 2) == [2, 3]
    assert (pool.num_active, acme.num_active, len(pool.empty)) == (4, 4, 0)


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4, PrefixIndex())
    acme = pool.account("acme")
    held = pool.allocate(acme, 2)
    assert pool.allocate(acme, 3) is None
    assert (len(pool.empty), acme.num_active) == (2, 2)
    assert pool.allocate(acme, 0) == []
    pool.release(held)
    assert len(pool.allocate(acme, 4)) == 4


def test_what_was_freed_last_is_used_first():
    pool = BlockPool(4, PrefixIndex())
    acme = pool.account("acme")
    held = pool.allocate(acme, 3)
    pool.release(held[:2])
    assert pool.allocate(acme, 3) == [0, 1, 3]


def test_tails_are_evicted_before_the_prefixes_they_hang_on():
    p = Pool(4)
    p.cache_chain("acme", 3)
    assert cached(p.pool, "acme") == [2, 1, 0]
    assert p.pool.allocate(p.pool.account("acme"), 2) == [3, 2]
    assert p.pool.num_evictions == 1
    assert cached(p.pool, "acme") == [1, 0]


def test_the_least_recently_used_is_evicted_first():
    p = Pool(3)
    a, b, c = (p.cache_chain("acme", 1)[0] for _ in range(3))
    p.pool.hold([a])
    p.pool.release([a])
    assert p.pool.allocate(p.pool.account("acme"), 3) == [b, c, a]


def test_a_held_block_is_never_evicted():
    p = Pool(2)
    held = p.hold_chain("acme", 1)
    p.cache_chain("acme", 1)
    assert p.pool.allocate(p.pool.account("acme"), 2) is None
    assert p.pool.allocate(p.pool.account("acme"), 1) == [1]
    assert p.pool.blocks[held[0]].entry is not None


def test_a_block_with_two_holders_is_shared_until_one_lets_go():
    p = Pool(2)
    (block_id,) = p.hold_chain("acme", 1)
    p.pool.hold([block_id])
    assert (p.pool.num_shared, p.pool.states[block_id]) == (1, 3)
    p.pool.release([block_id])
    assert (p.pool.num_shared, p.pool.states[block_id]) == (0, 2)
    p.pool.release([block_id])
    assert (p.pool.num_cached, p.pool.states[block_id]) == (1, 1)
    p.pool.hold([block_id])
    assert (p.pool.num_cached, p.pool.states[block_id]) == (0, 2)


def test_releasing_more_often_than_holding_is_a_broken_invariant():
    pool = BlockPool(1, PrefixIndex())
    held = pool.allocate(pool.account("acme"), 1)
    pool.release(held)
    with pytest.raises(AssertionError, match="no holder"):
        pool.release(held)


def test_the_tenant_most_over_its_share_loses_a_block_first():
    p = Pool(10, acme=(1.0, 0), blue=(3.0, 0))
    p.cache_chain("acme", 4)
    p.cache_chain("blue", 6)
    blue = p.pool.account("blue")
    # acme has 4 per unit of weight, blue 2: acme's go until they are even.
    p.pool.allocate(blue, 2)
    assert (len(cached(p.pool, "acme")), len(cached(p.pool, "blue"))) == (2, 6)
    # blue now has 8 and 2.67 per unit.
    p.pool.allocate(p.pool.account("acme"), 1)
    assert (len(cached(p.pool, "acme")), len(cached(p.pool, "blue"))) == (2, 5)


def test_a_floor_protects_against_other_tenants():
    p = Pool(6, acme=(1.0, 4), blue=(1.0, 0))
    p.cache_chain("acme", 5)
    blue = p.pool.account("blue")
    assert p.pool.available(blue) == 2
    assert p.pool.allocate(blue, 3) is None
    assert len(p.pool.allocate(blue, 2)) == 2
    assert len(cached(p.pool, "acme")) == 4
    assert p.pool.allocate(blue, 1) is None


def test_a_tenant_at_its_floor_is_passed_over_though_it_is_most_over_its_share():
    p = Pool(8, acme=(0.5, 4), blue=(1.0, 0), crow=(1.0, 0))
    p.cache_chain("acme", 4)
    p.cache_chain("blue", 3)
    crow = p.pool.account("crow")
    assert p.pool.available(crow) == 4
    assert len(p.pool.allocate(crow, 4)) == 4
    assert (len(cached(p.pool, "acme")), len(cached(p.pool, "blue"))) == (4, 0)


def test_a_floor_does_not_protect_a_tenant_against_itself():
    p = Pool(6, acme=(1.0, 4))
    p.cache_chain("acme", 6)
    acme = p.pool.account("acme")
    assert p.pool.available(acme) == 6
    assert len(p.pool.allocate(acme, 6)) == 6


def test_blocks_that_are_held_count_towards_the_floor():
    p = Pool(6, acme=(1.0, 3), blue=(1.0, 0))
    p.hold_chain("acme", 3)
    p.cache_chain("acme", 3)
    blue = p.pool.account("blue")
    assert p.pool.available(blue) == 3
    assert len(p.pool.allocate(blue, 3)) == 3


def test_public_blocks_are_charged_to_nobody_and_go_last():
    p = Pool(4, acme=(1.0, 0))
    public = p.cache_chain(None, 2)
    p.cache_chain("acme", 2)
    assert [p.pool.owners[block_id] for block_id in public] == [NOBODY, NOBODY]
    p.pool.allocate(p.pool.account("acme"), 2)
    assert cached(p.pool, None) == [1, 0]
    assert p.pool.allocate(p.pool.account("acme"), 2) == [1, 0]


def test_what_hangs_on_an_evicted_public_block_goes_with_it():
    p = Pool(4, acme=(1.0, 2), blue=(1.0, 0))
    (public,) = p.hold_chain(None, 1)
    (private,) = p.pool.allocate(p.pool.account("acme"), 1)
    p.pool.register(private, p.namespace("acme"), p.pool.blocks[public].entry, b"x")
    p.pool.release([public, private])
    blue = p.pool.account("blue")
    assert p.pool.available(blue) == 3
    assert len(p.pool.allocate(blue, 3)) == 3
    assert len(p.index) == 0
    assert p.pool.num_cached == 0


def test_unregistering_a_block_takes_its_subtree_and_leaves_holders_alone():
    p = Pool(5)
    held = p.hold_chain("acme", 3)
    p.pool.release(held[1:])
    p.pool.unregister(held[0])
    assert len(p.index) == 0
    assert p.pool.blocks[held[0]].ref_count == 1
    assert (p.pool.num_cached, len(p.pool.empty)) == (0, 4)
    p.pool.unregister(held[0])


def test_the_map_and_the_owners_follow_every_change():
    p = Pool(4, acme=(1.0, 0), blue=(1.0, 0))
    p.cache_chain("acme", 1)
    (shared,) = p.hold_chain("blue", 1)
    p.pool.hold([shared])
    p.pool.allocate(p.pool.account("blue"), 1)
    assert list(p.pool.states) == [1, 3, 2, 0]
    assert list(p.pool.owners) == [0, 1, 1, NOBODY]


def test_the_heap_of_tenants_does_not_grow_with_what_happens():
    p = Pool(8, acme=(1.0, 0), blue=(1.0, 0))
    for turn in range(2000):
        p.cache_chain(("acme", "blue")[turn % 2], 1 + turn % 3)
    assert len(p.pool._heap) <= 2 * 2 + 64
