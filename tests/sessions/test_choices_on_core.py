"""Choices over the real engine core: a prompt is computed once, and the ids of every choice are those computed."""

import pytest

from chatd.engine.sampling import BeamSearch
from chatd.protocol import Message, Params
from chatd.sessions.manager import CompletionRequest, Owner
from chatd.testing.sessions import CoreEngine, make_manager

ANN = Owner("acme", "ann")


def request_of(*texts, num_choices=1, beam=None, **params):
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)]
    return CompletionRequest(messages=messages, params=Params(**params), num_choices=num_choices, beam=beam)


async def run(engine, manager, request):
    choices = await manager.choose(ANN, request)
    engine.run()
    texts = ["".join([delta.text async for delta in completion]) for completion in choices.completions]
    return choices, texts


@pytest.mark.parametrize("length", [1, 20, 27, 28, 29, 200])
async def test_a_prompt_is_computed_once_for_all_choices(length):
    engine = CoreEngine()
    manager = make_manager(engine)
    choices, texts = await run(engine, manager, request_of("x" * length, num_choices=4, max_tokens=1))
    assert engine.runner.num_rows == choices.usage.input_tokens + 3
    assert choices.usage.output_tokens == 4
    assert len(set(texts)) == 1


@pytest.mark.parametrize("choice", range(3))
async def test_a_conversation_goes_on_from_any_choice(choice):
    engine = CoreEngine()
    manager = make_manager(engine)
    engine.runner.next_token = lambda chain: 97 + engine.runner.plans % 20
    first, texts = await run(engine, manager, request_of("hello there", num_choices=3, max_tokens=9 + choice))
    rows = engine.runner.num_rows
    later, _ = await run(engine, manager, request_of("hello there", texts[choice], "and?", max_tokens=1))
    new = later.usage.input_tokens - first.usage.input_tokens - (9 + choice)
    assert engine.runner.num_rows - rows <= new + 1
    assert manager.stats.known_hits == 1


async def test_a_search_on_the_core_can_be_gone_on_from():
    engine = CoreEngine()
    manager = make_manager(engine)
    beam = BeamSearch(width=4, num_returned=3)
    found, texts = await run(engine, manager, request_of("hello there", num_choices=3, beam=beam, max_tokens=12))
    assert [completion.finish_reason for completion in found.completions].count(None) == 0
    assert len(set(texts)) == 3
    for text in texts:
        later, _ = await run(engine, manager, request_of("hello there", text, "and?", max_tokens=2))
        assert later.usage.cached_tokens >= found.usage.input_tokens - 1
    assert manager.stats.known_hits == 3
