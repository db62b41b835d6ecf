"""The engine core: the front's verbs, what is refused, what fails alone, and what it tells about itself."""

import logging

import pytest

from chatd.engine.core import TenantLimits
from chatd.engine.cost_model import CostParameters
from chatd.engine.messages import (
    Cancel,
    EngineStats,
    Finish,
    FinishReason,
    Fork,
    Forked,
    LeaseLost,
    LeaseTier,
    Ping,
    Pong,
    PoolFrame,
    Release,
    Retain,
    Shutdown,
    Started,
    Tier,
    Trim,
    WatchPool,
)
from chatd.engine.sampling import SamplingParams
from chatd.errors import ConfigError
from chatd.kvcache.lease import LeaseState
from chatd.kvcache.prefix_index import PrefixIndex
from chatd.testing.engine import EngineHarness, chains_of, engine_config, sampling_params


def harness(**config):
    return EngineHarness(engine_config(**config))


def prompt(length, start=0):
    return [(start + i) % 97 for i in range(length)]


def answer(engine, token_ids, number):
    """The tokens that follow a prefix, by the fake's rule."""
    ids = list(token_ids)
    for _ in range(number):
        ids.append(engine.runner.next_token(chains_of(ids)[-1]))
    return ids[len(token_ids) :]


ANSWER = tuple(answer(harness(), prompt(10), 5))


# Turns on a lease.


def test_a_turn_computes_its_new_tokens_only():
    engine = harness()
    first = engine.generate(1, prompt(10), lease=5)
    rows = engine.runner.num_rows
    second = engine.generate(2, [3, 1, 4], lease=5, base_len=18)
    assert second == answer(engine, prompt(10) + first + [3, 1, 4], 8)
    assert engine.done[2].num_prompt_tokens == 21
    assert engine.done[2].num_cached_tokens == 17
    # The last token of the first answer was never computed; then 3 new ones, and 7 of the answer.
    assert engine.runner.num_rows - rows == 1 + 3 + 7


@pytest.mark.parametrize("length", range(15, 26))
def test_the_partial_block_is_kept_between_turns_whatever_the_length(length):
    engine = harness()
    engine.generate(1, prompt(length), lease=5, params=sampling_params(3))
    engine.generate(2, [1], lease=5, base_len=length + 3)
    assert engine.done[2].num_cached_tokens == length + 2


def test_a_turn_with_no_new_tokens_goes_on_from_what_is_there():
    engine = harness()
    first = engine.generate(1, prompt(10), lease=5, params=sampling_params(3))
    assert engine.generate(2, [], lease=5, base_len=13) == answer(engine, prompt(10) + first, 8)


@pytest.mark.parametrize("length", [7, 8, 9, 11, 12])
def test_a_turn_over_computed_tokens_alone_computes_the_last_one_again(length):
    engine = harness()
    engine.generate(1, prompt(12), lease=5, params=sampling_params(3))
    ids = prompt(12)[:length]
    assert engine.generate(2, [], lease=5, base_len=length) == answer(engine, ids, 8)
    assert engine.done[2].num_cached_tokens == length - 1


def test_a_shorter_base_trims_the_lease():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    assert engine.generate(2, [9, 9], lease=5, base_len=10) == answer(engine, [*prompt(10), 9, 9], 8)
    assert engine.length(5) == 20


def test_a_longer_base_than_the_engine_holds_is_a_lost_lease():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    assert engine.submit(2, [1], lease=5, base_len=99) == [LeaseLost(2, 5)]
    assert engine.submit(3, [1], lease=6, base_len=1) == [LeaseLost(3, 6)]
    assert not engine.core.has_work
    assert engine.length(5) == 18


