"""What the engine tells of single blocks, of what each lease answers for, and of what was evicted and wanted again."""

import logging
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.engine.messages import (
    MAX_INSPECTED,
    BlockHolder,
    Erase,
    EraseTenant,
    Fork,
    InspectBlocks,
    LeaseId,
    LeaseUse,
    Release,
    Retain,
    Tier,
    Trim,
    WatchPool,
)
from chatd.kvcache.holdings import holdings_of
from chatd.testing.engine import EngineHarness, engine_config, sampling_params
from chatd.testing.simulation import SHAPES, Simulation


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * position) % 90 + 1 for position in range(length)]


def harness(**config) -> EngineHarness:
    return EngineHarness(engine_config(**config))


def inspect(engine: EngineHarness, first: int = 0, num_blocks: int = 64, tenant: str | None = None):
    (answer,) = engine.send(InspectBlocks(9, first, num_blocks, tenant))
    assert answer.question == 9
    return answer.blocks


def rows(engine: EngineHarness):
    engine.send(WatchPool(1.0, with_leases=True, with_map=True))
    return engine.core.pool_frame(engine.clock.now)


def test_a_block_tells_its_holders_its_age_and_its_last_hit():
    engine = harness()
    engine.clock.now = 10.0
    engine.generate(1, prompt(9), lease=5, params=sampling_params(1))
    engine.clock.now = 25.0
    engine.generate(2, prompt(9), lease=6, params=sampling_params(1))
    engine.clock.now = 40.0
    first, second, third, fourth = inspect(engine)
    assert (first.number, first.state, first.tenant, first.ref_count) == (0, 3, "acme", 2)
    assert (first.is_registered, first.place, first.num_tokens) == (True, 0, 4)
    assert (first.age_s, first.hit_age_s) == (30.0, 15.0)
    assert first.holders == [BlockHolder(5, 0, 4), BlockHolder(6, 0, 4)]
    assert (second.place, second.hit_age_s) == (1, 15.0)
    # The last ones are partly full, each session's own, and cannot be found.
    assert [(row.state, row.is_registered, row.place, row.num_tokens) for row in (third, fourth)] == [
        (2, False, 2, 1),
        (2, False, 2, 1),
    ]
    assert (third.age_s, third.hit_age_s, fourth.age_s) == (30.0, None, 15.0)
    assert (third.holders, fourth.holders) == ([BlockHolder(5, 2, 1)], [BlockHolder(6, 2, 1)])


def test_a_cached_block_keeps_its_place_and_has_no_holder():
    engine = harness()
    engine.generate(1, prompt(9), params=sampling_params(1), keep_lease=False)
    engine.clock.now += 5.0
    blocks = inspect(engine)
    assert [(row.state, row.ref_count, row.place, row.num_tokens, row.holders) for row in blocks] == [
        (1, 0, 0, 4, []),
        (1, 0, 1, 4, []),
    ]


def test_free_blocks_and_those_that_are_not_there_are_left_out():
    engine = harness(num_blocks=16, max_model_len=60)
    assert inspect(engine) == []
    engine.generate(1, prompt(5), params=sampling_params(1))
    assert [row.number for row in inspect(engine, first=-3, num_blocks=10**9)] == [0, 1]
    assert inspect(engine, first=10**12) == inspect(engine, num_blocks=-1) == []


def test_an_answer_has_a_bounded_number_of_blocks():
    engine = harness(num_blocks=200, max_model_len=600)
    engine.generate(1, prompt(400), params=sampling_params(1))
    assert len(inspect(engine, num_blocks=200)) == MAX_INSPECTED


def test_to_look_at_blocks_changes_nothing_and_asks_for_no_frame():
    engine = harness()
    engine.generate(1, prompt(9), params=sampling_params(1))
    engine.settle()
    before = engine.core.next_due()
    inspect(engine)
    inspect(engine, tenant="acme")
    assert engine.core.is_checked
    assert engine.core.next_due() == before


def test_a_tenant_s_blocks_are_numbered_as_its_frames_count_them_wherever_they_lie():
    """What one tenant gets is the same with and without another one in the pool."""

    def own(is_crowded: bool):
        engine = harness(num_blocks=64)
        if is_crowded:
            engine.generate(90, prompt(21, 5), lease=90, tenant="beta", params=sampling_params(3))
            engine.generate(91, prompt(30, 6), lease=91, tenant="beta", params=sampling_params(3), keep_lease=False)
        engine.generate(1, prompt(9), lease=5, params=sampling_params(1))
        if is_crowded:
            engine.send(Release(90))
        engine.generate(2, prompt(9), lease=6, params=sampling_params(1))
        engine.generate(3, prompt(8, 3), lease=7, params=sampling_params(1), keep_lease=False)
        return inspect(engine, tenant="acme")

    alone, crowded = own(is_crowded=False), own(is_crowded=True)
    assert alone == crowded
    assert [(row.number, row.state) for row in alone] == [(0, 3), (1, 3), (2, 2), (3, 2), (4, 1), (5, 1)]
    assert {row.tenant for row in alone} == {"acme"}


