"""Every request that waits is told why and where it stands, in a bounded number of messages at a time."""

import pytest

from chatd.engine.core import TenantLimits
from chatd.engine.explanations import MAX_LOOKED_AT
from chatd.engine.messages import RequestClass, Waiting, WaitReason
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


def prompt(length, start=0):
    return [(start * 13 + i * i) % 97 for i in range(length)]


def harness(**config):
    return EngineHarness(engine_config(**({"waiting_interval_s": 0.0} | config)))


def told(engine):
    """Return the last (place, reason) that each request was told."""
    return {m.request: (m.position, m.why) for m in engine.messages if isinstance(m, Waiting)}


def reasons(engine):
    return {request: why for request, (_, why) in told(engine).items()}


def test_with_one_slot_all_others_wait_for_slots():
    engine = harness(max_num_seqs=1)
    engine.submit(0, prompt(4), params=sampling_params(30))
    engine.step()
    for request in range(1, 6):
        engine.submit(request, prompt(4, request))
    engine.step()
    assert told(engine) == {request: (request, WaitReason.SLOTS) for request in range(1, 6)}


def test_with_a_full_pool_all_others_wait_for_blocks():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.submit(0, prompt(50), params=sampling_params(10))
    engine.step(3)
    for request in range(1, 4):
        engine.submit(request, prompt(30, request))
    engine.step()
    assert told(engine) == {request: (request, WaitReason.NO_BLOCKS) for request in range(1, 4)}


def test_where_the_step_is_full_others_wait_for_their_share():
    engine = harness(max_num_batched_tokens=8)
    engine.submit(0, prompt(60))
    engine.step()
    for request in range(1, 4):
        engine.submit(request, prompt(70, request), params=sampling_params(1))
    engine.step()
    assert reasons(engine) == dict.fromkeys(range(1, 4), WaitReason.FAIR_SHARE)


def test_who_needs_what_another_computes_waits_for_that():
    engine = harness(max_num_batched_tokens=8)
    for request in range(3):
        engine.submit(request, prompt(60))
    engine.step()
    assert reasons(engine) == {1: WaitReason.JOIN, 2: WaitReason.JOIN}


def test_a_request_preempted_for_a_slot_waits_for_one():
    engine = harness(max_num_seqs=2, tenants={"blue": TenantLimits(1.0)})
    for request in range(2):
        engine.submit(request, prompt(8, request), params=sampling_params(40))
    engine.step(3)
    engine.submit(9, prompt(8, 9), tenant="blue", params=sampling_params(40))
    engine.step()
    assert reasons(engine)[1] is WaitReason.SLOTS


def test_the_place_is_in_ones_own_tenants_queue_over_all_classes():
    engine = harness(max_num_seqs=1)
    engine.submit(0, prompt(4), tenant="crow", params=sampling_params(60))
    engine.step()
    engine.submit(1, prompt(4, 1), tenant="acme", request_class=RequestClass.BATCH)
    engine.submit(2, prompt(4, 2), tenant="acme")
    engine.submit(3, prompt(4, 3), tenant="acme", request_class=RequestClass.PREFILL_AHEAD)
    for request in range(4, 40):
        engine.submit(request, prompt(4, request), tenant="blue")
    engine.core.scheduler.running[0].safe_until = 10**6  # Nobody takes its slot.
    engine.step()
    places = {request: place for request, (place, _) in told(engine).items()}
    assert (places[2], places[1], places[3]) == (1, 2, 3)


@pytest.mark.parametrize("number", [100, 1000, 4000])
def test_many_are_told_in_bounded_portions_the_next_ones_first_and_everybody_in_the_end(number):
    engine = harness(max_num_seqs=1, max_leases=5000, waiting_interval_s=0.25)
    engine.submit(0, prompt(4), tenant="crow", params=sampling_params(120))
    engine.core.step(engine.clock.now)
    engine.core.scheduler.running[0].safe_until = 10**6
    for request in range(1, number + 1):
        engine.submit(request, [request % 97] * 4, tenant=("acme", "blue")[request % 2])
    portions = []
    for _ in range(2 + 2 * number // MAX_LOOKED_AT + 1):
        engine.clock.advance(0.25)
        said = engine._keep(engine.core.step(engine.clock.now))
        portions.append([message.request for message in said if isinstance(message, Waiting)])
    assert max(len(portion) for portion in portions) <= MAX_LOOKED_AT
    assert {1, 2, 3, 4} <= set(portions[0])
    assert set(told(engine)) == set(range(1, number + 1))
    # Nothing has moved, so nothing more is said.
    assert sum(len(portion) for portion in portions) == number
    assert all(why is WaitReason.SLOTS for why in reasons(engine).values())
    places = sorted(place for request, (place, _) in told(engine).items() if request % 2)
    assert places == list(range(1, number // 2 + 1))
