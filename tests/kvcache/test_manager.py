"""Block tables: what is found, taken, committed, undone and shared, block by block."""

from array import array

import pytest
import xxhash

from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.prefix_index import Namespace, PrefixIndex
from chatd.testing.constant_hash import constant_hash

SIZE = 4


def ids_of(length, start=100):
    return array("i", range(start, start + length))


@pytest.fixture(params=[xxhash.xxh3_128_digest, constant_hash], ids=["xxh3", "constant"])
def kv(request):
    index = PrefixIndex(request.param, max_entries_per_key=64)
    return KVCacheManager(BlockPool(16, index), SIZE, Namespace("w", "fp16", "float16", 1, None, None))


def compute(kv, ids, tenant="acme", table=None):
    """Compute all of `ids` in a table, as one step would."""
    table = table or kv.open_table(tenant)
    computed = kv.get_computed_blocks(table, ids)
    allocation = kv.allocate_slots(table, len(ids), computed)
    kv.commit(allocation, len(ids), ids)
    return table


def refs(kv, table):
    return [kv.pool.blocks[block_id].ref_count for block_id in table.block_ids]


def test_a_table_holds_exactly_the_blocks_that_its_tokens_need(kv):
    for length in range(1, 10):
        table = compute(kv, ids_of(length, start=1000 * length))
        assert len(table.block_ids) == -(-length // SIZE)
        kv.free(table)


def test_nothing_can_be_found_before_commit(kv):
    ids = ids_of(9)
    table = kv.open_table("acme")
    allocation = kv.allocate_slots(table, 9)
    assert kv.get_computed_blocks(kv.open_table("acme"), ids) == []
    kv.commit(allocation, 9, ids)
    assert kv.get_computed_blocks(kv.open_table("acme"), ids) == table.block_ids[:2]


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)])
def test_hits_are_whole_blocks_and_never_the_last_token(kv, length, hits):
    compute(kv, ids_of(13))
    assert len(kv.get_computed_blocks(kv.open_table("acme"), ids_of(length))) == hits


def test_a_gap_ends_the_hits(kv):
    compute(kv, ids_of(13))
    ids = ids_of(13)
    ids[5] = 7
    assert len(kv.get_computed_blocks(kv.open_table("acme"), ids)) == 1


def test_another_tenant_finds_nothing(kv):
    compute(kv, ids_of(13), "acme")
    assert kv.get_computed_blocks(kv.open_table("blue"), ids_of(13)) == []


def test_public_blocks_are_found_by_everybody_and_what_follows_is_private(kv):
    compute(kv, ids_of(8), None)
    mine = ids_of(8) + array("i", [1, 2, 3, 4, 5])
    acme = compute(kv, mine, "acme")
    assert kv.get_computed_blocks(kv.open_table("acme"), mine) == acme.block_ids[:3]
    assert kv.get_computed_blocks(kv.open_table("blue"), mine) == acme.block_ids[:2]


def test_found_blocks_are_shared_by_reference(kv):
    first = compute(kv, ids_of(9))
    second = compute(kv, ids_of(9))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert refs(kv, first) == [2, 2, 1]


def test_not_now_changes_nothing(kv):
    compute(kv, ids_of(13))
    first = compute(kv, ids_of(40, start=500))
    before = (kv.pool.num_cached, kv.pool.num_active, bytes(kv.pool.states))
    table = kv.open_table("acme")
    computed = kv.get_computed_blocks(table, ids_of(13))
    assert len(computed) == 3
    assert kv.allocate_slots(table, 40, computed) is None
    assert (kv.pool.num_cached, kv.pool.num_active, bytes(kv.pool.states)) == before
    assert (table.block_ids, table.num_computed_tokens) == ([], 0)
    assert first.num_computed_tokens == 40


def test_discard_gives_back_what_the_plan_took(kv):
    ids = ids_of(20)
    table = compute(kv, ids[:6])
    before = (list(table.block_ids), bytes(kv.pool.states))
    kv.discard(kv.allocate_slots(table, 20))
    assert (list(table.block_ids), bytes(kv.pool.states)) == before
    assert table.num_computed_tokens == 6


def test_discard_keeps_what_was_found(kv):
    compute(kv, ids_of(9))
    table = kv.open_table("acme")
    kv.discard(kv.allocate_slots(table, 9, kv.get_computed_blocks(table, ids_of(9))))
    assert (table.num_computed_tokens, len(table.block_ids)) == (8, 2)


def test_equal_content_computed_twice_at_once_becomes_one_block(kv):
    ids = ids_of(9)
    first, second = kv.open_table("acme"), kv.open_table("acme")
    one, two = kv.allocate_slots(first, 9), kv.allocate_slots(second, 9)
    kv.commit(one, 9, ids)
    kv.commit(two, 9, ids)
    duplicates = second.block_ids[:2]
    # The swap waits for the next plan: this list is what a plan in flight would read.
    assert duplicates != first.block_ids[:2]
    assert refs(kv, first) == [2, 2, 1]
    allocation = kv.allocate_slots(second, 10)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert [kv.pool.states[block_id] for block_id in duplicates] == [0, 0]
    kv.discard(allocation)


def test_a_child_is_registered_under_the_parent_that_its_request_adopts(kv):
    ids = ids_of(13)
    other = ids[:8] + array("i", [1, 2, 3, 4, 5])
    first, second = kv.open_table("acme"), kv.open_table("acme")
    one, two = kv.allocate_slots(first, 13), kv.allocate_slots(second, 13)
    kv.commit(one, 13, ids)
    kv.commit(two, 13, other)
    third = compute(kv, other)
    kv.adopt(second)
    assert third.block_ids[:3] == second.block_ids[:3]
    assert third.block_ids[:2] == first.block_ids[:2]


