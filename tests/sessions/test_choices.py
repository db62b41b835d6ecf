"""Choices of one stateless request: turns that begin together, and what happens when something goes wrong."""

import asyncio

import pytest

from chatd.engine.messages import Cancel, FinishReason
from chatd.engine.sampling import BeamSearch
from chatd.errors import EngineError, InvalidRequest, Unavailable
from chatd.protocol import Message, Params
from chatd.sessions.choices import params_of_choice, params_of_search
from chatd.sessions.manager import CompletionRequest, Owner
from chatd.testing.sessions import TURN_END, ScriptedEngine, encode_text, make_manager

ANN = Owner("acme", "ann")


def ending(text):
    return lambda _log: [*encode_text(text), TURN_END]


def request_of(*texts, num_choices=3, beam=None, **params):
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)]
    return CompletionRequest(messages=messages, params=Params(**params), num_choices=num_choices, beam=beam)


async def answered(engine, manager, request):
    choices = await manager.choose(ANN, request)
    engine.run()
    return choices, ["".join([delta.text async for delta in one]) for one in choices.completions]


async def test_choices_whose_lease_was_lost_are_sent_whole_and_share_again():
    engine = ScriptedEngine(ending("ok"))
    manager = make_manager(engine)
    await answered(engine, manager, request_of("hi", num_choices=1))
    engine.lose(engine.submits[0].lease)
    _, texts = await answered(engine, manager, request_of("hi", "ok", "more"))
    assert texts == ["ok"] * 3
    *_, first, second, third = engine.submits
    assert [submit.base_len for submit in (first, second, third)] == [0, 0, 0]
    assert first.new_ids == second.new_ids == third.new_ids
    assert (second.sample_of, third.sample_of) == (first.request, first.request)


async def test_all_choices_go_on_in_the_next_engine():
    engine = ScriptedEngine(ending("ok"))
    manager = make_manager(engine)
    choices = await manager.choose(ANN, request_of("hi"))
    engine.step()
    engine.die()
    engine.restart()
    assert [submit.num_answered for submit in engine.submits[3:]] == [1, 1, 1]
    assert [submit.sample_of for submit in engine.submits[3:]] == [None] * 3
    engine.run()
    assert [await completion.text() for completion in choices.completions] == ["ok"] * 3
    assert manager.num_in_flight == 0
    _, texts = await answered(engine, manager, request_of("hi"))
    assert texts == ["ok"] * 3


async def test_all_choices_end_when_a_second_engine_dies_of_them():
    engine = ScriptedEngine(ending("ok"))
    manager = make_manager(engine)
    choices = await manager.choose(ANN, request_of("hi"))
    engine.step()
    for _ in range(2):
        engine.die()
        engine.restart()
        engine.flush()
    assert [type(one.error) for one in choices.completions] == [EngineError] * 3
    assert [event.index async for event in choices] == []
    assert manager.num_in_flight == 0


async def test_an_engine_that_takes_only_some_gets_none():
    engine = ScriptedEngine(ending("ok"))
    manager = make_manager(engine)
    send, num_sent = engine.send, 0

    def send_two(message):
        nonlocal num_sent
        num_sent += type(message).__name__ == "Submit"
        if num_sent > 2:
            num_sent = 0
            raise Unavailable("no more")
        send(message)

    engine.send = send_two
    with pytest.raises(Unavailable):
        await manager.choose(ANN, request_of("hi", num_choices=5))
    assert sum(isinstance(message, Cancel) for message in engine.sent) == 2
    engine.run()
    assert manager.num_in_flight == 0
    assert len(manager._door) <= 2


async def test_a_seed_that_is_out_of_range_begins_nothing():
    engine = ScriptedEngine(ending("ok"))
    manager = make_manager(engine)
    with pytest.raises(InvalidRequest):
        await manager.choose(ANN, request_of("hi", seed=-1))
    assert engine.submits == []
    assert manager.num_in_flight == 0
    assert len(manager._door) == 0


async def test_equal_choices_leave_one_conversation():
    engine = ScriptedEngine(ending("same"))
    manager = make_manager(engine)
    await answered(engine, manager, request_of("hi", num_choices=4))
    assert len(manager._door) == 1
    await answered(engine, manager, request_of("hi", "same", "more", num_choices=1))
    assert engine.submits[-1].base_len > 0


async def test_events_come_in_turn_and_end_once_for_each_choice():
    engine = ScriptedEngine(ending("abc"))
    manager = make_manager(engine)
    choices = await manager.choose(ANN, request_of("hi"))
    seen = []

    async def read():
        async for event in choices:
            seen.append((event.index, None if event.delta is None else event.delta.text))

    reading = asyncio.create_task(read())
    for _ in range(5):
        engine.step()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await reading
    assert seen[:3] == [(0, "a"), (1, "a"), (2, "a")]
    assert seen[-3:] == [(0, None), (1, None), (2, None)]
    assert choices.usage.output_tokens == 12


async def test_a_search_that_fails_or_is_cancelled_ends_all_that_it_would_have_found():
    engine = ScriptedEngine(ending("x"))
    engine._search = lambda message, log: None
    manager = make_manager(engine)
    for reason in (FinishReason.FAILED, FinishReason.CANCELLED):
        choices = await manager.choose(ANN, request_of("hi", beam=BeamSearch(width=3, num_returned=3)))
        turn = manager._requests.turns()[0]
        if reason is FinishReason.FAILED:
            manager._runner._ends.fail(turn, EngineError("broken"))
        else:
            choices.cancel()
            manager._runner._ends.finish(turn, reason, None)
        reasons = {one.finish_reason for one in choices.completions}
        assert reasons == {str(reason)}
        assert manager.num_in_flight == 0


def test_each_choice_has_the_next_seed():
    seeds = [params_of_choice(Params(seed=2**63 - 1), index).seed for index in range(3)]
    assert seeds == [2**63 - 1, 0, 1]
    assert params_of_choice(Params(), 2).seed is None


def test_a_search_takes_what_is_named_over_what_is_neutral():
    assert params_of_search(Params(max_tokens=3)).temperature == 0.0
    assert params_of_search(Params(temperature=0.7)).temperature == 0.7
