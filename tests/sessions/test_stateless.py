"""The stateless door: histories that come back as text find their session's ids and lease."""

import asyncio

import pytest

from chatd import protocol
from chatd.engine.messages import FinishReason, Fork, Release, RequestClass
from chatd.errors import ContextLengthExceeded, InvalidRequest, RateLimited, Unavailable
from chatd.protocol import Message, Params, SessionList
from chatd.sessions.manager import Completion, CompletionRequest, Owner, SessionLimits, SessionManager
from chatd.testing_sessions import ASSISTANT, TURN_END, USER, ScriptedEngine, encode_text, make_manager

ANN = Owner("acme", "ann")
BOB = Owner("acme", "bob")


def chat(*texts: str, system: str | None = None) -> list[Message]:
    roles = ("user", "assistant")
    said = [Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)]
    return said if system is None else [Message(role="system", content=system), *said]


async def ask(manager: SessionManager, messages: list[Message], owner: Owner = ANN, **fields) -> Completion:
    return await manager.complete(owner, CompletionRequest(messages=messages, **fields))


async def answer(engine: ScriptedEngine, manager: SessionManager, messages: list[Message], **fields) -> Completion:
    completion = await ask(manager, messages, **fields)
    engine.run()
    completion.said = await completion.text()
    return completion


def echo(log: list[int]) -> list[int]:
    """Answer with the last message in capitals."""
    start = len(log) - 1 - log[::-1].index(USER)
    return [*bytes(log[start + 1 : -2]).upper(), TURN_END]


async def test_an_answer_comes_as_deltas_and_ends_with_its_numbers() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    completion = await ask(manager, chat("hello", system="s"))
    assert completion.finish_reason is None
    engine.step(num_tokens=2)
    assert (await anext(completion)).text == "HE"
    engine.run()
    rest = [delta async for delta in completion]
    assert [(delta.text, delta.num_tokens) for delta in rest] == [("LLO", 3)]
    assert (completion.finish_reason, completion.error) == ("stop", None)
    assert completion.usage == protocol.Usage.of(len(engine.submits[0].new_ids), 0, 6)
    assert completion.timings.queue_ms == 1.0
    assert manager.list(ANN, SessionList()).sessions == []


async def test_a_history_that_comes_back_as_text_goes_on_from_its_own_ids() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("hello", system="s"))
    await answer(engine, manager, chat("hello", "HELLO", "more", system="s"))
    await answer(engine, manager, chat("hello", "HELLO", "more", "MORE", "end", system="s"))
    first, second, third = engine.submits
    assert second.lease == first.lease == third.lease
    assert second.base_len == len(first.new_ids) + len("HELLO") + 1
    assert second.new_ids == [USER, *encode_text("more"), TURN_END, ASSISTANT]
    assert third.base_len == second.base_len + len(second.new_ids) + len("MORE") + 1
    assert (manager.stats.known_hits, manager.stats.known_misses) == (2, 0)


async def test_an_answer_cut_short_is_known_by_the_text_that_was_delivered() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    completion = await answer(engine, manager, chat("hello"), params=Params(stop=("LL",)))
    assert (completion.said, completion.finish_reason) == ("HE", "stop_string")
    await answer(engine, manager, chat("hello", "HE", "more"))
    second = engine.submits[1]
    assert second.base_len == len(engine.submits[0].new_ids) + len("HELL")
    assert second.new_ids == [TURN_END, USER, *encode_text("more"), TURN_END, ASSISTANT]


async def test_another_text_is_another_history() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("hello"))
    await answer(engine, manager, chat("hello", "HELLO ", "more"))
    await answer(engine, manager, chat("hello", "HELLO", "more", system="other"))
    assert [submit.base_len for submit in engine.submits] == [0, 0, 0]
    assert len({submit.lease for submit in engine.submits}) == 3
    assert manager.stats.known_misses == 2


async def test_the_longest_known_chain_counts() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("a"))
    await answer(engine, manager, chat("a", "A", "b"))
    await answer(engine, manager, chat("a", "A", "b", "edited", "c"))
    fork = next(message for message in engine.sent if isinstance(message, Fork))
    first, _, third = engine.submits
    assert fork == Fork(first.lease, third.lease, len(first.new_ids) + 2)
    assert third.base_len == fork.at
    assert third.new_ids[:3] == [USER, *encode_text("b"), TURN_END]


async def test_two_requests_over_one_history_do_not_fight_over_its_lease() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("a"))
    history = chat("a", "A")
    one, two = await asyncio.gather(ask(manager, [*history, *chat("one")]), ask(manager, [*history, *chat("two")]))
    engine.run()
    assert (await one.text(), await two.text()) == ("ONE", "TWO")
    first, *others = engine.submits
    fork = next(message for message in engine.sent if isinstance(message, Fork))
    assert {submit.lease for submit in others} == {first.lease, fork.new_lease}
    assert (fork.lease, fork.at) == (first.lease, len(first.new_ids) + 2)
    assert [submit.base_len for submit in others] == [fork.at, fork.at]
    # Each goes on from its own lease.
    await answer(engine, manager, [*history, *chat("two", "TWO", "three")])
    await answer(engine, manager, [*history, *chat("one", "ONE", "three")])
    leases = [submit.lease for submit in engine.submits[-2:]]
    assert leases[0] != leases[1]
    assert all(submit.base_len == fork.at + 10 for submit in engine.submits[-2:])


async def test_asking_the_same_again_shares_what_is_before() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("a"))
    again = chat("a", "A", "b")
    await answer(engine, manager, again)
    await answer(engine, manager, again)
    fork = next(message for message in engine.sent if isinstance(message, Fork))
    assert engine.submits[2].base_len == fork.at == len(engine.submits[0].new_ids) + 2


