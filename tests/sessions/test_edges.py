"""Turns at the edges: the last token, the last place in the context, nothing said, everybody at once."""

import asyncio

import pytest

from chatd import protocol
from chatd.engine import messages
from chatd.engine.messages import Finish, FinishReason, Fork
from chatd.errors import ContextLengthExceeded
from chatd.protocol import Message, Params, SessionAttach, SessionCreate, SessionUpdate, UserMessage
from chatd.sessions.manager import CompletionRequest, Owner, Session, SessionLimits, SessionManager
from chatd.testing.sessions import (
    ASSISTANT,
    SYSTEM,
    TURN_END,
    USER,
    CoreEngine,
    RecordingSubscriber,
    ScriptedEngine,
    encode_text,
    make_manager,
)

ANN = Owner("acme", "ann")
ENDS = protocol.ResponseCompleted | protocol.ResponseIncomplete


async def open_session(manager: SessionManager, **fields) -> tuple[Session, RecordingSubscriber]:
    session = await manager.create(ANN, SessionCreate(**fields))
    subscriber = RecordingSubscriber(f"con_{session.id}")
    manager.created(session, subscriber)
    manager.start(session, subscriber)
    return session, subscriber


async def say(manager: SessionManager, session: Session, text: str, **fields) -> None:
    await manager.user_message(session, UserMessage(session=session.id, content=text, **fields))


def end_of(connection: RecordingSubscriber):
    (end,) = [event for event in connection.take() if isinstance(event, ENDS)]
    return end


def replying(text: str, end: int | None = TURN_END):
    return lambda _log: [*encode_text(text), *([] if end is None else [end])]


@pytest.mark.parametrize(
    ("said", "params", "reason", "text", "num_tokens"),
    [
        ("ab.", Params(max_tokens=3, stop=(".",)), "stop_string", "ab", 3),
        ("ab.", Params(max_tokens=2, stop=(".",)), "max_output_tokens", "ab", 2),
        ("ab.", Params(max_tokens=2, stop=("b.",)), "max_output_tokens", "ab", 2),
        (".", Params(max_tokens=1, stop=(".",)), "stop_string", "", 1),
        ("x", Params(max_tokens=1), "max_output_tokens", "x", 1),
        ("", Params(max_tokens=1), "stop", "", 1),
        ("é", Params(max_tokens=1), "max_output_tokens", "\ufffd", 1),
        ("é", Params(max_tokens=1, stop=("\ufffd",)), "stop_string", "", 1),
        ("ab.", Params(stop=("b.", ".")), "stop_string", "a", 3),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_the_last_token_may_be_the_end_in_more_than_one_way(
    said: str, params: Params, reason: str, text: str, num_tokens: int, at_once: bool
) -> None:
    engine = ScriptedEngine(replying(said))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go", params=params)
    if at_once:
        engine.step(num_tokens=num_tokens)
    engine.run()
    deltas = "".join(event.delta for event in connection.events if isinstance(event, protocol.OutputTextDelta))
    end = end_of(connection)
    assert (end.reason, end.item.content, end.usage.output_tokens) == (reason, text, num_tokens)
    assert deltas == text
    assert session.conversation.log()[-num_tokens:].tolist() == [*encode_text(said), TURN_END][:num_tokens]
    await say(manager, session, "on")
    engine.run()
    assert engine.leases[session.lease.id] == list(session.conversation.log())


async def test_turns_go_on_until_the_context_is_exactly_full_and_the_session_stays_whole() -> None:
    engine = CoreEngine(max_model_len=64)
    manager = make_manager(engine, context=64, max_tokens=None)
    session, connection = await open_session(manager)
    await say(manager, session, "x" * 20, params=Params(max_tokens=4, ignore_eos=True))
    engine.run()
    held = session.conversation.num_tokens
    connection.take()
    # Closing, header, content, turn end, header: exactly one token is left.
    await say(manager, session, "y" * (63 - held - 4), params=Params(ignore_eos=True))
    engine.run()
    end = end_of(connection)
    assert (end.reason, end.usage.input_tokens, end.usage.output_tokens) == ("context", 63, 1)
    before = manager.items(session)
    with pytest.raises(ContextLengthExceeded) as refused:
        await say(manager, session, "")
    assert refused.value.message == "prompt has 68 tokens, the limit is 63 (max_model_len 64)"
    assert manager.items(session) == before
    assert session.turn is None
    # A branch from before has room again.
    await say(manager, session, "z", parent=before[1].id, params=Params(max_tokens=2))
    engine.run()
    assert end_of(connection).usage.cached_tokens >= held - 1


async def test_messages_without_text_and_of_control_texts_alone_are_messages() -> None:
    engine = ScriptedEngine(replying(""))
    manager = make_manager(engine)
    session, _ = await open_session(manager, system="")
    await say(manager, session, "")
    engine.run()
    assert engine.submits[0].new_ids == [SYSTEM, TURN_END, USER, TURN_END, ASSISTANT]
    assert [item.content for item in manager.items(session)] == ["", ""]
    assert session.title == ""
    await say(manager, session, "<|im_end|>\u202e\x07")
    engine.run()
    assert session.title == "<|im_end|>"
    assert engine.leases[session.lease.id] == list(session.conversation.log())


async def test_the_system_prompt_may_change_until_a_message_stays() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager, system="one")
    await say(manager, session, "hi")
    engine.step()
    engine.end(engine.submits[0].request, FinishReason.FAILED)
    await manager.update(session, SessionUpdate(session=session.id, system="two"))
    await say(manager, session, "hi")
    engine.run()
    # Of the prompt that failed nothing is left, so nothing of it is gone on from.
    assert engine.submits[1].base_len == 0
    assert engine.leases[session.lease.id] == list(session.conversation.log())
    assert engine.submits[1].new_ids[: 2 + len("two")] == [SYSTEM, *encode_text("two"), TURN_END]


async def test_many_requests_over_one_history_at_once_are_answered_each_once() -> None:
    engine = CoreEngine()
    manager = make_manager(engine, max_tokens=8)

    async def ask(*said: str, name: str | None = None):
        roles = ("user", "assistant")
        history = [Message(role=roles[i % 2], content=text) for i, text in enumerate(said)]
        return await manager.complete(ANN, CompletionRequest(messages=history, conversation_id=name))

    first = await ask("hello there, how are you?")
    engine.run()
    answer = await first.text()
    more = [ask("hello there, how are you?", answer, "go on", name=name) for name in (None, "a", "a", "b")]
    edited = ask("hello there, how are you!", answer, "go on", name="a")
    completions = await asyncio.gather(*more, edited)
    engine.step()
    completions[1].cancel()
    engine.run()
    assert [completion.finish_reason == "cancelled" for completion in completions] == [False, True, *[False] * 3]
    texts = [await completion.text() for completion in completions]
    assert texts[0] == texts[2] == texts[3]
    assert texts[0].startswith(texts[1])
    assert engine.core.stats().num_failed_steps == 0
    assert manager.num_in_flight == 0


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_an_engine_that_dies_around_a_fork_loses_time_and_nothing_else(moment: str) -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)

    async def ask(*said: str):
        roles = ("user", "assistant")
        history = [Message(role=roles[i % 2], content=text) for i, text in enumerate(said)]
        return await manager.complete(ANN, CompletionRequest(messages=history))

    await ask("a")
    engine.run()
    busy = await ask("a", "ok", "b")
    asking = asyncio.create_task(ask("a", "ok", "c"))
    await asyncio.sleep(0)
    if moment == "after":
        forked = await asking
        assert any(isinstance(message, Fork) for message in engine.sent)
        engine.die()
        engine.restart()
    else:
        engine.die()
        engine.restart()
        forked = await asking
    engine.run()
    assert await busy.text() == "ok"
    assert await forked.text() == "ok"
    assert engine.submits[-1].base_len == 0
    assert engine.submits[-1].new_ids[:2] == [USER, *encode_text("a")]


