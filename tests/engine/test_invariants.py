"""The checker itself: each thing that can be broken by hand is found and named."""

import pytest

from chatd.engine import invariants
from chatd.engine.messages import Fork
from chatd.kvcache.block_pool import NOBODY
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


def prompt(length, start=0):
    return [(start + i) % 97 for i in range(length)]


@pytest.fixture
def engine():
    """An engine with something of everything: empty, cached, active and shared blocks, one running, one waiting."""
    engine = EngineHarness(engine_config(max_num_seqs=1))
    engine.generate(1, prompt(10), lease=5)
    engine.send(Fork(5, 6, 9))
    engine.generate(2, prompt(9, 3), lease=7, keep_lease=False)
    engine.submit(3, prompt(9, 5), lease=8, params=sampling_params(30))
    engine.submit(4, prompt(9, 6), lease=9)
    engine.step(3)
    return engine


def table(engine, lease=5):
    return engine.core.leases.get(lease).table


def block(engine, place=0, lease=5):
    return engine.core.pool.blocks[table(engine, lease).block_ids[place]]


def cached(engine):
    return engine.core.pool.account("acme").cached.head


def count_one_holder_more(engine):
    block(engine).ref_count += 1


def lose_a_holder(engine):
    block(engine, lease=8).ref_count -= 1


def put_a_held_block_into_a_queue(engine):
    engine.core.pool.account("acme").cached.append(block(engine))


def take_an_empty_block_out_of_its_queue(engine):
    engine.core.pool.empty.popleft()


def forget_an_entry(engine):
    entry = block(engine, 1, lease=5).entry
    block(engine, 1, lease=5).entry = None
    assert entry is not None


def swap_two_entries(engine):
    one, other = block(engine, 0), block(engine, 1)
    one.entry, other.entry = other.entry, one.entry


def orphan_a_child(engine):
    entry = block(engine, 0).entry
    block(engine, 1).entry.parent = block(engine, 0, lease=8).entry
    assert entry is not None


def register_too_much(engine):
    table(engine).num_registered_blocks = 50


def compute_more_than_there_is(engine):
    table(engine).num_computed_tokens = 20


def hold_a_block_ahead_of_need(engine):
    block(engine, 0, lease=8).ref_count += 1
    table(engine).block_ids.append(table(engine, 8).block_ids[0])


def show_another_state(engine):
    engine.core.pool.states[cached(engine).block_id] = 2


def show_another_owner(engine):
    engine.core.pool.owners[block(engine).block_id] = NOBODY


def charge_nobody(engine):
    block(engine).account = None


def miscount_an_account(engine):
    engine.core.pool.account("acme").num_active += 1


def miscount_the_shared(engine):
    engine.core.pool.num_shared += 1


def miscount_the_cached(engine):
    engine.core.pool.num_cached += 1


def run_a_request_twice(engine):
    engine.core.scheduler.running.append(engine.core.scheduler.running[0])


def lose_a_request(engine):
    engine.core.scheduler.running.clear()


def leave_a_lease_in_no_state(engine):
    engine.core.leases.get(8).state = engine.core.leases.get(5).state


def miscount_the_ids(engine):
    engine.core.leases.num_tokens += 1


def move_a_namespace(engine):
    table(engine).namespace = 99


def reverse_the_evictions(engine):
    queue = engine.core.pool.account("acme").cached
    queue.append(queue.popleft())


BREAKS = [
    count_one_holder_more,
    lose_a_holder,
    put_a_held_block_into_a_queue,
    take_an_empty_block_out_of_its_queue,
    forget_an_entry,
    swap_two_entries,
    orphan_a_child,
    register_too_much,
    compute_more_than_there_is,
    hold_a_block_ahead_of_need,
    show_another_state,
    show_another_owner,
    charge_nobody,
    miscount_an_account,
    miscount_the_shared,
    miscount_the_cached,
    run_a_request_twice,
    lose_a_request,
    leave_a_lease_in_no_state,
    miscount_the_ids,
    move_a_namespace,
    reverse_the_evictions,
]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_what_is_broken_by_hand_is_found(engine, break_it):
    engine.core.check_invariants()
    break_it(engine)
    with pytest.raises(AssertionError):
        engine.core.check_invariants()


def test_the_slices_find_the_same_as_the_whole(engine, monkeypatch):
    monkeypatch.setattr(invariants, "SLICE_UNITS", 4)
    assert len(list(invariants.slices(engine.core.scheduler))) > 4
    miscount_the_shared(engine)
    with pytest.raises(AssertionError):
        list(invariants.slices(engine.core.scheduler))
