"""Requests that only have their prompt computed: all of it, nothing drawn, and the lease keeps it."""

import pytest

from chatd.engine.messages import Cancel, FinishReason, Preempted, RequestClass, Started, Trim
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


def prompt(length, start=0):
    return [(start + i) % 97 for i in range(length)]


def harness(**config):
    return EngineHarness(engine_config(**config))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 31, 32, 33, 64, 65])
def test_the_whole_prompt_is_computed_and_nothing_is_drawn(length):
    engine = harness()
    assert engine.generate(1, prompt(length), compute_only=True) == []
    done = engine.done[1]
    assert (done.reason, done.num_prompt_tokens, done.num_output_tokens) == (FinishReason.COMPUTED, length, 0)
    assert engine.runner.num_rows == length
    assert engine.core.leases.get(1).table.num_computed_tokens == length
    assert done.num_blocks == -(-length // 4)
    assert done.timings.num_prefill_tokens == length
    assert done.timings.decode_s == 0.0


@pytest.mark.parametrize("length", [5, 8, 33])
def test_the_turn_after_it_computes_its_new_tokens_only_and_gives_the_same_answer(length):
    plain, engine = harness(), harness()
    expected = plain.generate(1, prompt(length + 3))
    engine.generate(1, prompt(length), compute_only=True)
    engine.submit(2, prompt(length + 3)[length:], lease=1, base_len=length)
    engine.step()
    assert engine.runner.num_rows == length + 3
    engine.run()
    assert engine.outputs[2] == expected


@pytest.mark.parametrize("length", [5, 8])
def test_a_turn_without_new_tokens_after_it_computes_one_again(length):
    engine = harness()
    expected = harness().generate(1, prompt(length))
    engine.generate(1, prompt(length), compute_only=True)
    assert engine.generate(2, [], lease=1, base_len=length) == expected
    assert engine.runner.num_rows == length + 1 + len(expected) - 1


def test_what_its_lease_has_computed_ends_without_a_step_and_without_a_slot():
    engine = harness(max_num_seqs=1)
    engine.generate(1, prompt(9), compute_only=True)
    engine.submit(2, prompt(3, 50), params=sampling_params(30))
    engine.step()
    rows = engine.runner.num_rows
    engine.submit(3, [], lease=1, base_len=9, compute_only=True)
    engine.step()
    assert engine.done[3].reason is FinishReason.COMPUTED
    assert engine.runner.num_rows == rows + 1
    assert Started(3, 9, 9, 0.0) in engine.messages


def test_what_another_lease_has_computed_is_found_whole():
    engine = harness()
    engine.generate(1, prompt(8), compute_only=True)
    engine.generate(2, prompt(8), compute_only=True)
    assert engine.runner.num_rows == 8
    assert engine.done[2].num_cached_tokens == 8
    assert engine.core.leases.get(2).table.block_ids == engine.core.leases.get(1).table.block_ids
    # A request that draws still computes a token, into a block of its own.
    engine.generate(3, prompt(8), params=sampling_params(1))
    assert engine.done[3].num_cached_tokens == 4


def test_it_is_charged_as_a_prompt():
    engine = harness()
    engine.generate(1, prompt(20), compute_only=True)
    assert engine.core.scheduler.counters.counter("acme") == 20.0
    engine.generate(2, prompt(20), compute_only=True)
    assert engine.core.scheduler.counters.counter("acme") == 20.0 + 0.1 * 20
    counts = engine.core.scheduler.ledger.counts["acme"]
    assert (counts.prompt_tokens, counts.cached_tokens, counts.output_tokens) == (40, 20, 0)


def test_work_ahead_goes_after_everybody():
    engine = harness(max_num_batched_tokens=8)
    engine.submit(1, prompt(24), compute_only=True, request_class=RequestClass.PREFILL_AHEAD)
    engine.submit(2, prompt(16, 30), params=sampling_params(1))
    engine.step(2)
    assert engine.done[2].reason is FinishReason.MAX_OUTPUT_TOKENS
    assert 1 not in engine.done
    engine.run()
    assert engine.done[1].reason is FinishReason.COMPUTED


def test_cancel_keeps_what_is_computed():
    engine = harness(max_num_batched_tokens=8)
    engine.submit(1, prompt(24), compute_only=True)
    engine.step()
    engine.send(Cancel(1))
    assert engine.done[1].reason is FinishReason.CANCELLED
    assert engine.core.leases.get(1).table.num_computed_tokens == 8


def test_trim_takes_effect_at_its_end():
    engine = harness()
    engine.submit(1, prompt(24), compute_only=True)
    engine.send(Trim(1, 10))
    engine.run()
    assert engine.done[1].reason is FinishReason.COMPUTED
    assert engine.length(1) == engine.core.leases.get(1).table.num_computed_tokens == 10


def test_it_goes_on_after_it_was_preempted():
    engine = harness(num_blocks=14, max_model_len=56, max_num_batched_tokens=2, max_num_seqs=2)
    engine.submit(1, prompt(8), params=sampling_params(40))
    engine.step()
    engine.submit(2, prompt(32, 40), compute_only=True)
    engine.run()
    assert engine.done[2].reason is FinishReason.COMPUTED
    assert engine.done[1].num_output_tokens == 40
    assert any(isinstance(message, Preempted) for message in engine.messages)


def test_logits_are_not_looked_at():
    engine = harness()
    engine.runner.not_finite.add(1)
    engine.generate(1, prompt(9), compute_only=True)
    assert engine.done[1].reason is FinishReason.COMPUTED
