"""Requests that were running when an engine died: each is computed alone until it is past that place."""

import logging

import pytest

from chatd.engine.messages import Cancel, FinishReason
from chatd.engine.pulse import NO_SUSPECT, NOT_KNOWN
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


class Seen(EngineHarness):
    """A harness that keeps who was in each step."""

    def __post_init__(self):
        super().__post_init__()
        self.steps = []
        execute = self.runner.execute

        def see(plan):
            self.steps.append([chunk.request_id for chunk in plan.chunks])
            return execute(plan)

        self.runner.execute = see


def seen(**config):
    return Seen(engine_config(**config))


def prompt(number):
    return [(number * 7 + i) % 90 for i in range(13)]


def go_on(engine, request, num_answered=3, max_tokens=8):
    ids = prompt(request)
    whole = EngineHarness(engine_config()).generate(1, ids, params=sampling_params(max_tokens))
    engine.submit(
        request,
        ids + whole[:num_answered],
        num_answered=num_answered,
        is_suspect=True,
        params=sampling_params(max_tokens),
    )
    return whole[num_answered:]


def test_a_suspect_has_every_second_step_until_it_has_drawn_two_tokens():
    engine = seen()
    engine.submit(1, prompt(1))
    engine.step(2)
    expected = go_on(engine, 2)
    engine.run()
    assert engine.steps[:8] == [[1], [1], [2], [1], [2], [1, 2], [1, 2], [1, 2]]
    assert engine.outputs[2] == expected


def test_whoever_watches_is_told_which_suspect_is_in_a_step_and_when_none_is():
    engine = seen()
    told = []
    engine.core.scheduler.on_planned = lambda _seconds, alone: told.append(alone)
    engine.submit(1, prompt(1))
    engine.step(2)
    go_on(engine, 2)
    engine.run()
    assert engine.steps[:6] == [[1], [1], [2], [1], [2], [1, 2]]
    assert told[:6] == [NO_SUSPECT, NO_SUSPECT, 2, NO_SUSPECT, 2, NO_SUSPECT]
    assert NOT_KNOWN not in told


def test_a_suspects_prompt_is_computed_in_steps_of_its_own():
    engine = seen(max_num_batched_tokens=8)
    engine.submit(1, prompt(1), params=sampling_params(20))
    engine.step(2)
    del engine.steps[:]
    go_on(engine, 2)
    engine.run()
    # 16 tokens in two steps, and one for the second token.
    assert engine.steps[:6] == [[2], [1], [2], [1], [2], [1, 2]]


def test_suspects_come_one_after_another():
    engine = seen()
    answers = {request: go_on(engine, request) for request in (1, 2, 3)}
    engine.run()
    # One that is past its place goes on in the others' steps.
    assert engine.steps[:8] == [[1], [1], [1], [2], [1], [2], [1, 2], [3]]
    assert engine.outputs == answers


def test_a_suspect_that_loses_its_blocks_comes_back_alone():
    engine = seen(num_blocks=9)
    expected = go_on(engine, 2, max_tokens=12)
    engine.step()
    request = engine.core.scheduler.requests[2]
    engine.submit(1, prompt(1), params=sampling_params(16))
    engine.run()
    assert engine.outputs[2] == expected
    assert not request.is_suspect
    alone = [step for step in engine.steps if 2 in step][:2]
    assert alone == [[2], [2]]


def test_one_that_only_waits_for_a_slot_holds_up_nobody():
    engine = seen(max_num_seqs=1)
    engine.submit(1, prompt(1))
    engine.step(2)
    expected = go_on(engine, 2)
    engine.run()
    assert engine.outputs[2] == expected
    assert [step[0] for step in engine.steps[:8]] == [1] * 8


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_suspect_that_is_cancelled_is_forgotten(num_steps):
    engine = seen()
    go_on(engine, 2)
    engine.step(num_steps)
    engine.send(Cancel(2))
    assert engine.done[2].reason is FinishReason.CANCELLED
    assert engine.generate(1, prompt(1)) == EngineHarness(engine_config()).generate(1, prompt(1))


def test_a_suspect_whose_step_fails_ends_alone(caplog):
    caplog.set_level(logging.CRITICAL)
    engine = seen()
    engine.submit(1, prompt(1))
    engine.step(2)
    go_on(engine, 2)
    engine.runner.failing.add(2)
    engine.run()
    assert engine.done[2].reason is FinishReason.FAILED
    assert engine.done[1].reason is FinishReason.MAX_OUTPUT_TOKENS