async def test_a_session_that_nothing_finds_any_more_is_released() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("a"))
    await answer(engine, manager, chat("a"))
    assert Release(engine.submits[0].lease) in engine.sent
    assert list(engine.leases) == [engine.submits[1].lease]


async def test_a_fork_of_a_lost_lease_is_sent_whole() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("a"))
    await answer(engine, manager, chat("a", "A", "b"))
    engine.lose(engine.submits[0].lease)
    await answer(engine, manager, chat("a", "A", "c"))
    lost, again = engine.submits[-2:]
    assert (lost.base_len > 0, again.base_len) == (True, 0)
    assert again.new_ids[: len(engine.submits[0].new_ids)] == engine.submits[0].new_ids


async def test_after_the_engines_death_a_known_history_is_sent_whole() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("a"))
    dying = await ask(manager, chat("a", "A", "b"))
    engine.step()
    engine.die()
    assert await dying.text() == "B"
    assert (dying.finish_reason, dying.error.error_code, dying.usage) == ("failed", "engine_error", None)
    with pytest.raises(Unavailable):
        await ask(manager, chat("a"))
    engine.restart()
    completion = await answer(engine, manager, chat("a", "A", "b"))
    assert completion.said == "B"
    assert engine.submits[-1].base_len == 0
    assert engine.submits[-1].new_ids[: len(engine.submits[0].new_ids)] == engine.submits[0].new_ids


async def test_a_failed_first_turn_leaves_nothing() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    completion = await ask(manager, chat("a"))
    engine.flush()
    engine.end(engine.submits[0].request, FinishReason.FAILED, "engine_error", "no")
    assert [delta async for delta in completion] == []
    assert completion.error.message == "no"
    assert len(manager._door) == 0
    assert len(manager.lease_sessions) == 0
    assert Release(engine.submits[0].lease) in engine.sent


async def test_cancel_ends_the_generation_and_keeps_what_was_delivered() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    completion = await ask(manager, chat("hello"))
    engine.step(num_tokens=2)
    completion.cancel()
    engine.run()
    await completion.aclose()
    assert await completion.text() == "HE"
    assert (completion.finish_reason, completion.usage.output_tokens) == ("cancelled", 2)
    await answer(engine, manager, chat("hello", "HE", "on"))
    assert engine.submits[-1].base_len == completion.usage.input_tokens + 2


async def test_a_caller_that_is_cancelled_while_the_prompt_is_encoded_leaves_nothing() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    task = asyncio.create_task(ask(manager, chat("hello")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert manager.num_in_flight == 0
    assert len(manager.lease_sessions) == 0
    assert engine.sent == []


async def test_users_do_not_share_histories() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("secret"))
    await answer(engine, manager, chat("secret", "SECRET", "more"), owner=BOB)
    assert engine.submits[1].base_len == 0
    assert engine.submits[1].lease != engine.submits[0].lease


async def test_sessions_left_behind_are_bounded() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine, limits=SessionLimits(max_stateless_sessions=2))
    for text in ("a", "b", "c"):
        await answer(engine, manager, chat(text))
    assert [message for message in engine.sent if isinstance(message, Release)] == [Release(engine.submits[0].lease)]
    await answer(engine, manager, chat("b", "B", "x"))
    await answer(engine, manager, chat("d"))
    assert engine.leases.keys() == {engine.submits[1].lease, engine.submits[-1].lease}
    await answer(engine, manager, chat("a", "A", "x"))
    assert engine.submits[-1].base_len == 0


async def test_known_messages_are_bounded() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine, limits=SessionLimits(max_known_messages=4))
    for text in ("a", "b", "c"):
        await answer(engine, manager, chat(text))
    assert len(manager._door.known) == 4
    await answer(engine, manager, chat("c", "C", "x"))
    assert engine.submits[-1].base_len > 0
    await answer(engine, manager, chat("a", "A", "x"))
    assert engine.submits[-1].base_len == 0


@pytest.mark.parametrize(
    "messages",
    [
        [],
        chat("a", "b"),
        [Message(role="system", content="s")],
        [Message(role="user", content="\ud800")],
        [Message(role="user", content="x" * 101)],
    ],
)
async def test_a_history_that_cannot_be_answered_is_refused(messages: list[Message]) -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine, limits=SessionLimits(max_content_bytes=100))
    with pytest.raises(InvalidRequest):
        await ask(manager, messages)
    assert (manager.num_in_flight, len(manager.lease_sessions), engine.sent) == (0, 0, [])


async def test_what_cannot_fit_and_what_is_too_much_is_refused() -> None:
    engine = ScriptedEngine(echo, context=64)
    manager = make_manager(engine, context=64, limits=SessionLimits(max_turns_per_user=1))
    with pytest.raises(ContextLengthExceeded):
        await ask(manager, chat("x" * 80))
    running = await ask(manager, chat("a"))
    with pytest.raises(RateLimited):
        await ask(manager, chat("b"))
    engine.run()
    assert await running.text() == "A"


async def test_class_and_names_are_passed_on() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await ask(manager, chat("a"), request_class=RequestClass.BATCH, conversation_id="conv 1")
    assert engine.submits[0].request_class is RequestClass.BATCH
    holder = manager.lease_sessions[engine.submits[0].lease]
    assert (holder.owner, holder.title, holder.hidden) == (ANN, "conv 1", True)


async def test_a_long_chat_hits_its_own_cache() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    said: list[str] = []
    history = 0
    for turn in range(20):
        said.append(f"turn {turn}: " + "words " * 10)
        completion = await answer(engine, manager, chat(*said, system="be brief " * 20))
        said.append(completion.said)
        assert completion.usage.cached_tokens == history
        history = completion.usage.input_tokens + completion.usage.output_tokens
