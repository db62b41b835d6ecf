"""Parallel samples: one prompt computed once, shared by reference, one copy at most for each sample."""

import pytest

from chatd.engine.core import TenantLimits
from chatd.engine.joins import Joins
from chatd.engine.messages import Cancel, FinishReason, Fork, LeaseId, Preempted, Started, Waiting, WaitReason
from chatd.engine.plan import RequestId
from chatd.engine.samples import Samples
from chatd.testing.engine import EngineHarness, chains_of, engine_config, sampling_params

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def follow(engine, count, prompt=PROMPT, first=1, max_tokens=6):
    """Submit `count` samples of one prompt."""
    engine.submit(first, prompt, params=sampling_params(max_tokens))
    for number in range(first + 1, first + count):
        engine.submit(number, prompt, params=sampling_params(max_tokens), sample_of=RequestId(first))


def tables(engine):
    return [list(lease.table.block_ids) for lease in engine.core.leases]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 12, 31, 32, 33, 50])
def test_samples_of_a_prompt_compute_it_once_and_a_row_each(length):
    prompt = [1 + i % 7 for i in range(length)]
    engine = EngineHarness()
    follow(engine, 5, prompt, max_tokens=1)
    engine.run()
    assert engine.runner.num_rows == length + 4
    assert len({tuple(engine.outputs[number]) for number in range(1, 6)}) == 1
    started = {m.request: m for m in engine.messages if isinstance(m, Started)}
    assert [started[number].num_cached_tokens for number in range(2, 6)] == [length - 1] * 4
    assert {engine.done[number].reason for number in range(1, 6)} == {FinishReason.MAX_OUTPUT_TOKENS}


@pytest.mark.parametrize("length", range(5, 14))
def test_each_sample_copies_one_block_at_most(length):
    engine = EngineHarness()
    copies = []
    execute = engine.runner.execute

    def counting(plan):
        copies.extend(plan.copies)
        return execute(plan)

    engine.runner.execute = counting
    follow(engine, 4, [1 + i % 7 for i in range(length)], max_tokens=9)
    engine.run()
    assert len(copies) <= 4
    assert len({copy.target for copy in copies}) == len(copies)


def test_full_blocks_of_the_prompt_are_the_same_blocks():
    engine = EngineHarness()
    follow(engine, 3)
    engine.step(2)
    first, *others = tables(engine)
    assert [table[:2] for table in others] == [first[:2]] * 2
    assert len({table[2] for table in [first, *others]}) == 3


def test_a_waiting_sample_says_why_and_stands_in_nobodys_way():
    engine = EngineHarness(engine_config(max_num_batched_tokens=4, max_num_seqs=4))
    follow(engine, 3)
    engine.submit(9, [7, 7], params=sampling_params(1))
    engine.step(2)
    assert {m.request: m.why for m in engine.messages if isinstance(m, Waiting)}[2] is WaitReason.JOIN
    assert 9 in engine.done
    engine.run()
    assert len(engine.outputs[3]) == 6


def test_a_sample_that_comes_late_shares_at_once():
    engine = EngineHarness()
    engine.submit(1, PROMPT, params=sampling_params(20))
    engine.step(5)
    rows = engine.runner.num_rows
    engine.submit(2, PROMPT, params=sampling_params(1), sample_of=RequestId(1))
    engine.step()
    assert engine.runner.num_rows == rows + 2
    assert engine.outputs[2] == engine.outputs[1][:1]


def test_a_sample_of_a_sample_waits_for_the_same_prompt():
    engine = EngineHarness()
    engine.submit(1, PROMPT)
    engine.submit(2, PROMPT, sample_of=RequestId(1))
    engine.submit(3, PROMPT, sample_of=RequestId(2))
    engine.run()
    assert engine.outputs[1] == engine.outputs[2] == engine.outputs[3]
    assert engine.runner.num_rows == len(PROMPT) + 2 + 3 * 7


@pytest.mark.parametrize(
    "other",
    [[3, 1, 4, 1, 5, 9, 2, 6, 6], [3, 1, 7, 1, 5, 9, 2, 6, 5], PROMPT[:-1], [*PROMPT, 1]],
    ids=["other end", "other middle", "shorter", "longer"],
)
def test_a_sample_of_another_prompt_is_any_request(other):
    engine, alone = EngineHarness(), EngineHarness()
    engine.submit(1, PROMPT)
    engine.submit(2, other, sample_of=RequestId(1))
    engine.run()
    assert engine.outputs[2] == alone.generate(2, other)


def test_a_sample_of_another_tenants_prompt_shares_nothing():
    engine = EngineHarness()
    engine.submit(1, PROMPT)
    engine.submit(2, PROMPT, tenant="blue", sample_of=RequestId(1))
    engine.run()
    assert engine.done[2].num_cached_tokens == 0
    mine, theirs = tables(engine)
    assert not set(mine) & set(theirs)


def test_a_sample_of_nobody_is_any_request():
    engine = EngineHarness()
    engine.submit(2, PROMPT, sample_of=RequestId(77))
    engine.run()
    assert len(engine.outputs[2]) == 8


