"""In-flight join: who needs the same uncomputed prefix as another request waits for it, and computes none of it."""

import gc
import sys

import pytest

from chatd.engine.messages import Cancel, FinishReason, RequestClass, Waiting, WaitReason
from chatd.testing.engine import EngineHarness, engine_config, sampling_params

SIZE = 16
LONG = 4096
TAIL = SIZE
"""What is left of a prompt of whole blocks: a request that draws never finds its last block."""


def prompt(length, start=0):
    return [(start * 7 + i * i) % 97 for i in range(length)]


def harness(**config):
    values = {"num_blocks": 2000, "block_size": SIZE, "max_model_len": 8192, "max_num_batched_tokens": 512}
    return EngineHarness(engine_config(**(values | {"max_num_seqs": 32} | config)))


def answers(prompts):
    """Return what each prompt is answered with, alone."""
    return [EngineHarness(harness().config).generate(1, ids) for ids in prompts]


def joined(engine):
    return engine.core.scheduler.joins.num_joins


def set_aside(engine):
    return [r.request_id for group in engine.core.scheduler.joins.groups for r, _ in group.joiners.values()]


def test_sixteen_equal_prompts_compute_one_and_sixteen_tails():
    engine = harness()
    for request in range(16):
        engine.submit(request, prompt(LONG), params=sampling_params(1))
    engine.run()
    assert engine.runner.num_rows == LONG + 15 * TAIL
    assert {tuple(ids) for ids in engine.outputs.values()} == {tuple(engine.outputs[0])}
    assert len(engine.outputs) == 16
    assert joined(engine) == engine.core.stats().num_joins == 15
    assert [engine.done[request].num_cached_tokens for request in range(16)] == [0] + [LONG - TAIL] * 15


def test_a_joiner_holds_no_blocks_and_no_slot():
    engine = harness()
    for request in range(16):
        engine.submit(request, prompt(LONG))
    engine.step(3)
    assert set_aside(engine) == list(range(1, 16)) or engine.core.scheduler.running[0].request_id == 0
    engine.step(LONG // 512 - 4)
    assert [request.request_id for request in engine.core.scheduler.running] == [0]
    assert engine.core.pool.num_active == len(engine.core.leases.get(0).table.block_ids)
    assert all(not engine.core.leases.get(request).table.block_ids for request in range(1, 16))


def test_prompts_that_share_a_part_compute_that_part_once():
    engine = harness()
    shared = prompt(1000)
    prompts = [shared + prompt(300, 10 + request) for request in range(6)]
    for request, ids in enumerate(prompts):
        engine.submit(request, ids)
    engine.run()
    whole = 1000 // SIZE * SIZE
    prompts_rows = 1300 + 5 * (1300 - whole)
    outputs = sum(len(ids) - 1 for ids in engine.outputs.values())
    assert engine.runner.num_rows == prompts_rows + outputs
    assert [engine.outputs[request] for request in range(6)] == answers(prompts)


def test_a_joiner_goes_on_as_soon_as_its_leader_is_past_what_they_share():
    engine = harness(max_num_batched_tokens=SIZE, max_num_seqs=4)
    engine.submit(1, prompt(40 * SIZE))
    engine.submit(2, prompt(3 * SIZE) + prompt(5, 11))
    engine.step(3)
    assert set_aside(engine) == []
    assert joined(engine) == 1
    engine.step(3)
    assert 2 in {r.request_id for r in engine.core.scheduler.running}


def test_a_prompt_that_shares_more_with_the_second_one_joins_twice():
    engine = harness()
    first = prompt(1024) + prompt(512, 3)
    second = prompt(1024) + prompt(512, 4)
    third = second + prompt(64, 5)
    for request, ids in enumerate((first, second, third)):
        engine.submit(request, ids, params=sampling_params(1))
    engine.run()
    assert engine.runner.num_rows == 1536 + 512 + 64
    assert joined(engine) == 2


@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 1, 5 * SIZE - 1, 5 * SIZE, 5 * SIZE + 1])
def test_nobody_joins_for_less_than_a_block(length):
    engine = harness(max_num_batched_tokens=32)
    for request in range(3):
        engine.submit(request, prompt(length), params=sampling_params(1))
    engine.run()
    shared = (length - 1) // SIZE * SIZE
    assert engine.runner.num_rows == length + 2 * (length - shared)


