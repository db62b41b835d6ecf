"""A tenant's weight and floor change while everything runs."""

import logging
import math

import pytest

from chatd.engine.core import TenantLimits
from chatd.engine.messages import FinishReason, RequestClass, SetTenant
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.prefix_index import PrefixIndex
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


def prompt(length, start=0):
    return [(start * 11 + i) % 97 for i in range(length)]


def test_a_weight_counts_from_now_on():
    engine = EngineHarness()
    engine.generate(1, prompt(10), params=sampling_params(1))
    before = engine.core.scheduler.counters.counter("acme")
    engine.send(SetTenant("acme", 4.0, 0.0))
    assert engine.core.scheduler.counters.counter("acme") == before
    engine.generate(2, prompt(10, 5), params=sampling_params(1))
    assert engine.core.scheduler.counters.counter("acme") == before + 12 / 4
    assert engine.core.pool.account("acme").weight == 4.0


def test_backlogged_tenants_change_their_shares_with_their_weights():
    engine = EngineHarness(engine_config(num_blocks=400, max_num_seqs=2))
    number = 0

    def served(steps):
        nonlocal number
        counts = engine.core.scheduler.ledger.counts
        before = {name: counts[name].output_tokens if name in counts else 0 for name in ("acme", "blue")}
        for _ in range(steps):
            for tenant in ("acme", "blue"):
                while engine.core.scheduler.counters.num_requests(tenant) < 6:
                    number += 1
                    engine.submit(number, prompt(4, number), tenant=tenant, params=sampling_params(3), keep_lease=False)
            engine._keep(engine.core.step(engine.clock.now))
        return [counts[name].output_tokens - before[name] for name in ("acme", "blue")]

    acme, blue = served(600)
    assert acme / blue == pytest.approx(1.0, abs=0.1)
    engine.send(SetTenant("blue", 3.0, 0.0))
    acme, blue = served(900)
    assert blue / acme == pytest.approx(3.0, rel=0.15)


def test_a_floor_protects_from_now_on_and_is_given_up_again():
    engine = EngineHarness(engine_config(num_blocks=16, max_model_len=32))
    engine.generate(1, prompt(15), tenant="acme", params=sampling_params(1), keep_lease=False)
    acme = engine.core.pool.account("acme")
    cached = acme.num_resident
    engine.send(SetTenant("acme", 1.0, 0.25))
    assert acme.floor == 4
    for request in range(2, 8):
        engine.generate(request, prompt(30, request), tenant="blue", params=sampling_params(1))
        engine.core.check_invariants()
    assert acme.num_resident == min(4, cached)
    engine.send(SetTenant("acme", 1.0, 0.0))
    for request in range(8, 14):
        engine.generate(request, prompt(30, request), tenant="blue", params=sampling_params(1))
        engine.core.check_invariants()
    assert acme.num_resident == 0


def test_what_can_never_fit_beside_a_floor_is_refused_from_now_on():
    engine = EngineHarness(engine_config(num_blocks=16, max_model_len=64))
    engine.send(SetTenant("acme", 1.0, 0.5))
    engine.submit(1, prompt(40), tenant="blue")
    assert (engine.done[1].reason, engine.done[1].error_code) == (FinishReason.FAILED, "context_length_exceeded")
    assert "room for 31" in engine.done[1].error_message
    engine.generate(2, prompt(40), tenant="acme", params=sampling_params(1))
    engine.send(SetTenant("acme", 1.0, 0.0))
    assert len(engine.generate(3, prompt(40), tenant="blue", params=sampling_params(1))) == 1


def test_a_request_that_waits_and_can_never_fit_any_more_ends_at_once():
    engine = EngineHarness(engine_config(num_blocks=16, max_model_len=64, max_num_seqs=1))
    engine.submit(1, prompt(4), tenant="acme", params=sampling_params(20))
    engine.step()
    engine.submit(2, prompt(50), tenant="blue", request_class=RequestClass.BATCH)
    engine.submit(3, prompt(20), tenant="blue", params=sampling_params(1))
    engine.send(SetTenant("acme", 1.0, 0.5))
    assert engine.done[2].reason is FinishReason.KV_EXHAUSTED
    engine.run()
    assert engine.done[3].reason is FinishReason.MAX_OUTPUT_TOKENS


def test_floors_are_cut_to_half_of_the_pool_and_the_log_says_so(caplog):
    limits = {"acme": TenantLimits(1.0, 16), "blue": TenantLimits(1.0, 4)}
    engine = EngineHarness(engine_config(num_blocks=64, tenants=limits))
    with caplog.at_level(logging.WARNING):
        engine.send(SetTenant("blue", 2.0, 0.5))
    assert "asks for a floor of 32 blocks and gets 16" in caplog.text
    assert [engine.core.pool.account(name).floor for name in ("acme", "blue")] == [16, 16]
    engine.core.check_invariants()


@pytest.mark.parametrize(
    "message",
    [
        SetTenant("", 2.0, 0.1),
        SetTenant("acme", 0.0, 0.1),
        SetTenant("acme", -1.0, 0.1),
        SetTenant("acme", math.nan, 0.1),
        SetTenant("acme", math.inf, 0.1),
        SetTenant("acme", 1.0, -0.1),
        SetTenant("acme", 1.0, math.nan),
    ],
)
def test_what_makes_no_sense_changes_nothing(message, caplog):
    engine = EngineHarness()
    engine.send(message)
    assert "nothing changes" in caplog.text
    assert engine.core.pool.public.floor == 0
    assert engine.core.pool.account("acme").floor == 0
    assert engine.core.pool.account("acme").weight == 1.0


def test_a_lighter_tenant_with_cached_blocks_comes_up_for_eviction():
    pool = BlockPool(8, PrefixIndex())
    for number, tenant in enumerate(("acme", "blue")):
        blocks = pool.allocate(pool.account(tenant), 4)
        for block_id in blocks:
            pool.register(block_id, 1 + number, None, bytes([block_id] * 16))
        pool.release(blocks)
    pool.set_limits("blue", 0.5, 0)
    taken = pool.allocate(pool.account("crow"), 2)
    assert taken is not None
    assert pool.account("blue").num_resident == 2
    assert pool.account("acme").num_resident == 4


def test_a_request_that_has_outgrown_what_a_new_floor_leaves_ends_while_others_go_on():
    engine = EngineHarness(engine_config(num_blocks=16, max_model_len=64, max_num_seqs=4))
    engine.submit(1, prompt(20), tenant="acme", params=sampling_params(40))
    engine.step(2)
    engine.send(SetTenant("blue", 1.0, 0.5))
    number = 100
    for _ in range(60):
        # There is always a request of the other tenant, so the machine never comes to a standstill.
        while engine.core.scheduler.counters.num_requests("blue") < 3:
            number += 1
            engine.submit(number, prompt(12, number), tenant="blue", params=sampling_params(6), keep_lease=False)
        engine.step()
    assert engine.done[1].reason is FinishReason.KV_EXHAUSTED
    assert engine.core.scheduler.counters.num_requests("acme") == 0
