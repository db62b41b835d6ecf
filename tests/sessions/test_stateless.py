"""The stateless door: histories that come back as text find their session's ids and lease."""

import asyncio

import pytest

from chatd import protocol
from chatd.engine.messages import FinishReason, Fork, Release, RequestClass
from chatd.errors import ContextLengthExceeded, InvalidRequest, RateLimited, Unavailable
from chatd.protocol import Message, Params, SessionList
from chatd.sessions.manager import Completion, CompletionRequest, Owner, SessionLimits, SessionManager
from chatd.testing.sessions import ASSISTANT, TURN_END, USER, ScriptedEngine, encode_text, make_manager

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
    assert (await manager.list(ANN, SessionList())).sessions == []


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
    with pytest.raises(Unavailable):
        await ask(manager, chat("a"))
    engine.restart()
    assert (engine.submits[-1].base_len, engine.submits[-1].num_answered) == (0, 1)
    engine.run()
    assert await dying.text() == "B"
    assert (dying.finish_reason, dying.error) == ("stop", None)
    engine.die()
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


async def test_a_named_conversation_is_found_when_its_messages_are_known_no_more() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine, limits=SessionLimits(max_known_messages=2))
    await answer(engine, manager, chat("a", system="s"), conversation_id="c1")
    for text in ("b", "c"):
        await answer(engine, manager, chat(text))
    assert manager._door.known.find(ANN, chat("a", "A", "b", system="s")) is None
    await answer(engine, manager, chat("a", "A", "more", system="s"), conversation_id="c1")
    assert engine.submits[-1].lease == engine.submits[0].lease
    assert engine.submits[-1].base_len == len(engine.submits[0].new_ids) + 2


async def test_chats_that_begin_alike_stay_apart_by_their_names() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    for name in ("c1", "c2"):
        await answer(engine, manager, chat("hi"), conversation_id=name)
    for name in ("c1", "c2"):
        await answer(engine, manager, chat("hi", "HI", "more"), conversation_id=name)
    one, two, one_more, two_more = engine.submits
    assert (one_more.lease, two_more.lease) == (one.lease, two.lease)
    assert one_more.base_len == two_more.base_len == len(one.new_ids) + 3


@pytest.mark.parametrize(
    ("messages", "num_shared"),
    [
        (chat("a", "A", "b", "other", "c", system="s"), 1),
        (chat("a", "A", "b", "B", "c", system="t"), 0),
        (chat("x", "A", "b", "B", "c", system="s"), 0),
        (chat("a", system="s"), 0),
    ],
)
async def test_a_name_counts_as_far_as_the_texts_agree(messages: list[Message], num_shared: int) -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine, limits=SessionLimits(max_known_messages=1))
    await answer(engine, manager, chat("a", system="s"), conversation_id="c1")
    await answer(engine, manager, chat("a", "A", "b", system="s"), conversation_id="c1")
    await answer(engine, manager, messages, conversation_id="c1")
    first, second, third = engine.submits
    assert second.lease == first.lease != third.lease
    assert third.base_len == num_shared * (len(first.new_ids) + 2)


async def test_a_name_that_now_means_another_history_still_finds_the_known_one() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("a"), conversation_id="app")
    await answer(engine, manager, chat("b"), conversation_id="app")
    await answer(engine, manager, chat("a", "A", "more"), conversation_id="app")
    assert engine.submits[2].lease == engine.submits[0].lease
    assert len(manager._door.named) == 1


async def test_a_name_is_its_owners_alone() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    await answer(engine, manager, chat("secret"), conversation_id="c1")
    await answer(engine, manager, chat("secret", "SECRET", "more"), owner=BOB, conversation_id="c1")
    assert engine.submits[1].base_len == 0
    assert engine.submits[1].lease != engine.submits[0].lease
    assert len(manager._door.named) == 2


async def test_names_are_no_more_than_sessions_and_go_with_them() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine, limits=SessionLimits(max_stateless_sessions=2))
    said = ["a"]
    for number in range(5):
        completion = await answer(engine, manager, chat(*said), conversation_id=f"c{number}")
        said += [completion.said, "more"]
    assert len(manager._door.named) == 1
    for text in ("x", "y", "z"):
        await answer(engine, manager, chat(text), conversation_id=text)
    assert len(manager._door.named) == len(manager._door) == 2
    failing = await ask(manager, chat("fails"), conversation_id="f")
    engine.end(engine.submits[-1].request, FinishReason.FAILED, "engine_error", "no")
    assert await failing.text() == ""
    assert len(manager._door.named) <= len(manager._door) <= 2
    assert len(manager.lease_sessions) == len(manager._door)


async def test_the_text_that_one_user_leaves_behind_is_bounded() -> None:
    engine = ScriptedEngine(lambda _log: [*encode_text("ok"), TURN_END])
    manager = make_manager(engine, limits=SessionLimits(max_text_bytes_per_user=20_000))
    await answer(engine, manager, chat("theirs"), owner=BOB)
    for text in ("a", "b", "c", "d"):
        await answer(engine, manager, chat(text * 3_500))
    await answer(engine, manager, chat("e"))
    theirs, first, *_ = (submit.lease for submit in engine.submits)
    released = [message.lease for message in engine.sent if isinstance(message, Release)]
    assert first in released
    assert theirs not in released
    assert sum(session.num_bytes for session in manager._door._sessions.values() if session.owner == ANN) <= 20_000


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


async def test_one_users_many_conversations_cost_no_other_user_theirs() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine, limits=SessionLimits(max_stateless_sessions=4))
    await answer(engine, manager, chat("mine"), owner=BOB)
    for number in range(10):
        await answer(engine, manager, chat(f"flood {number}"))
    assert len(manager._door) == 4
    await answer(engine, manager, chat("mine", "MINE", "more"), owner=BOB)
    assert engine.submits[-1].lease == engine.submits[0].lease
    assert engine.submits[-1].base_len > 0


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