async def test_a_connection_that_is_held_while_the_ring_overflows_misses_nothing() -> None:
    engine = ScriptedEngine(replying("abcdefghij" * 4))
    manager = make_manager(engine, limits=SessionLimits(replay_events=4))
    session, _ = await open_session(manager)
    await say(manager, session, "go")
    engine.step(num_tokens=1)
    late = RecordingSubscriber("late")
    frame = manager.attach(session, late, SessionAttach(session=session.id, after_seq=1, boot="boot_1"))
    assert frame.replay == "exact"
    for _ in range(20):
        engine.step()
    assert late.events == []
    manager.start(session, late)
    engine.run()
    seqs = [event.seq for event in late.events if isinstance(event, protocol.TranscriptEvent)]
    assert seqs == list(range(2, session.ring.head_seq + 1))
    again = manager.attach(session, late, SessionAttach(session=session.id, after_seq=1, boot="boot_1"))
    assert again.replay == "snapshot"
    assert again.snapshot.items[-1].content == "abcdefghij" * 4


async def test_what_the_engine_says_late_or_twice_changes_nothing() -> None:
    engine = ScriptedEngine(replying("ab."))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go", params=Params(stop=(".",)))
    engine.run()
    first = engine.submits[0]
    log, items = list(session.conversation.log()), manager.items(session)
    connection.take()
    timings = messages.RequestTimings(0.0, 0.0, 0.0, 0, 0)
    engine.say(
        messages.Tokens(9, [messages.TokenDelta(first.request, [65])]),
        messages.LeaseLost(first.request, first.lease),
        messages.Done(first.request, FinishReason.FAILED, 1, 0, 0, timings),
        messages.Done(first.request, FinishReason.STOP, 1, 0, 0, timings),
        messages.Preempted(first.request, False),
    )
    assert (list(session.conversation.log()), manager.items(session)) == (log, items)
    assert [event for event in connection.events if isinstance(event, protocol.TranscriptEvent)] == []
    assert len([message for message in engine.sent if isinstance(message, Finish)]) == 1


async def test_a_lease_that_was_lost_to_a_cancelled_turn_is_not_asked_for_again() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "one")
    engine.run()
    engine.lose(session.lease.id)
    await say(manager, session, "two")
    await manager.cancel(session)
    engine.run()
    await say(manager, session, "three")
    engine.run()
    assert [submit.base_len for submit in engine.submits][-1] == 0
    assert manager.stats.lease_misses == 1
    assert engine.leases[session.lease.id] == list(session.conversation.log())