def turn_work(history):
    """Count what a turn costs on a resident lease of `history` tokens, apart from attention's own read."""
    engine = EngineHarness(
        engine_config(num_blocks=1024, block_size=16, max_model_len=16000, max_num_batched_tokens=16000)
    )
    engine.generate(1, prompt(history), lease=5, params=sampling_params(1))
    engine.runner._attend = lambda chunk: 5
    work = {"looked up": 0, "hashed bytes": 0, "rows": 0}
    index = engine.core.pool.index
    find, hash_function = index.find, index.hash_function

    def count_find(*args):
        work["looked up"] += 1
        return find(*args)

    def count_hash(data):
        work["hashed bytes"] += len(data)
        return hash_function(data)

    index.find, index.hash_function = count_find, count_hash
    before = engine.core.pool.num_active
    engine.submit(2, prompt(40, 3), lease=5, base_len=history + 1, params=sampling_params(20))
    while engine.core.has_work:
        engine._keep(engine.core.step(0.0))
    work["rows"] = engine.runner.num_rows - history
    work["blocks"] = engine.core.pool.num_active - before
    work["messages"] = len([message for message in engine.messages if getattr(message, "request", 2) == 2])
    return work


def test_a_turn_costs_the_same_at_1k_and_at_8k_of_history():
    assert turn_work(1024) == turn_work(8192)
    assert turn_work(1024)["rows"] == 1 + 40 + 19


# Forks, trims, ends.


@pytest.mark.parametrize("at", [1, 7, 8, 9, 17, 18])
def test_a_fork_goes_on_from_its_token_and_recomputes_at_most_one(at):
    engine = harness()
    ids = prompt(10) + engine.generate(1, prompt(10), lease=5)
    engine.send(Fork(5, 6, at))
    assert engine.generate(2, [9, 9], lease=6, base_len=at) == answer(engine, [*ids[:at], 9, 9], 8)
    assert engine.done[2].num_cached_tokens == min(at, 17)
    assert engine.generate(3, [9, 8], lease=5, base_len=18) == answer(engine, [*ids, 9, 8], 8)


@pytest.mark.parametrize(("at", "shared"), [(0, (0, 0)), (7, (7, 2)), (8, (8, 2)), (9, (9, 3)), (18, (17, 5))])
def test_a_fork_says_what_it_shares(at, shared):
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    assert engine.core.handle(Fork(5, 6, at), engine.clock()) == [Forked(6, *shared)]
    assert engine.core.pool.num_shared == shared[1]
    # What it cannot open shares nothing; the lease that is there keeps what it has.
    for fork in (Fork(5, 6, at), Fork(99, 7, 1), Fork(5, 7, 19), Fork(5, 7, -1)):
        assert engine.core.handle(fork, engine.clock()) == [Forked(fork.new_lease, 0, 0)]


def test_a_fork_of_a_running_request_does_not_disturb_it():
    engine = harness()
    engine.submit(1, prompt(10), lease=5, params=sampling_params(20))
    engine.step(5)
    engine.send(Fork(5, 6, 12))
    engine.submit(2, [7], lease=6, base_len=12)
    engine.run()
    assert engine.outputs[1] == answer(engine, prompt(10), 20)
    ids = prompt(10) + engine.outputs[1][:2]
    assert engine.outputs[2] == answer(engine, [*ids, 7], 8)


def test_a_fork_of_what_is_not_there_is_a_lost_lease_later():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    for fork in (Fork(99, 6, 1), Fork(5, 6, 19), Fork(5, 6, -1)):
        engine.send(fork)
        assert engine.length(6) == -1
    engine.send(Fork(5, 5, 3))
    assert engine.length(5) == 18


def test_trim_cuts_an_idle_lease_at_once_and_a_busy_one_at_the_end_of_its_turn():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    engine.send(Trim(5, 6))
    assert engine.length(5) == 6
    engine.submit(2, prompt(4), lease=5, base_len=6, params=sampling_params(3))
    engine.send(Trim(5, 8))
    engine.send(Trim(5, 9))
    assert engine.length(5) == 10
    engine.send(Trim(77, 1))
    engine.run()
    assert engine.done[2].num_output_tokens == 3
    assert engine.length(5) == 8
    engine.core.check_invariants()
    engine.generate(3, prompt(4), lease=5, base_len=8, params=sampling_params(3))
    assert engine.length(5) == 15


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_trim_of_a_request_that_is_cancelled_takes_effect_in_any_state(steps):
    engine = harness(max_num_batched_tokens=8)
    engine.submit(1, prompt(30), lease=5, params=sampling_params(40))
    engine.step(steps)
    engine.send(Trim(5, 3))
    engine.send(Cancel(1))
    assert engine.length(5) == 3
    engine.core.check_invariants()