def test_tenants_never_join():
    engine = harness()
    for request in range(4):
        engine.submit(request, prompt(LONG), tenant=f"t{request}", params=sampling_params(1))
    engine.run()
    assert engine.runner.num_rows == 4 * LONG
    assert joined(engine) == 0


def test_a_later_request_joins_a_leader_in_the_middle():
    engine = harness()
    engine.submit(1, prompt(LONG), params=sampling_params(1))
    engine.step(4)
    engine.submit(2, prompt(LONG), params=sampling_params(1))
    engine.run()
    assert engine.runner.num_rows == LONG + TAIL
    assert joined(engine) == 1


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_the_first_joiner_leads_where_the_leader_is_cancelled(steps):
    engine = harness()
    for request in range(16):
        engine.submit(request, prompt(LONG), params=sampling_params(1))
    engine.step(steps)
    engine.send(Cancel(0))
    engine.run()
    # What the leader has computed is not lost, and nobody but it was cancelled.
    assert engine.runner.num_rows == LONG + 14 * TAIL
    assert [engine.done[request].reason for request in range(1, 16)] == [FinishReason.MAX_OUTPUT_TOKENS] * 15


def test_leaders_may_be_cancelled_one_after_another():
    engine = harness()
    for request in range(8):
        engine.submit(request, prompt(LONG), params=sampling_params(1))
    for request in range(7):
        engine.step(1)
        assert [r.request_id for r in engine.core.scheduler.running] == [request]
        engine.send(Cancel(request))
    engine.run()
    assert engine.runner.num_rows == LONG
    assert len(engine.outputs[7]) == 1


def test_the_first_joiner_leads_where_the_leader_fails(caplog):
    engine = harness()
    prompts = [prompt(LONG)] * 4
    for request, ids in enumerate(prompts):
        engine.submit(request, ids)
    engine.step(2)
    engine.runner.failing.add(0)
    for _ in range(500):
        if not engine.core.has_work:
            break
        engine._keep(engine.core.step(engine.clock.now))
    assert engine.done[0].reason is FinishReason.FAILED
    expected = answers(prompts[:1])[0]
    assert [engine.outputs[request] for request in (1, 2, 3)] == [expected] * 3