def test_nothing_is_told_of_another_tenant_s_blocks_or_of_one_that_is_not_known():
    engine = harness()
    engine.generate(1, prompt(30), lease=5, tenant="beta", params=sampling_params(1))
    engine.generate(2, prompt(5), lease=6, tenant="acme", params=sampling_params(1))
    assert {holder.lease for row in inspect(engine, tenant="acme") for holder in row.holders} == {6}
    assert inspect(engine, tenant="nobody") == []
    assert inspect(engine, tenant="") == []


def test_public_blocks_are_in_no_tenant_s_numbers():
    engine = harness()
    engine.generate(1, prompt(8), lease=1, tenant="", params=sampling_params(1), compute_only=True)
    engine.generate(2, prompt(13), lease=5, params=sampling_params(1))
    own = inspect(engine, tenant="acme")
    assert [(row.number, row.tenant, row.place) for row in own] == [(0, "acme", 2), (1, "acme", 3)]


def test_a_lease_tells_what_keeps_it_and_for_how_long_it_has_been_idle():
    engine = harness()
    engine.generate(1, prompt(9), lease=5, params=sampling_params(1))
    engine.clock.now += 30.0
    assert [(row.use, row.idle_s) for row in rows(engine).leases] == [(LeaseUse.IDLE, 30.0)]
    engine.send(Retain(5, True))
    # Somebody looks at it now; its last turn ended when it did.
    assert [(row.use, row.idle_s) for row in rows(engine).leases] == [(LeaseUse.ATTACHED, 30.0)]
    engine.submit(2, prompt(3, 4), lease=5, base_len=10)
    assert [(row.use, row.idle_s) for row in rows(engine).leases] == [(LeaseUse.QUEUED, 0.0)]
    engine.step()
    assert [(row.use, row.active) for row in rows(engine).leases] == [(LeaseUse.ANSWERING, True)]


def test_a_shared_block_is_split_among_those_who_hold_it():
    engine = harness()
    engine.generate(1, prompt(9), lease=5, params=sampling_params(1))
    for lease in (6, 7):
        engine.send(Fork(5, lease, 8))
    bills = {row.lease: row.bill for row in rows(engine).leases}
    assert bills == {5: 1 + 2 / 3, 6: 2 / 3, 7: 2 / 3}
    assert math.isclose(sum(bills.values()), rows(engine).num_active)


def test_public_blocks_are_nobody_s_and_a_bill_does_not_say_who_else_holds_them():
    engine = harness()
    engine.generate(1, prompt(8), lease=1, tenant="", params=sampling_params(1), compute_only=True)
    engine.generate(2, prompt(13), lease=5, params=sampling_params(1))
    before = next(row.bill for row in rows(engine).leases if row.lease == 5)
    engine.generate(3, prompt(13), lease=6, tenant="beta", params=sampling_params(1))
    frame = rows(engine)
    assert next(row.bill for row in frame.leases if row.lease == 5) == before == 2.0
    assert (frame.num_public, frame.num_active) == (2, 6)


def exact_bills(core) -> tuple[Fraction, dict[int, Fraction]]:
    """Sum each block's parts by who has it in a table, without the counts of the pool."""
    bills: dict[int, Fraction] = {}
    total = Fraction(0)
    for lease in core.leases:
        for block_id in lease.table.block_ids:
            block = core.pool.blocks[block_id]
            if block.account is not core.pool.public:
                part = Fraction(1, block.ref_count)
                bills[lease.lease_id] = bills.get(lease.lease_id, Fraction(0)) + part
                total += part
    return total, bills


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, len(SHAPES) - 1), st.sampled_from([1, 2]))
def test_the_bills_are_the_active_blocks_at_every_moment_of_a_busy_engine(seed, shape, steps_in_flight):
    logging.disable(logging.CRITICAL)
    try:
        simulation = Simulation(seed, replace(SHAPES[shape], steps_in_flight=steps_in_flight))
        for _ in range(60):
            simulation.run(5)
            core = simulation.core
            core.handle(WatchPool(0.0, with_leases=True), 0.0)
            frame = core.pool_frame(0.0)
            total, bills = exact_bills(core)
            told = math.fsum(holdings_of(lease.table, core.pool).bill for lease in core.leases)
            assert math.isclose(told, float(total), abs_tol=1e-9)
            for row in frame.leases:
                assert math.isclose(row.bill, float(bills.get(row.lease, 0)), abs_tol=1e-9)
                assert row.bill <= row.num_blocks
            unbilled = frame.num_active - frame.num_public - told
            assert unbilled > -1e-9
            if not core.scheduler.flights and all(not lease.table.adoptions for lease in core.leases):
                assert abs(unbilled) < 1e-9
    finally:
        logging.disable(logging.NOTSET)