def test_sampling_parameters_out_of_range_are_refused_and_change_nothing():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    for request, params in enumerate(
        (
            SamplingParams(max_tokens=0),
            SamplingParams(max_tokens=4, temperature=float("nan")),
            SamplingParams(max_tokens=4, stop_token_ids=(-1,)),
            SamplingParams(max_tokens=4, logit_bias=((2**40, 1.0),)),
        ),
        start=2,
    ):
        engine.submit(request, prompt(3), lease=5, base_len=4, params=params)
        assert engine.done[request].error_code == "invalid_request"
    assert engine.length(5) == 18


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_in_any_state_gives_everything_back_and_keeps_the_lease(steps):
    engine = harness(max_num_batched_tokens=8)
    engine.submit(1, prompt(30), lease=5, params=sampling_params(40))
    engine.step(steps)
    engine.send(Cancel(1))
    engine.send(Cancel(1))
    assert engine.done[1].reason is FinishReason.CANCELLED
    assert not engine.core.has_work
    engine.core.check_invariants()
    engine.send(Release(5))
    assert engine.core.pool.num_active == 0


def test_finish_keeps_what_it_says_and_counts_no_more():
    engine = harness()
    engine.submit(1, prompt(10), lease=5, params=sampling_params(40))
    engine.step(6)
    engine.send(Finish(1, 5, 13))
    done = engine.done[1]
    assert (done.reason, done.num_output_tokens, engine.length(5)) == (FinishReason.STOP_STRING, 3, 13)
    ids = prompt(10) + engine.outputs[1][:3]
    assert engine.generate(2, [1, 2], lease=5, base_len=13) == answer(engine, [*ids, 1, 2], 8)


def test_finish_of_an_answer_that_has_just_ended_trims_it_all_the_same():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    engine.send(Finish(1, 5, 12))
    assert engine.length(5) == 12
    assert engine.done[1].reason is FinishReason.MAX_OUTPUT_TOKENS


def test_finish_of_an_answer_that_has_ended_leaves_the_next_one_alone():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    engine.submit(2, [1], lease=5, base_len=18)
    engine.send(Finish(1, 5, 12))
    assert engine.length(5) == 19
    engine.run()


def test_a_request_that_keeps_no_lease_leaves_nothing_but_the_cache():
    engine = harness()
    engine.generate(1, prompt(10), lease=5, keep_lease=False)
    assert engine.length(5) == -1
    assert engine.core.pool.num_active == 0
    assert engine.core.pool.num_cached == 4


def test_release_ends_what_runs_on_the_lease():
    engine = harness()
    engine.submit(1, prompt(10), lease=5)
    engine.step()
    engine.send(Release(5))
    engine.send(Release(5))
    assert engine.done[1].reason is FinishReason.CANCELLED
    assert (engine.length(5), engine.core.pool.num_active) == (-1, 0)


@pytest.mark.parametrize(
    ("params", "reason", "number"),
    [
        ({"max_tokens": 3}, FinishReason.MAX_OUTPUT_TOKENS, 3),
        ({"max_tokens": 500}, FinishReason.CONTEXT, 118),
        ({"max_tokens": 500, "stop_token_ids": ANSWER}, FinishReason.STOP, 1),
        ({"max_tokens": 500, "stop_token_ids": ANSWER, "min_tokens": 4}, FinishReason.STOP, 5),
        ({"max_tokens": 4, "stop_token_ids": ANSWER, "ignore_eos": True}, FinishReason.MAX_OUTPUT_TOKENS, 4),
    ],
)
def test_an_answer_ends_for_one_reason(params, reason, number):
    # The fake draws what it likes; a real sampler does not draw a stop id before `min_tokens`.
    engine = harness()
    engine.generate(1, prompt(10), params=sampling_params(**params))
    assert (engine.done[1].reason, engine.done[1].num_output_tokens) == (reason, number)