def test_a_joiner_that_is_cancelled_leaves_the_others_alone():
    engine = harness()
    for request in range(4):
        engine.submit(request, prompt(LONG), params=sampling_params(1))
    engine.step(LONG // 512)
    engine.send(Cancel(2))
    engine.run()
    assert engine.runner.num_rows == LONG + 2 * TAIL


def test_a_leader_that_is_preempted_is_followed_by_the_first_joiner_and_joins_it():
    engine = harness(num_blocks=300, max_model_len=2048, max_num_batched_tokens=64)
    for request in range(4):
        engine.submit(request, prompt(2000), params=sampling_params(1))
    engine.step(5)
    scheduler = engine.core.scheduler
    leader = scheduler.running[0]
    scheduler.roster.preempt(leader, leader)
    engine.core.check_invariants()
    engine.run()
    lost = 5 * 64
    assert lost + 2000 + 3 * TAIL >= engine.runner.num_rows >= 2000 + 3 * TAIL
    assert len(engine.outputs) == 4


def test_a_leader_inherits_the_highest_class_of_its_joiners():
    engine = harness(max_num_batched_tokens=64)
    engine.submit(1, prompt(1024), request_class=RequestClass.BATCH, params=sampling_params(1))
    engine.step()
    engine.submit(2, prompt(1024), params=sampling_params(1))
    engine.submit(3, prompt(2048, 5), params=sampling_params(1))
    engine.step(2)
    leader = engine.core.scheduler.requests[1]
    assert (leader.request_class, leader.schedule_class) == (RequestClass.BATCH, RequestClass.INTERACTIVE)
    while 2 not in engine.done:
        engine.step()
    # The interactive one is not held up by another interactive prompt that would go before a batch one.
    assert 3 not in engine.done
    engine.run()
    assert engine.runner.num_rows == 1024 + TAIL + 2048


def test_a_leader_has_its_own_class_back_when_the_joiner_is_gone():
    engine = harness(max_num_batched_tokens=64)
    engine.submit(1, prompt(1024), request_class=RequestClass.BATCH, params=sampling_params(1))
    engine.step()
    engine.submit(2, prompt(1024))
    engine.step()
    engine.send(Cancel(2))
    assert engine.core.scheduler.requests[1].schedule_class is RequestClass.BATCH


def test_a_leader_that_stands_still_for_two_steps_is_overtaken_and_computes_nothing_twice():
    engine = harness(max_num_batched_tokens=64)
    engine.submit(1, prompt(1024), params=sampling_params(1))
    engine.step()
    engine.submit(2, prompt(512) + prompt(20, 9), params=sampling_params(1))
    engine.step()
    assert set_aside(engine) == [2]
    # Shorter prompts of the same tenant go before the leader's own.
    for request in range(3, 9):
        engine.submit(request, prompt(64, request), params=sampling_params(1))
    engine.step(2)
    assert set_aside(engine) == []
    engine.run()
    assert engine.runner.num_rows == 1024 + 20 + 6 * 64
    assert engine.done[2].timings.num_prefill_tokens == 532 - 128
    assert engine.done[1].timings.num_prefill_tokens == 1024 - (512 - 128)
    assert engine.core.scheduler.counters.counter("acme") == pytest.approx(
        # The second one found 128 tokens, the first one 384 that the second had computed.
        engine.runner.num_rows + 0.1 * 128 + 0.1 * 384 + 8 * 2.0
    )


def test_joiners_stand_in_nobodys_way_and_say_that_they_wait_for_another():
    engine = harness(max_num_batched_tokens=64, waiting_interval_s=0.0)
    engine.submit(1, prompt(1024), params=sampling_params(1))
    engine.step()
    for request in range(2, 6):
        engine.submit(request, prompt(1024), params=sampling_params(1))
    engine.submit(9, prompt(40, 5), params=sampling_params(1))
    engine.step(2)
    assert 9 in engine.done
    told = {message.request: message for message in engine.messages if isinstance(message, Waiting)}
    assert {request for request, message in told.items() if message.why is WaitReason.JOIN} == {2, 3, 4, 5}
    assert [told[request].position for request in range(2, 6)] == [1, 2, 3, 4]


def test_a_steps_work_does_not_grow_with_the_number_of_joiners():
    def calls_of(num_joiners):
        engine = harness(max_num_batched_tokens=64, waiting_interval_s=10.0)
        engine.submit(1, prompt(LONG))
        engine.step()
        for request in range(2, 2 + num_joiners):
            engine.submit(request, prompt(LONG))
        engine.step(2)
        while set(set_aside(engine)) != set(range(2, 2 + num_joiners)):
            engine.step()
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1

        gc.disable()  # a collection's callbacks are calls too, and come when they come
        sys.setprofile(count)
        try:
            engine.core.step(engine.clock.now)
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    assert calls_of(4) == calls_of(40)


def test_the_work_of_joining_is_one_lookup_and_one_comparison(monkeypatch):
    engine = harness(max_num_batched_tokens=64, num_blocks=600)
    index = engine.core.pool.index
    found = []
    find = index.find
    monkeypatch.setattr(index, "find", lambda *key: found.append(1) or find(*key))
    engine.submit(1, prompt(LONG))
    engine.step(10)
    found.clear()
    engine.submit(2, prompt(LONG), params=sampling_params(1))
    steps = 0
    while 2 not in engine.done:
        engine.step()
        steps += 1
    # Once when it joins and once when it goes on; the leader looks its own blocks up when it registers them.
    per_lookup = 2  # "public" first, then its own namespace
    assert len(found) <= per_lookup * (10 * 4 + 1) + per_lookup * (LONG // SIZE) + 2 * per_lookup * (LONG // SIZE)


def test_a_joiner_that_has_its_prefix_goes_before_longer_prompts_of_its_tenant():
    engine = harness(max_num_batched_tokens=128)
    engine.submit(1, prompt(1024), params=sampling_params(1))
    engine.step()
    engine.submit(2, prompt(1024), params=sampling_params(1))
    engine.step()
    assert set_aside(engine) == [2]
    engine.submit(3, prompt(1000, 5), params=sampling_params(1))
    while 2 not in engine.done:
        engine.step()
    assert 3 not in engine.done
    assert engine.core.scheduler.requests[3].num_computed_tokens < 2 * 128