@pytest.mark.parametrize("when", [0, 1, 2])
def test_samples_outlive_the_first_one_in_any_state(when):
    engine = EngineHarness(engine_config(max_num_batched_tokens=4, max_num_seqs=4))
    follow(engine, 3, max_tokens=5)
    engine.step(when)
    engine.send(Cancel(RequestId(1)))
    engine.run()
    assert engine.outputs[2] == engine.outputs[3]
    assert len(engine.outputs[2]) == 5


def test_samples_outlive_a_first_one_whose_logits_are_not_finite():
    engine = EngineHarness()
    engine.runner.not_finite.add(RequestId(1))
    follow(engine, 3, max_tokens=5)
    engine.run()
    assert engine.done[1].reason is FinishReason.FAILED
    assert len(engine.outputs[2]) == len(engine.outputs[3]) == 5


def test_samples_outlive_a_first_one_that_the_model_cannot_compute():
    engine = EngineHarness()
    engine.runner.failing.add(RequestId(1))
    follow(engine, 3, max_tokens=5)
    engine.run()
    assert engine.done[1].reason is FinishReason.FAILED
    assert len(engine.outputs[2]) == len(engine.outputs[3]) == 5


@pytest.mark.parametrize("when", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_sample_can_be_cancelled_in_any_state(when, victim):
    engine = EngineHarness(engine_config(max_num_batched_tokens=4, max_num_seqs=4))
    follow(engine, 3, max_tokens=5)
    engine.step(when)
    engine.send(Cancel(RequestId(victim)))
    engine.core.check_invariants()
    engine.run()
    assert engine.done[victim].reason is FinishReason.CANCELLED
    rest = {1, 2, 3} - {victim}
    assert all(len(engine.outputs[number]) == 5 for number in rest)


def test_samples_in_too_small_a_pool_are_preempted_and_all_end():
    engine = EngineHarness(engine_config(num_blocks=9, max_num_batched_tokens=6, max_num_seqs=5))
    follow(engine, 5, max_tokens=18)
    engine.run()
    assert engine.core.scheduler.num_preemptions > 0
    roomy = EngineHarness()
    follow(roomy, 5, max_tokens=18)
    roomy.run()
    assert engine.outputs == roomy.outputs


def test_samples_of_a_prompt_that_goes_on_from_a_shared_lease_need_no_ids_again():
    engine = EngineHarness()
    engine.generate(1, PROMPT, params=sampling_params(3))
    history = [*PROMPT, *engine.outputs[1]]
    engine.send(Fork(LeaseId(1), LeaseId(2), len(history)))
    rows = engine.runner.num_rows
    engine.submit(3, [8, 8], lease=1, base_len=len(history), params=sampling_params(1))
    engine.submit(4, [8, 8], lease=2, base_len=len(history), params=sampling_params(1), sample_of=RequestId(3))
    engine.run()
    assert engine.runner.num_rows == rows + 1 + 2 + 1  # the last id of the answer, the two new ones, one row more
    assert engine.outputs[4] == engine.outputs[3]


def test_the_test_would_see_a_prompt_computed_twice(monkeypatch):
    monkeypatch.setattr(Samples, "follow", lambda *_: None)
    monkeypatch.setattr(Joins, "join", lambda *_: False)
    engine = EngineHarness()
    follow(engine, 3, max_tokens=1)
    engine.run()
    assert engine.runner.num_rows > len(PROMPT) + 2


def test_leases_of_samples_hold_the_ids_that_were_computed():
    engine = EngineHarness()
    follow(engine, 3, max_tokens=7)
    engine.run()
    for number in (1, 2, 3):
        lease = engine.core.leases.get(number)
        assert list(lease.token_ids) == [*PROMPT, *engine.outputs[number]]
        computed = lease.table.num_computed_tokens
        slots = [engine.runner.chains[lease.table.block_ids[i // 4] * 4 + i % 4] for i in range(computed)]
        assert slots == chains_of(lease.token_ids)[:computed]


def test_samples_go_on_by_themselves_where_the_first_one_loses_its_blocks_before_its_end():
    config = engine_config(
        num_blocks=12,
        max_model_len=40,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        tenants={"acme": TenantLimits(), "blue": TenantLimits(3.0)},
    )
    engine = EngineHarness(config)
    prompt = [1 + i % 7 for i in range(30)]
    follow(engine, 2, prompt, max_tokens=3)
    engine.step(2)
    for number in range(10, 16):
        engine.submit(number, [number] * 6, tenant="blue", params=sampling_params(8))
    engine.step(3)
    lost = [m for m in engine.messages if isinstance(m, Preempted) and m.request == 1]
    assert lost, "the first one kept its blocks"
    engine.submit(3, prompt, params=sampling_params(3), sample_of=RequestId(1))
    for number in (2, 3):
        assert not engine.core.scheduler.samples.is_waiting(engine.core.scheduler.requests[number])
    engine.run()
    assert engine.outputs[1] == engine.outputs[2]
    assert len(engine.outputs[1]) == len(engine.outputs[3]) == 3