# What is refused, before anything changes.


def refused(engine, request):
    done = engine.done[request]
    assert done.reason is FinishReason.FAILED
    return done.error_code


def test_a_second_request_on_a_lease_is_a_conflict_and_the_first_goes_on():
    engine = harness()
    engine.submit(1, prompt(10), lease=5)
    engine.submit(2, [1], lease=5, base_len=10)
    assert refused(engine, 2) == "conflict"
    engine.run()
    assert engine.outputs[1] == answer(engine, prompt(10), 8)


def test_somebody_elses_lease_is_not_known():
    engine = harness()
    engine.generate(1, prompt(10), lease=5, tenant="acme")
    engine.submit(2, [1], lease=5, base_len=10, tenant="blue")
    engine.submit(3, [1], lease=5, base_len=0, tenant="blue")
    assert [refused(engine, request) for request in (2, 3)] == ["not_found", "not_found"]
    assert engine.length(5) == 18


def test_a_prompt_that_can_never_fit_is_refused_at_once_with_the_numbers():
    engine = harness()
    engine.generate(1, prompt(10), lease=5)
    engine.submit(2, prompt(128), lease=6)
    engine.submit(3, prompt(110), lease=5, base_len=18)
    assert [refused(engine, request) for request in (2, 3)] == ["context_length_exceeded"] * 2
    assert "128 tokens, the limit is 127" in engine.done[2].error_message
    assert (engine.length(5), engine.length(6)) == (18, -1)


def test_a_prompt_that_fits_only_into_the_others_floors_is_refused():
    engine = harness(
        num_blocks=40, max_model_len=1000, tenants={"acme": TenantLimits(1.0, 10), "blue": TenantLimits(1.0, 10)}
    )
    # The context is lowered to what everybody can get.
    assert engine.config.max_model_len == 80
    engine.submit(1, prompt(80), tenant="crow")
    assert refused(engine, 1) == "context_length_exceeded"
    engine.generate(2, prompt(79), tenant="crow")
    assert engine.done[2].reason is FinishReason.CONTEXT


@pytest.mark.parametrize("ids", [[], [-1], [97], [2**40]])
def test_ids_that_are_none_are_refused(ids):
    engine = harness(vocab_size=97)
    engine.submit(1, ids, lease=5)
    assert refused(engine, 1) == "invalid_request"
    assert engine.length(5) == -1


def test_too_many_waiting_requests_and_too_many_busy_leases_are_refused_for_now():
    engine = harness(max_num_seqs=1, max_waiting=2, max_leases=4)
    for request in (1, 2, 3):
        engine.submit(request, prompt(5))
    assert refused(engine, 3) == "unavailable"
    engine.step()
    engine.submit(4, prompt(5))
    engine.run()
    assert engine.done[4].reason is FinishReason.MAX_OUTPUT_TOKENS


def test_a_request_id_that_is_in_use_is_dropped(caplog):
    engine = harness()
    engine.submit(1, prompt(5))
    with caplog.at_level(logging.CRITICAL, "chatd.engine.core"):
        assert engine.submit(1, prompt(5), lease=9) == []
    engine.run()
    assert engine.outputs[1] == answer(engine, prompt(5), 8)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"tenants": {"acme": TenantLimits(1.0, 33)}}, "tenants"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(config, name):
    with pytest.raises(ConfigError) as refusal:
        engine_config(**config)
    assert refusal.value.param == name


# What fails.


def test_a_request_whose_step_fails_fails_alone(caplog):
    engine = harness()
    for request in range(1, 7):
        engine.submit(request, prompt(6, request), params=sampling_params(10))
    engine.runner.failing.add(4)
    with caplog.at_level(logging.CRITICAL, "chatd.engine.core"):
        engine.run()
    assert refused(engine, 4) == "engine_error"
    assert "RuntimeError" in engine.done[4].error_message
    for request in (1, 2, 3, 5, 6):
        assert engine.outputs[request] == answer(engine, prompt(6, request), 10)
    assert engine.core.stats().num_failed_steps <= 5