def test_a_turn_on_a_resident_table_looks_up_nothing_that_it_holds(kv):
    ids = ids_of(23)
    table = compute(kv, ids)
    ids.extend([1, 2, 3, 4, 5, 6])
    looked_up = []
    find = kv.index.find
    kv.index.find = lambda *args: looked_up.append(args) or find(*args)
    assert kv.get_computed_blocks(table, ids) == []
    assert len(looked_up) <= 2  # One block, in its own namespace, and in "public" only where the prefix is public.


def test_a_full_block_that_is_found_replaces_the_partial_one(kv):
    whole = ids_of(13)
    compute(kv, whole)
    table = compute(kv, whole[:6])
    partial = table.block_ids[1]
    computed = kv.get_computed_blocks(table, whole)
    assert len(computed) == 2
    allocation = kv.allocate_slots(table, 13, computed)
    kv.commit(allocation, 13, whole)
    assert kv.pool.states[partial] == 0
    assert table.num_computed_tokens == 13


@pytest.mark.parametrize("at", range(14))
def test_a_fork_shares_every_block_and_its_first_append_copies_at_most_one(kv, at):
    ids = ids_of(13)
    table = compute(kv, ids)
    before = kv.pool.num_active
    fork = kv.fork(table, at)
    assert fork.block_ids == table.block_ids[: -(-at // SIZE)]
    assert kv.pool.num_active == before
    allocation = kv.allocate_slots(fork, at + 1)
    copied = allocation.copy_source is not None
    assert copied == (at % SIZE != 0)
    assert kv.pool.num_active == before + 1
    if copied:
        assert allocation.copy_source == table.block_ids[at // SIZE]
        assert fork.block_ids[-1] == allocation.copy_target != table.block_ids[at // SIZE]
    kv.commit(allocation, at + 1, ids[:at] + array("i", [9]))
    kv.free(fork)
    assert set(refs(kv, table)) == {1}


def test_the_source_of_a_fork_copies_as_well_when_it_appends_first(kv):
    ids = ids_of(6)
    table = compute(kv, ids)
    fork = kv.fork(table, 6)
    allocation = kv.allocate_slots(table, 7)
    assert allocation.copy_source == fork.block_ids[1]
    kv.commit(allocation, 7, ids_of(7))
    # The fork holds the block alone now and writes in place.
    assert kv.allocate_slots(fork, 7).copy_source is None


def test_the_source_of_a_copy_stays_until_commit(kv):
    table = compute(kv, ids_of(6))
    fork = kv.fork(table, 6)
    allocation = kv.allocate_slots(fork, 7)
    kv.free(table)
    assert kv.pool.blocks[allocation.copy_source].ref_count == 1
    kv.commit(allocation, 7, ids_of(7))
    assert kv.pool.blocks[allocation.copy_source].ref_count == 0


def test_discard_undoes_a_copy(kv):
    table = compute(kv, ids_of(6))
    fork = kv.fork(table, 6)
    before = bytes(kv.pool.states)
    kv.discard(kv.allocate_slots(fork, 12))
    assert bytes(kv.pool.states) == before
    assert fork.block_ids == table.block_ids


def test_a_registered_block_that_was_trimmed_is_copied_before_it_is_written(kv):
    table = compute(kv, ids_of(8))
    kv.trim(table, 6)
    allocation = kv.allocate_slots(table, 7)
    assert allocation.copy_source is not None
    kv.commit(allocation, 7, ids_of(6) + array("i", [1]))
    assert len(kv.get_computed_blocks(kv.open_table("acme"), ids_of(9))) == 2


@pytest.mark.parametrize("length", range(14))
def test_trim_gives_back_what_is_behind_it_and_trimming_twice_changes_nothing(kv, length):
    table = compute(kv, ids_of(13))
    kv.trim(table, length)
    assert len(table.block_ids) == -(-length // SIZE)
    state = bytes(kv.pool.states)
    kv.trim(table, length)
    kv.trim(table, length + 5)
    assert (bytes(kv.pool.states), table.num_computed_tokens) == (state, length)


def test_free_is_idempotent(kv):
    table = compute(kv, ids_of(13))
    kv.free(table)
    assert table.block_ids == []
    kv.free(table)
    assert (kv.pool.num_active, kv.pool.num_cached) == (0, 3)


def test_blocks_of_a_poisoned_table_cannot_be_found_but_public_ones_can(kv):
    compute(kv, ids_of(8), None)
    mine = ids_of(17)
    table = compute(kv, mine)
    other = kv.fork(table, 17)
    kv.poison(table)
    assert len(kv.get_computed_blocks(kv.open_table("acme"), mine)) == 2
    assert other.num_computed_tokens == 17


def test_a_table_whose_blocks_were_poisoned_elsewhere_goes_on_unregistered(kv):
    ids = ids_of(9)
    table = compute(kv, ids)
    kv.poison(kv.fork(table, 9))
    more = ids_of(14)
    allocation = kv.allocate_slots(table, 14)
    kv.commit(allocation, 14, more)
    assert kv.get_computed_blocks(kv.open_table("acme"), more) == []
    kv.free(table)
    assert kv.pool.num_active == 0


def test_a_block_whose_key_is_full_is_not_registered_and_neither_is_what_follows():
    index = PrefixIndex(constant_hash, max_entries_per_key=2)
    kv = KVCacheManager(BlockPool(16, index), SIZE, Namespace("w", "fp16", "float16", 1, None, None))
    compute(kv, ids_of(17))
    assert len(kv.get_computed_blocks(kv.open_table("acme"), ids_of(17))) == 2