def evict_all(engine: EngineHarness, request: int, tenant: str = "beta") -> None:
    """Fill the pool with somebody else's prompt."""
    engine.generate(request, prompt(engine.config.num_blocks * 4 - 6, request), tenant=tenant, keep_lease=False)


@pytest.mark.parametrize("release", [True, False])
def test_blocks_that_were_evicted_and_are_wanted_again_are_counted_once_each(release):
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(17), lease=5, params=sampling_params(1))
    if release:
        engine.send(Release(5))
    evict_all(engine, 2)
    assert rows(engine).num_wanted_again == 0
    engine.generate(3, prompt(17), lease=6, params=sampling_params(1))
    frame = rows(engine)
    acme = next(row for row in frame.tenants if row.tenant == "acme")
    assert (acme.num_evicted, acme.num_wanted_again, frame.num_wanted_again) == (4, 4, 4)
    engine.send(Release(6))
    engine.generate(4, prompt(17), lease=7, params=sampling_params(1))
    assert rows(engine).num_wanted_again == 4, "what is found is not missed"


def test_what_is_wanted_for_the_first_time_was_not_evicted():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(17), lease=5, params=sampling_params(1))
    engine.send(Release(5))
    evict_all(engine, 2)
    engine.generate(3, prompt(17, 8), lease=6, params=sampling_params(1))
    assert rows(engine).num_wanted_again == 0


def test_another_tenant_s_eviction_is_not_one_s_own_loss():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(17), lease=5, params=sampling_params(1))
    engine.send(Release(5))
    evict_all(engine, 2)
    engine.generate(3, prompt(17), lease=6, tenant="gamma", params=sampling_params(1))
    assert rows(engine).num_wanted_again == 0


def test_what_was_evicted_after_a_public_prompt_is_missed_too():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(8), lease=1, tenant="", params=sampling_params(1), compute_only=True)
    engine.generate(2, prompt(17), lease=5, params=sampling_params(1))
    engine.send(Release(5))
    engine.send(Release(1))
    evict_all(engine, 3)
    engine.generate(4, prompt(17), lease=6, params=sampling_params(1))
    frame = rows(engine)
    assert [row.num_wanted_again for row in frame.tenants if row.tenant == "acme"] == [2]
    assert frame.num_wanted_again == 4


def test_nothing_of_a_sequence_that_is_forgotten_is_remembered_as_evicted():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(17), lease=5, params=sampling_params(1))
    evict_all(engine, 2)
    account = engine.core.pool.account("acme")
    assert len(account.evicted) > 0
    engine.send(Trim(5, 0, forget=True))
    assert len(account.evicted) == 0


def test_what_was_evicted_after_a_public_prompt_is_forgotten_with_its_sequence_and_that_prompt_is_not():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(8), lease=1, tenant="", params=sampling_params(1), compute_only=True)
    engine.generate(2, prompt(17), lease=5, params=sampling_params(1))
    engine.send(Release(5))
    engine.send(Release(1))
    evict_all(engine, 3)
    public, own = engine.core.pool.public, engine.core.pool.account("acme")
    assert (len(public.evicted), len(own.evicted)) == (2, 2)
    engine.send(Erase(LeaseId(5), "acme", prompt(17)))
    assert (len(public.evicted), len(own.evicted)) == (2, 0)
    engine.send(Erase(LeaseId(1), "", prompt(8)))
    assert len(public.evicted) == 0


def test_nothing_of_a_tenant_that_is_erased_is_remembered_as_evicted():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(17), params=sampling_params(1), keep_lease=False)
    evict_all(engine, 2)
    assert len(engine.core.pool.account("acme").evicted) > 0
    engine.send(EraseTenant(LeaseId(77), "acme", []))
    assert len(engine.core.pool.account("acme").evicted) == 0


def test_the_facts_do_not_move_a_tier_or_a_count():
    engine = harness()
    engine.generate(1, prompt(9), lease=5, params=sampling_params(1))
    before = rows(engine)
    inspect(engine)
    assert rows(engine) == before
    assert before.leases[0].tier is Tier.DEVICE


def test_what_was_counted_outlives_the_kv_of_a_broken_pool(caplog):
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    account = engine.core.pool.account("acme")
    account.num_evicted, account.num_wanted_again, engine.core.pool.public.num_wanted_again = 3, 2, 1
    engine.core.pool.blocks[engine.core.leases.get(5).table.block_ids[0]].ref_count += 1
    with caplog.at_level(logging.CRITICAL, "chatd.engine.core"):
        for _ in range(5):
            engine.core.idle(1.0)
    frame = rows(engine)
    assert engine.core.stats().integrity_errors == 1
    assert [(row.num_evicted, row.num_wanted_again) for row in frame.tenants] == [(3, 2)]
    assert frame.num_wanted_again == 3