def test_a_step_that_fails_once_costs_nobody_anything(caplog):
    engine = harness()
    engine.submit(1, prompt(6, 1))
    engine.step(2)
    with caplog.at_level(logging.CRITICAL, "chatd.engine.core"):
        engine.runner.raise_next = True
        engine.run()
    assert engine.outputs[1] == answer(engine, prompt(6, 1), 8)


def test_the_text_of_an_exception_stays_in_the_engine(caplog):
    engine = harness()
    engine.submit(1, prompt(6, 1))
    engine.runner.failing.add(1)
    with caplog.at_level(logging.CRITICAL, "chatd.engine.core"):
        engine.run()
    assert "told to" not in engine.done[1].error_message


def test_logits_that_are_not_finite_fail_their_request_only_and_its_blocks_leave_the_cache():
    engine = harness()
    for request in (1, 2):
        engine.submit(request, prompt(10, request), params=sampling_params(6))
    engine.step()
    engine.runner.not_finite.add(1)
    engine.run()
    assert refused(engine, 1) == "engine_error"
    assert engine.outputs[2] == answer(engine, prompt(10, 2), 6)
    assert engine.core.leases.get(1).table.block_ids == []
    engine.generate(3, prompt(10, 1))
    assert engine.done[3].num_cached_tokens == 0
    engine.generate(4, prompt(10, 2))
    assert engine.done[4].num_cached_tokens == 8


def test_a_lease_goes_on_after_its_turn_failed(caplog):
    engine = harness()
    first = engine.generate(1, prompt(10), lease=5)
    engine.submit(2, [1, 2, 3], lease=5, base_len=18)
    engine.runner.failing.add(2)
    with caplog.at_level(logging.CRITICAL, "chatd.engine.core"):
        engine.run()
    assert engine.generate(3, [7], lease=5, base_len=18) == answer(engine, [*prompt(10), *first, 7], 8)
    assert engine.done[3].num_cached_tokens == 17


# Namespaces.


def test_a_public_prefix_is_computed_once_for_everybody_and_charged_to_nobody():
    engine = harness()
    system = prompt(12, 50)
    engine.generate(1, system, tenant="", params=sampling_params(1))
    for request, tenant in ((2, "acme"), (3, "blue"), (4, "acme")):
        engine.generate(request, [*system, 1, 2, 3, 4, 5], tenant=tenant, params=sampling_params(1))
    assert [engine.done[request].num_cached_tokens for request in (2, 3, 4)] == [12, 12, 16]
    engine.send(WatchPool(1.0))
    frame = engine.core.pool_frame(0.0)
    assert [(row.tenant, row.num_active) for row in frame.tenants] == [("acme", 3), ("blue", 2)]


# What the engine tells about itself.


def test_a_lease_that_lost_kv_is_told_and_told_again_when_it_has_it_back():
    engine = harness(num_blocks=16, max_model_len=64)
    engine.generate(1, prompt(30, 1), lease=5, params=sampling_params(1))
    engine.generate(2, prompt(40, 2), lease=6, params=sampling_params(1))
    tiers = [message for message in engine.messages if isinstance(message, LeaseTier)]
    assert tiers == [LeaseTier(5, Tier.DEVICE, "pressure", 24)]
    engine.generate(3, prompt(50, 3), lease=7, params=sampling_params(1))
    last = [message for message in engine.messages if isinstance(message, LeaseTier) and message.lease == 5][-1]
    assert last.tier is Tier.TOKENS
    engine.messages.clear()
    engine.generate(4, [1], lease=5, base_len=31, params=sampling_params(1))
    assert LeaseTier(5, Tier.DEVICE, "used", 32) in engine.messages


def test_a_lease_whose_session_is_looked_at_goes_later():
    engine = harness(num_blocks=24, max_model_len=64)
    engine.generate(1, prompt(30, 1), lease=5, params=sampling_params(1))
    engine.generate(2, prompt(30, 2), lease=6, params=sampling_params(1))
    engine.send(Retain(5, True))
    engine.generate(3, prompt(40, 3), lease=7, params=sampling_params(1))
    assert engine.core.leases.get(5).table.num_computed_tokens == 30
    assert engine.core.leases.get(6).table.num_computed_tokens < 30


def test_who_looks_at_a_session_is_known_before_its_lease_opens_and_after_it_was_forgotten():
    engine = harness(max_leases=2)
    engine.send(Retain(5, True))
    engine.generate(1, prompt(8, 1), lease=5)
    assert engine.core.leases.get(5).state is LeaseState.ATTACHED
    engine.generate(2, prompt(8, 2), lease=6)
    engine.generate(3, prompt(8, 3), lease=7)
    assert engine.core.leases.get(5) is None
    engine.generate(4, prompt(8, 1), lease=5)
    assert engine.core.leases.get(5).state is LeaseState.ATTACHED
    engine.send(Release(5))
    engine.generate(5, prompt(8, 1), lease=5)
    assert engine.core.leases.get(5).state is LeaseState.IDLE
    for lease in range(100, 110):
        engine.send(Retain(lease, True))
    assert len(engine.core.leases._attached) == 2


def test_idle_checks_end_and_begin_again_after_the_next_message():
    engine = harness(num_blocks=5000)
    engine.generate(1, prompt(8, 1), lease=5)
    num_slices = 0
    while not engine.core.is_checked:
        engine.core.idle(1.0)
        num_slices += 1
    assert num_slices > 2
    engine.send(Retain(5, True))
    assert not engine.core.is_checked


def test_output_rates_are_forgotten_though_nobody_watches():
    engine = EngineHarness(engine_config(max_model_len=512), runner_options={"cost": CostParameters(0.03, 0.0, 0.0)})
    engine.generate(1, prompt(10), params=sampling_params(450))
    assert len(engine.core._reporter._output) < 200


def test_frames_come_no_more_often_than_asked_for_and_the_last_state_is_told_when_idle():
    engine = EngineHarness(engine_config(), runner_options={"cost": CostParameters(0.03, 0.0, 0.0)})
    engine.send(WatchPool(0.1))
    engine.messages.clear()
    engine.generate(1, prompt(10), params=sampling_params(20))
    frames = [message for message in engine.messages if isinstance(message, PoolFrame)]
    assert 4 <= len(frames) <= 7
    due = engine.core.next_due()
    assert due is not None
    last = [m for m in engine.core.idle(due + 0.1) if isinstance(m, PoolFrame)]
    assert [frame.num_running for frame in last] == [0]
    # The rate goes on falling for some seconds; once it was told as zero there is nothing more to tell.
    later = [m for m in engine.core.idle(due + 10.0) if isinstance(m, PoolFrame)]
    assert [frame.output_tokens_per_s for frame in later] == [0.0]
    assert [m for m in engine.core.idle(due + 11.0) if isinstance(m, PoolFrame)] == []
    engine.core.idle(due + 5.0)
    assert engine.core.next_due() is None
    engine.send(WatchPool(0.0))
    engine.messages.clear()
    engine.generate(2, prompt(10), params=sampling_params(20))
    assert [message for message in engine.messages if isinstance(message, PoolFrame)] == []


def test_a_frame_is_the_table():
    engine = harness(num_blocks=16, max_model_len=60)
    engine.generate(1, prompt(10), lease=5, tenant="acme", params=sampling_params(1))
    engine.send(Fork(5, 6, 8))
    engine.generate(2, prompt(6, 3), lease=7, tenant="blue", params=sampling_params(1), keep_lease=False)
    engine.send(WatchPool(1.0, with_map=True, with_leases=True))
    frame = engine.core.pool_frame(0.0)
    assert list(frame.states) == [3, 3, 2, 1] + [0] * 12
    owners = [int.from_bytes(frame.owners[i : i + 2], "little") for i in range(0, 32, 2)]
    assert owners == [0, 0, 0, 1] + [65535] * 12
    assert (frame.num_free, frame.num_cached, frame.num_active, frame.num_shared) == (12, 1, 3, 2)
    assert [(row.lease, row.num_blocks, row.num_shared, row.num_tokens, row.active) for row in frame.leases] == [
        (5, 3, 2, 11, False),
        (6, 2, 2, 8, False),
    ]
    assert [(row.tenant, row.num_active, row.num_cached) for row in frame.tenants] == [("acme", 3, 0), ("blue", 0, 1)]


def test_a_tenant_within_its_floor_sees_the_same_pool_whatever_others_do():
    engine = harness(num_blocks=40, max_model_len=64, tenants={"acme": TenantLimits(1.0, 12)})
    for request in (1, 2):
        engine.generate(request, prompt(18, request), lease=request, tenant="acme", params=sampling_params(2))

    def view():
        frame = engine.core.pool_frame(0.0)
        tables = [tuple(engine.core.leases.get(lease).table.block_ids) for lease in (1, 2)]
        return frame.tenants[0], tables

    before = view()
    for request in range(10, 40):
        engine.submit(request, prompt(40, request), tenant="flood", params=sampling_params(20))
    steps = 0
    while engine.core.has_work:
        engine.step()
        steps += 1
        assert view() == before
    assert steps > 50
    assert engine.core.pool.num_evictions > 50


def test_counters_are_told_once_a_second_while_something_happens():
    engine = EngineHarness(engine_config(), runner_options={"cost": CostParameters(0.25, 0.0, 0.0)})
    engine.generate(1, prompt(10), params=sampling_params(10))
    told = [message for message in engine.messages if isinstance(message, EngineStats)]
    assert 2 <= len(told) <= 4
    stats = engine.core.stats()
    assert (stats.steps, stats.model_s, stats.step_s) == (10, pytest.approx(2.5), pytest.approx(2.5))


def test_the_cached_tokens_of_a_tenant_are_told():
    engine = harness()
    for request in (1, 2):
        engine.generate(request, prompt(13), params=sampling_params(2))
    row = engine.core.pool_frame(0.0).tenants[0]
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (26, 12, 4)
    assert [message.num_cached_tokens for message in engine.messages if isinstance(message, Started)] == [0, 12]


def test_ping_is_answered_and_shutdown_is_noted():
    engine = harness()
    assert Pong(7) in engine.send(Ping(7))
    engine.send(Shutdown())
    assert engine.core.is_shutting_down


def test_a_broken_table_is_found_when_idle_and_no_kv_is_trusted_after_that(caplog):
    engine = harness()
    first = engine.generate(1, prompt(10), lease=5)
    block_id = engine.core.leases.get(5).table.block_ids[0]
    engine.core.pool.blocks[block_id].ref_count += 1
    with caplog.at_level(logging.CRITICAL, "chatd.engine.core"):
        said = [message for _ in range(5) for message in engine.core.idle(1.0)]
    assert LeaseTier(5, Tier.TOKENS, "policy", 0) in said
    assert engine.core.stats().integrity_errors == 1
    engine.core.check_invariants()
    assert engine.generate(2, [4], lease=5, base_len=18) == answer(engine, [*prompt(10), *first, 4], 8)
    assert engine.done[2].num_cached_tokens == 0


def test_no_block_is_held_ahead_of_need():
    engine = harness(num_blocks=64)
    for request in range(1, 6):
        engine.submit(request, prompt(7 + request, request), params=sampling_params(20))
    while engine.core.has_work:
        engine.step()
        for lease in engine.core.leases:
            slots = 4 * len(lease.table.block_ids)
            assert 0 <= slots - lease.table.num_computed_tokens < 4


@pytest.mark.default_hash
def test_hits_are_the_same_when_every_key_is_the_same():
    def cached(**options):
        engine = EngineHarness(engine_config(), core_options=options)
        for request in range(8):
            engine.generate(request, prompt(20 + request, request % 2), params=sampling_params(2))
        return [engine.done[request].num_cached_tokens for request in range(8)]

    assert cached() == cached(hash_function=lambda data: b"", max_entries_per_key=64)
    assert sum(cached()) > 0
    assert PrefixIndex().max_entries_per_key == 8
