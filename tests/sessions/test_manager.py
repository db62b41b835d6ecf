"""Turns of native sessions, against an engine that says what it is told."""

import asyncio
import threading

import pytest

from chatd import protocol
from chatd.engine import messages
from chatd.engine.messages import Finish, FinishReason, Release, RequestClass, Retain, Tier
from chatd.errors import (
    ChatdError,
    Conflict,
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RateLimited,
    Unavailable,
)
from chatd.protocol import (
    ItemAdded,
    Message,
    OutputTextDelta,
    Params,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    SessionAttach,
    SessionCreate,
    SessionList,
    SessionUpdate,
    UserMessage,
)
from chatd.sessions.manager import Owner, Session, SessionLimits, SessionManager
from chatd.testing.journal import MemoryJournal
from chatd.testing.sessions import (
    ASSISTANT,
    END_OF_TEXT,
    SYSTEM,
    TURN_END,
    USER,
    ByteChatEncoder,
    RecordingSubscriber,
    ScriptedEngine,
    encode_text,
    make_manager,
)

ANN = Owner("acme", "ann")


def replying(text: str, end: int | None = TURN_END):
    return lambda _log: [*encode_text(text), *([] if end is None else [end])]


async def open_session(manager: SessionManager, owner: Owner = ANN, **fields) -> tuple[Session, RecordingSubscriber]:
    session = await manager.create(owner, SessionCreate(**fields))
    subscriber = RecordingSubscriber(f"con_{session.id}")
    manager.created(session, subscriber)
    manager.start(session, subscriber)
    return session, subscriber


async def say(manager: SessionManager, session: Session, text: str, subscriber=None, **fields) -> None:
    await manager.user_message(session, UserMessage(session=session.id, content=text, **fields), subscriber)


def kinds(events) -> list[str]:
    return [event.__struct_config__.tag for event in events]


def transcript(events) -> list:
    return [event for event in events if isinstance(event, protocol.TranscriptEvent)]


async def test_a_turn_is_an_item_a_response_deltas_and_one_end() -> None:
    engine = ScriptedEngine(replying("hi!"))
    manager = make_manager(engine)
    session, connection = await open_session(manager, system="be brief", title="t")
    await say(manager, session, "hello", connection, id="cmd_1")
    engine.run()
    events = transcript(connection.events)
    assert kinds(events) == [
        "item.added",
        "response.created",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.completed",
    ]
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[0].re == "cmd_1"
    assert events[0].item.content == "hello"
    assert "".join(event.delta for event in events[2:5]) == "hi!"
    end = events[-1]
    assert isinstance(end, ResponseCompleted)
    assert end.reason == "stop"
    assert end.item.content == "hi!"
    assert end.item.parent == events[0].item.id
    prompt = [SYSTEM, *encode_text("be brief"), TURN_END, USER, *encode_text("hello"), TURN_END, ASSISTANT]
    assert engine.submits[0].new_ids == prompt
    assert end.usage == protocol.Usage.of(len(prompt), 0, 4)
    assert end.timings.queue_ms == 1.0
    assert end.timings.prefill_tok_s == len(prompt) / 0.5
    assert end.timings.decode_tok_s == 3 / 0.25


async def test_a_later_turn_sends_only_what_is_new() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "one")
    engine.run()
    await say(manager, session, "two")
    engine.run()
    first, second = engine.submits
    assert second.lease == first.lease
    assert second.base_len == len(first.new_ids) + 3
    assert second.new_ids == [USER, *encode_text("two"), TURN_END, ASSISTANT]
    assert engine.leases[first.lease] == list(session.conversation.log())


async def test_an_answer_without_a_turn_end_is_closed_by_the_next_turn() -> None:
    engine = ScriptedEngine(replying("abc", end=None))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "one", params=Params(max_tokens=2))
    engine.run()
    end = connection.events[-2]
    assert isinstance(end, ResponseIncomplete)
    assert (end.reason, end.item.content, end.usage.output_tokens) == ("max_output_tokens", "ab", 2)
    await say(manager, session, "two")
    assert engine.submits[1].new_ids == [TURN_END, USER, *encode_text("two"), TURN_END, ASSISTANT]


async def test_a_stop_id_that_is_not_the_templates_stays_out_of_the_ids() -> None:
    engine = ScriptedEngine(replying("ok", end=END_OF_TEXT))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "one")
    engine.run()
    assert session.conversation.log()[-2:].tolist() == encode_text("ok")
    end = connection.events[-2]
    assert (end.reason, end.usage.output_tokens) == ("stop", 2)
    await say(manager, session, "two")
    second = engine.submits[1]
    assert second.base_len == session.conversation.head.parent.parent.num_tokens
    assert second.new_ids[0] == TURN_END


async def test_a_stop_string_ends_the_answer_where_it_was_completed() -> None:
    engine = ScriptedEngine(replying("one STOP two"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go", params=Params(stop=("STOP",)))
    engine.run()
    end = next(event for event in connection.events if isinstance(event, ResponseCompleted))
    assert (end.reason, end.item.content) == ("stop_string", "one ")
    assert end.usage.output_tokens == len("one STOP")
    finish = next(message for message in engine.sent if isinstance(message, Finish))
    prompt = len(engine.submits[0].new_ids)
    assert finish == Finish(engine.submits[0].request, engine.submits[0].lease, prompt + len("one STOP"))
    assert session.conversation.log()[prompt:].tolist() == encode_text("one STOP")
    text = "".join(event.delta for event in connection.events if isinstance(event, OutputTextDelta))
    assert text == "one "


async def test_tokens_after_a_stop_string_in_the_same_batch_are_neither_kept_nor_counted() -> None:
    engine = ScriptedEngine(replying("a.bcdef"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go", params=Params(stop=(".",)))
    engine.step(num_tokens=6)
    engine.run()
    end = next(event for event in connection.events if isinstance(event, ResponseCompleted))
    assert (end.item.content, end.usage.output_tokens) == ("a", 2)
    await say(manager, session, "more")
    engine.run()
    assert engine.leases[engine.submits[0].lease] == list(session.conversation.log())


async def test_several_steps_in_one_batch_make_one_delta() -> None:
    engine = ScriptedEngine(replying("abcdef"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go")
    engine.step(num_tokens=5)
    deltas = [event for event in connection.events if isinstance(event, OutputTextDelta)]
    assert [(event.delta, event.n_tokens) for event in deltas] == [("abcde", 5)]


async def test_a_character_is_sent_whole() -> None:
    engine = ScriptedEngine(replying("é🙂"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go")
    engine.run()
    deltas = [event for event in connection.events if isinstance(event, OutputTextDelta)]
    assert [(event.delta, event.n_tokens) for event in deltas] == [("é", 2), ("🙂", 4)]


async def test_a_second_turn_is_refused_while_one_runs() -> None:
    engine = ScriptedEngine(replying("abc"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "one")
    for respond in (True, False):
        with pytest.raises(Conflict) as refused:
            await say(manager, session, "two", respond=respond)
        assert refused.value.error_code == "session_busy"
    engine.run()
    await say(manager, session, "two")
    assert len(engine.submits) == 2


async def test_cancel_keeps_what_was_sent() -> None:
    engine = ScriptedEngine(replying("abcdef"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go")
    engine.step(num_tokens=3)
    await manager.cancel(session)
    engine.run()
    end = next(event for event in connection.events if isinstance(event, ResponseIncomplete))
    assert (end.reason, end.item.content, end.item.status) == ("cancelled", "abc", "incomplete")
    assert end.usage.output_tokens == 3
    assert session.turn is None
    assert manager.items(session)[-1].reason == "cancelled"
    await say(manager, session, "go on")
    engine.run()
    assert engine.leases[engine.submits[1].lease] == list(session.conversation.log())


async def test_tokens_on_their_way_when_it_is_cancelled_are_dropped() -> None:
    engine = ScriptedEngine(replying("abcdef"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go")
    engine.step()
    await manager.cancel(session)
    request = engine.submits[0].request
    manager.on_engine_messages([messages.Tokens(9, [messages.TokenDelta(request, encode_text("zz"))])])
    engine.run()
    end = next(event for event in connection.events if isinstance(event, ResponseIncomplete))
    assert (end.item.content, end.usage.output_tokens) == ("a", 1)


async def test_cancel_without_an_answer_in_progress_is_refused() -> None:
    manager = make_manager(ScriptedEngine(replying("x")))
    session, _ = await open_session(manager)
    with pytest.raises(Conflict) as refused:
        await manager.cancel(session)
    assert refused.value.error_code == "not_responding"


async def test_a_lost_lease_is_sent_again_whole() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "one")
    engine.run()
    engine.lose(engine.submits[0].lease)
    await say(manager, session, "two")
    engine.run()
    _, lost, again = engine.submits
    assert again.request != lost.request
    assert again.base_len == 0
    assert again.new_ids == session.conversation.log()[: len(again.new_ids)].tolist()
    assert kinds(transcript(connection.events)).count("response.completed") == 2


async def test_an_answer_goes_on_in_the_next_engine_from_what_was_delivered() -> None:
    engine = ScriptedEngine(replying("okay"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "one")
    engine.run()
    committed = list(session.conversation.log())
    await say(manager, session, "two")
    engine.step(num_tokens=2)
    connection.take()
    engine.die()
    assert kinds(connection.take()) == ["response.preempted", "response.queued", "session.tier"]
    assert session.snapshot("none").state.queued == {"position": 1, "why": "restore"}
    with pytest.raises(Unavailable) as refused:
        await say(manager, (await open_session(manager))[0], "another")
    assert refused.value.error_code == "engine_unavailable"
    engine.restart()
    last = engine.submits[-1]
    assert (last.base_len, last.num_answered, last.is_suspect) == (0, 2, True)
    assert last.new_ids[: len(committed)] == committed
    assert last.new_ids[-2:] == encode_text("ok")
    engine.run()
    events = connection.take()
    assert "response.resumed" in kinds(events)
    assert "".join(event.delta for event in events if isinstance(event, OutputTextDelta)) == "ay"
    (end,) = [event for event in events if isinstance(event, ResponseCompleted)]
    assert (end.item.content, end.usage.output_tokens) == ("okay", 5)
    assert end.timings.decode_tok_s == 2 / 0.25, "the rate counts what another engine computed"
    assert end.seq == session.ring.head_seq


async def test_an_answer_that_was_running_at_two_deaths_without_getting_on_fails() -> None:
    engine = ScriptedEngine(replying("okay"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "one")
    engine.step()
    engine.die()
    engine.restart()
    engine.flush()
    engine.die()
    (failed,) = [event for event in connection.events if isinstance(event, ResponseFailed)]
    assert failed.error.code == "engine_died"
    assert manager.items(session) == []
    assert session.turn is None


async def test_an_answer_is_cancelled_while_no_engine_has_it() -> None:
    engine = ScriptedEngine(replying("okay"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "one")
    engine.step()
    engine.die()
    await manager.cancel(session)
    (end,) = [event for event in connection.events if isinstance(event, ResponseIncomplete)]
    assert (end.reason, end.item.content) == ("cancelled", "o")
    engine.restart()
    assert len(engine.submits) == 1


async def test_a_turn_that_fails_leaves_the_session_as_it_was() -> None:
    engine = ScriptedEngine(replying("abc"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hello there")
    assert session.title == "hello there"
    engine.step()
    engine.end(engine.submits[0].request, FinishReason.FAILED, "engine_error", "the logits are not finite")
    failed = next(event for event in connection.events if isinstance(event, ResponseFailed))
    assert failed.error == protocol.ErrorBody(
        type="server_error", code="engine_error", message="the logits are not finite"
    )
    assert manager.items(session) == []
    assert session.title == ""
    assert session.turn is None
    await say(manager, session, "again")
    engine.run()
    assert [item.content for item in manager.items(session)] == ["again", "abc"]


async def test_an_engine_that_refuses_the_length_says_so_in_the_same_words() -> None:
    engine = ScriptedEngine(replying("abc"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hello")
    engine.end(engine.submits[0].request, FinishReason.FAILED, "context_length_exceeded", "prompt has 9 tokens")
    failed = next(event for event in connection.events if isinstance(event, ResponseFailed))
    assert (failed.error.code, failed.error.type) == ("context_length_exceeded", "invalid_request_error")


@pytest.mark.parametrize(
    ("reason", "named"), [(FinishReason.KV_EXHAUSTED, "kv_exhausted"), (FinishReason.CONTEXT, "context")]
)
async def test_what_the_engine_ends_early_is_incomplete(reason: FinishReason, named: str) -> None:
    engine = ScriptedEngine(replying("abcdef"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "go")
    engine.step(num_tokens=2)
    engine.end(engine.submits[0].request, reason)
    end = next(event for event in connection.events if isinstance(event, ResponseIncomplete))
    assert (end.reason, end.item.content) == (named, "ab")


async def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    engine = ScriptedEngine(replying("x"), context=32)
    manager = make_manager(engine, context=32)
    session, connection = await open_session(manager)
    connection.take()
    with pytest.raises(ContextLengthExceeded) as refused:
        await say(manager, session, "y" * 29)
    assert refused.value.message == "prompt has 32 tokens, the limit is 31 (max_model_len 32)"
    assert connection.events == []
    assert manager.items(session) == []
    await say(manager, session, "y" * 28)
    engine.run()
    assert manager.items(session)[-1].content == "x"
    assert engine.submits[0].params.max_tokens == 1


async def test_an_answer_that_fills_the_context_ends_by_context() -> None:
    engine = ScriptedEngine(replying("abc", end=None), context=32)
    manager = make_manager(engine, context=32, max_tokens=None)
    session, connection = await open_session(manager)
    await say(manager, session, "y" * 20)
    engine.run()
    end = next(event for event in connection.events if isinstance(event, ResponseIncomplete))
    assert (end.reason, end.usage.input_tokens, end.usage.output_tokens) == ("context", 23, 9)


async def test_content_that_is_too_large_is_refused_before_anything_changes() -> None:
    engine = ScriptedEngine(replying("x"))
    manager = make_manager(engine, limits=SessionLimits(max_content_bytes=8))
    session, _ = await open_session(manager)
    for content in ("123456789", "ééééé"):
        with pytest.raises(InvalidRequest) as refused:
            await say(manager, session, content)
        assert refused.value.error_code == "content_too_large"
    with pytest.raises(InvalidRequest):
        await manager.create(ANN, SessionCreate(messages=(Message(role="user", content="123456789"),)))
    with pytest.raises(InvalidRequest):
        await manager.create(ANN, SessionCreate(system="123456789"))
    assert engine.submits == []
    assert session.turn is None


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (Params(temperature=float("nan")), "temperature"),
        (Params(temperature=-1.0), "temperature"),
        (Params(top_p=1.5), "top_p"),
        (Params(max_tokens=0), "max_tokens"),
        (Params(max_tokens=2, min_tokens=3), "min_tokens"),
        (Params(seed=-1), "seed"),
        (Params(logprobs=21), "logprobs"),
        (Params(stop_token_ids=(99999,)), "stop_token_ids"),
        (Params(logit_bias={"x": 1.0}), "logit_bias"),
        (Params(logit_bias={"-1": 1.0}), "logit_bias"),
        (Params(logit_bias={"99999": 1.0}), "logit_bias"),
        (Params(logit_bias={"7": 1000.0}), "logit_bias"),
        (Params(stop=("",)), "stop"),
        (Params(stop=("x" * 257,)), "stop"),
        (Params(stop=("x",) * 17), "stop"),
    ],
)
async def test_a_parameter_out_of_range_is_refused_by_its_name(params: Params, param: str) -> None:
    manager = make_manager(ScriptedEngine(replying("x")))
    session, _ = await open_session(manager)
    with pytest.raises(InvalidRequest) as refused:
        await say(manager, session, "hi", params=params)
    assert refused.value.param == param
    with pytest.raises(InvalidRequest):
        await manager.update(session, SessionUpdate(session=session.id, params=params))
    assert session.turn is None
    assert manager.items(session) == []


async def test_parameters_are_the_messages_over_the_sessions_over_the_models() -> None:
    engine = ScriptedEngine(replying("x"))
    manager = make_manager(engine)
    session, _ = await open_session(manager, params=Params(temperature=0.5, top_k=5))
    await say(manager, session, "hi", params=Params(top_k=7, stop_token_ids=(65,)))
    sent = engine.submits[0].params
    assert (sent.temperature, sent.top_k, sent.max_tokens, sent.seed) == (0.5, 7, 64, 7)
    assert sent.stop_token_ids == (65, TURN_END, END_OF_TEXT)
    engine.run()
    assert session.conversation.head.sampling == sent


async def test_ignore_eos_sends_only_the_requests_own_stop_ids() -> None:
    engine = ScriptedEngine(replying("x"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "hi", params=Params(ignore_eos=True, stop_token_ids=(65,)))
    assert engine.submits[0].params.stop_token_ids == (65,)


async def test_log_probabilities_come_with_their_text() -> None:
    engine = ScriptedEngine(replying("aSTb"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hi", params=Params(logprobs=1, stop=("ST",)))
    engine.run()
    deltas = [event for event in connection.events if isinstance(event, OutputTextDelta)]
    assert [(event.delta, [entry.token for entry in event.logprobs]) for event in deltas] == [("a", ["a"])]
    assert deltas[0].logprobs[0].top == [("a", -0.5)]


async def test_a_message_without_an_answer_is_part_of_the_next_prompt() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "first", connection, respond=False, id="c1")
    assert [event.re for event in connection.events if isinstance(event, ItemAdded)] == ["c1"]
    assert engine.submits == []
    await say(manager, session, "second")
    assert engine.submits[0].new_ids == [
        USER, *encode_text("first"), TURN_END, USER, *encode_text("second"), TURN_END, ASSISTANT,
    ]  # fmt: skip


async def test_messages_brought_along_are_replayed_and_prompt_the_first_turn() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    history = (
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", content="a"),
    )
    session = await manager.create(ANN, SessionCreate(messages=history))
    connection = RecordingSubscriber()
    frame = manager.created(session, connection, re="c")
    assert (frame.head_seq, frame.re, frame.session.system, frame.session.num_items) == (0, "c", "s", 2)
    assert connection.events == []
    manager.start(session, connection)
    assert [(event.seq, event.item.content) for event in connection.events] == [(1, "u"), (2, "a")]
    await say(manager, session, "v")
    assert engine.submits[0].new_ids == [
        SYSTEM, *encode_text("s"), TURN_END, USER, *encode_text("u"), TURN_END,
        ASSISTANT, *encode_text("a"), TURN_END, USER, *encode_text("v"), TURN_END, ASSISTANT,
    ]  # fmt: skip


async def test_a_message_after_an_earlier_one_is_a_sibling_and_shares_what_is_before() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "one")
    engine.run()
    first_answer = session.conversation.head
    await say(manager, session, "two")
    engine.run()
    await say(manager, session, "other", parent=first_answer.id)
    engine.run()
    last = engine.submits[-1]
    # Both messages begin alike, so the new one's first id is there already.
    assert last.base_len == first_answer.num_tokens + 1
    assert last.new_ids == [*encode_text("other"), TURN_END, ASSISTANT]
    assert [item.content for item in manager.items(session)] == ["one", "ok", "other", "ok"]
    assert engine.leases[last.lease] == list(session.conversation.log())
    with pytest.raises(InvalidRequest) as refused:
        await say(manager, session, "x", parent="nope")
    assert refused.value.param == "parent"


async def test_the_title_is_made_from_the_first_message() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(
        manager, session, "  What\tis\n\x1b[31m the capital of France, and of Spain, and of all the other countries?"
    )
    assert session.title == "What is [31m the capital of France, and of Spain, and of…"
    assert "session.updated" in kinds(connection.events)


async def test_a_failed_turn_takes_back_only_the_title_that_it_gave() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hello")
    engine.end(next(iter(engine.running)), FinishReason.FAILED, "engine_error", "no")
    assert session.title == ""
    assert kinds(transcript(connection.events))[-2:] == ["response.failed", "session.updated"]
    await say(manager, session, "hello")
    await manager.update(session, SessionUpdate(session=session.id, title="mine"))
    engine.end(next(iter(engine.running)), FinishReason.FAILED, "engine_error", "no")
    assert session.title == "mine"


async def test_a_session_cannot_grow_without_end() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine, limits=SessionLimits(max_session_bytes=10_000))
    session, _ = await open_session(manager)

    async def fill() -> None:
        parent = None
        while True:
            await say(manager, session, "x" * 1000, respond=False, parent=parent)
            parent = manager.items(session)[0].id

    with pytest.raises(InvalidRequest) as refused:
        await fill()
    assert refused.value.error_code == "session_too_large"
    held = session.conversation.num_bytes
    assert 8_000 < held < 11_000


async def test_messages_without_text_are_bounded_too() -> None:
    manager = make_manager(ScriptedEngine(replying("ok")), limits=SessionLimits(max_session_bytes=20_000))
    session, _ = await open_session(manager)

    async def fill() -> None:
        while True:
            await say(manager, session, "", respond=False)

    with pytest.raises(InvalidRequest) as refused:
        await fill()
    assert refused.value.error_code == "session_too_large"
    assert len(session.conversation) < 20


async def test_the_text_of_all_sessions_of_a_user_is_bounded_and_closed_ones_make_room() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine, limits=SessionLimits(max_text_bytes_per_user=24_000))
    first, _ = await open_session(manager, system="x" * 3_000)
    second, _ = await open_session(manager)
    await say(manager, second, "y" * 3_000)
    engine.run()
    for attempt in (
        say(manager, first, "z" * 4_000),
        say(manager, first, "z" * 4_000, respond=False),
        manager.create(ANN, SessionCreate(system="z" * 4_000)),
        manager.update(first, SessionUpdate(session=first.id, system="z" * 4_000)),
    ):
        with pytest.raises(RateLimited) as refused:
            await attempt
        assert refused.value.error_code == "too_much_text"
    assert manager.items(first) == []
    await open_session(manager, owner=Owner("acme", "bob"), system="z" * 4_000)
    await manager.close(second)
    assert await manager.resolve(ANN, second.id) is second
    await say(manager, first, "z" * 900)
    with pytest.raises(NotFound):
        await manager.resolve(ANN, second.id)
    assert await manager.resolve(ANN, first.id) is first


async def test_a_session_closed_twice_at_once_is_closed_once() -> None:
    engine = ScriptedEngine(replying("abcdef"))
    manager = make_manager(engine, limits=SessionLimits(max_closed_sessions_per_user=0))
    session, connection = await open_session(manager)
    other = RecordingSubscriber("other")
    await say(manager, session, "hi")
    engine.step()

    async def pump() -> None:
        engine.run()

    await asyncio.gather(
        manager.close(session, re="c1", subscriber=connection),
        manager.close(session, re="c2", subscriber=other),
        pump(),
    )
    assert connection.events[-1] == protocol.SessionClosed(session=session.id, re="c1")
    assert other.events[-1] == protocol.SessionClosed(session=session.id, re="c2")
    assert (await manager.list(ANN, SessionList())).sessions == []
    assert len(manager.lease_sessions) == 0
    assert [message for message in engine.sent if isinstance(message, Release)] == [Release(engine.submits[0].lease)]


async def test_a_lease_that_was_lost_under_a_cancelled_turn_is_still_given_back() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "one")
    engine.run()
    lease = engine.submits[0].lease
    del engine.leases[lease][4:]
    await say(manager, session, "two")
    await manager.cancel(session)
    engine.run()
    assert manager.items(session)[-1].reason == "cancelled"
    assert session.turn is None
    await manager.close(session)
    assert engine.leases == {}


async def test_text_that_can_never_fit_is_not_even_encoded() -> None:
    class Refusing(ByteChatEncoder):
        def begin(self, system, messages, *, date):
            raise AssertionError("encoded")

    manager = make_manager(ScriptedEngine(replying("x"), context=32), context=32, encoder=Refusing())
    session, _ = await open_session(manager)
    with pytest.raises(ContextLengthExceeded) as refused:
        await say(manager, session, "東" * 86)
    assert refused.value.message == (
        "prompt has at least 258 bytes of new text, the limit is 256 (8 for each token of max_model_len 32)"
    )
    assert session.turn is None
    assert manager.items(session) == []


async def test_text_of_a_failed_turn_does_not_count() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "hello")
    engine.end(next(iter(engine.running)), FinishReason.FAILED, "engine_error", "no")
    assert session.conversation.num_bytes == 0


async def test_update_changes_what_it_names_and_tells_the_sender() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    other = RecordingSubscriber("other")
    command = SessionUpdate(session=session.id, title="new", system="sys", archived=True, params=Params(top_k=3))
    await manager.update(session, command, re="c9", subscriber=other)
    assert [(event.re, event.info.title, event.info.system, event.info.archived) for event in other.events] == [
        ("c9", "new", "sys", True)
    ]
    assert [event.re for event in connection.events] == [None]
    await say(manager, session, "hi")
    engine.run()
    command = SessionUpdate(session=session.id, system="late", metadata={"a": "b"}, context_policy="drop_oldest")
    await manager.update(session, command)
    info = manager.info(session)
    assert (info.system, info.metadata, info.context_policy) == ("late", {"a": "b"}, "drop_oldest")


async def test_an_observer_only_looks() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    observer = RecordingSubscriber("obs")
    manager.attach(session, observer, SessionAttach(session=session.id, role="observer"))
    manager.start(session, observer)
    for attempt in (
        say(manager, session, "hi", observer),
        manager.cancel(session, observer),
        manager.close(session, subscriber=observer),
        manager.update(session, SessionUpdate(session=session.id, title="x"), subscriber=observer),
    ):
        with pytest.raises(PermissionDenied):
            await attempt
    await say(manager, session, "hi")
    engine.run()
    assert "response.completed" in kinds(observer.events)


async def test_close_releases_the_lease_and_keeps_the_text() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hi")
    engine.run()
    lease = engine.submits[0].lease
    session.latest.blocks_held, session.latest.blocks_shared = 3, 1
    await manager.close(session, re="c1", subscriber=connection)
    assert Release(lease) in engine.sent
    assert connection.events[-1] == protocol.SessionClosed(session=session.id, blocks=3, shared_blocks=1, re="c1")
    assert (await manager.resolve(ANN, session.id)).info().num_items == 2
    assert session.info().tier == "tokens"
    connection.take()
    await say(manager, session, "again")
    engine.run()
    assert connection.events == []
    assert engine.submits[-1].base_len == 0
    assert engine.submits[-1].lease != lease


async def test_close_cancels_the_answer_in_progress_first() -> None:
    engine = ScriptedEngine(replying("abcdef"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hi")
    engine.step()

    async def pump() -> None:
        engine.run()

    await asyncio.gather(manager.close(session, subscriber=connection), pump())
    assert kinds(connection.events)[-3:] == ["response.incomplete", "session.usage", "session.closed"]
    assert session.turn is None


async def test_archiving_a_session_makes_room_where_it_is_kept() -> None:
    manager = make_manager(
        ScriptedEngine(replying("ok")), limits=SessionLimits(max_sessions_per_user=1), journal=MemoryJournal()
    )
    first, _ = await open_session(manager)
    with pytest.raises(RateLimited):
        await open_session(manager)
    await manager.update(first, SessionUpdate(id="u", session=first.id, archived=True))
    await open_session(manager)


async def test_open_sessions_are_limited_and_closing_one_makes_room() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine, limits=SessionLimits(max_sessions_per_user=2))
    first, _ = await open_session(manager)
    await open_session(manager)
    with pytest.raises(RateLimited) as refused:
        await open_session(manager)
    assert refused.value.error_code == "too_many_sessions"
    await open_session(manager, owner=Owner("acme", "bob"))
    await manager.close(first)
    await open_session(manager)
    with pytest.raises(RateLimited):
        await say(manager, first, "hi")


async def test_closed_sessions_are_kept_up_to_a_number() -> None:
    manager = make_manager(ScriptedEngine(replying("ok")), limits=SessionLimits(max_closed_sessions_per_user=1))
    first, _ = await open_session(manager)
    second, _ = await open_session(manager)
    first.updated_at = 1.0
    await manager.close(first)
    await manager.close(second)
    assert [info.id for info in (await manager.list(ANN, SessionList())).sessions] == [second.id]


async def test_turns_of_one_user_are_limited() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine, limits=SessionLimits(max_turns_per_user=1))
    one, _ = await open_session(manager)
    two, _ = await open_session(manager)
    await say(manager, one, "hi")
    with pytest.raises(RateLimited) as refused:
        await say(manager, two, "hi")
    assert refused.value.error_code == "too_many_turns"
    engine.run()
    await say(manager, two, "hi")


async def test_the_list_shows_ones_own_sessions_last_used_first_in_pages() -> None:
    manager = make_manager(ScriptedEngine(replying("needle in hay")))
    sessions = []
    for number in range(5):
        session, _ = await open_session(manager, title=f"number {number}")
        session.updated_at = float(number)
        sessions.append(session)
    await open_session(manager, owner=Owner("acme", "bob"))
    seen, cursor = [], None
    while True:
        page = await manager.list(ANN, SessionList(limit=2, cursor=cursor))
        seen += [info.title for info in page.sessions]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [f"number {number}" for number in (4, 3, 2, 1, 0)]
    assert [info.title for info in (await manager.list(ANN, SessionList(query="NUMBER 3"))).sessions] == ["number 3"]
    sessions[2].archived = True
    assert [info.title for info in (await manager.list(ANN, SessionList(archived=True))).sessions] == ["number 2"]
    with pytest.raises(InvalidRequest) as refused:
        await manager.list(ANN, SessionList(cursor="nonsense"))
    assert refused.value.param == "cursor"


async def test_texts_are_searched_newest_sessions_first_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(ScriptedEngine(replying("ok")))
    for number in range(3):
        session, _ = await open_session(manager, title=f"number {number}")
        await say(manager, session, "the Needle is in the hay", respond=False)
        session.updated_at = float(number)
    query = SessionList(query="needle")
    listed = await manager.list(ANN, query)
    assert [(found.session, found.text) for found in listed.passages] == [
        (info.id, "the Needle is in the hay") for info in listed.sessions
    ]
    assert (await manager.list(ANN, SessionList(query="number 2"))).passages == []
    assert [info.title for info in (await manager.list(ANN, query)).sessions] == ["number 2", "number 1", "number 0"]
    monkeypatch.setattr("chatd.sessions.listing.MAX_SEARCHED_CHARS", 2 * len("the Needle is in the hay"))
    assert [info.title for info in (await manager.list(ANN, query)).sessions] == ["number 2", "number 1"]


async def test_waiting_prefill_and_preemption_are_told_and_kept_for_snapshots() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hello")
    request = engine.submits[0].request
    connection.take()
    engine.say(messages.Waiting(request, 2, messages.WaitReason.NO_BLOCKS))
    snapshot = manager.attach(session, RecordingSubscriber("b"), SessionAttach(session=session.id)).snapshot
    assert snapshot.state.queued == {"position": 2, "why": "no_blocks"}
    assert snapshot.response == session.turn.response
    engine.say(messages.Started(request, 20, 4, 0.0), messages.Prefill(request, 12, 20))
    engine.say(messages.Preempted(request, False), messages.Preempted(request, True))
    assert kinds(connection.events) == [
        "response.queued",
        "client.attached",
        "session.tier",
        "response.prefill",
        "response.prefill",
        "response.preempted",
        "response.resumed",
    ]
    assert (connection.events[4].done, connection.events[4].total, connection.events[4].cached) == (12, 20, 4)
    assert session.snapshot("none").state.prefill == {"done": 12, "total": 20, "cached": 4}
    engine.run()
    state = session.snapshot("full").state
    assert (state.queued, state.prefill, state.tier) == (None, None, "device")


async def test_the_tier_of_a_lease_is_told_to_its_session() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hello")
    engine.run()
    connection.take()
    for tier in (Tier.HOST, Tier.DISK, Tier.TOKENS):
        for _ in range(2):
            engine.say(messages.LeaseTier(session.lease.id, tier, "pressure", 0))
        assert connection.take() == [protocol.SessionTier(session=session.id, tier=str(tier), why="pressure")]
        assert session.info().tier == str(tier)
        assert session.snapshot("none").state.tier == str(tier)
    await say(manager, session, "more")
    engine.run()
    told = [event for event in connection.take() if isinstance(event, protocol.SessionTier)]
    assert told == [protocol.SessionTier(session=session.id, tier="device", why="used")]


async def test_pool_frames_give_sessions_their_blocks_and_listeners_everything() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager, title="mine")
    await say(manager, session, "hello")
    engine.run()
    connection.take()
    seen = []
    remove = manager.add_pool_listener(lambda frame, leases: seen.append((frame.step, dict(leases))))
    manager.watch_pool(0.5, with_leases=True)
    assert engine.sent[-1] == messages.WatchPool(0.5, False, True)
    row = messages.LeasePool(session.lease.id, "acme", 3, 1, 40, Tier.DEVICE, False)
    engine.say(messages.PoolFrame(1, 64, 61, 0, 3, 1, 0, 0.0, 0, 0, [], [row]))
    usage = connection.events[-1]
    assert (usage.blocks_held, usage.blocks_shared) == (3, 1)
    assert seen == [(1, {session.lease.id: (ANN, session.id, "mine", False, None)})]
    remove()
    engine.say(messages.PoolFrame(2, 64, 61, 0, 3, 1, 0, 0.0, 0, 0, [], [row]))
    assert len(seen) == 1


async def test_the_engine_is_told_whether_anybody_is_attached() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hello")
    engine.run()
    manager.detach_all(connection)
    assert engine.sent[-1] == Retain(session.lease.id, False)
    manager.attach(session, connection, SessionAttach(session=session.id))
    assert engine.sent[-1] == Retain(session.lease.id, True)


async def test_before_the_engine_is_ready_sessions_open_but_nothing_is_answered() -> None:
    engine = ScriptedEngine(replying("ok"), is_ready=False)
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    with pytest.raises(Unavailable) as refused:
        await say(manager, session, "hi")
    assert refused.value.error_code == "engine_unavailable"
    engine.restart()
    await say(manager, session, "hi")
    engine.run()
    assert manager.items(session)[-1].content == "ok"
    info = manager.model.info()
    assert (info.id, info.context, info.block_size, info.blocks) == ("bytes", 4096, 16, 4096)


async def test_native_turns_are_interactive() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    await say(manager, session, "hi")
    assert engine.submits[0].request_class is RequestClass.INTERACTIVE
    assert engine.submits[0].tenant == "acme"


async def test_an_unknown_session_is_not_found() -> None:
    manager = make_manager(ScriptedEngine(replying("ok")))
    with pytest.raises(NotFound) as refused:
        await manager.resolve(ANN, "ses_nope")
    assert isinstance(refused.value, ChatdError)
    assert refused.value.error_code == "not_found"


async def test_draining_ends_what_is_late() -> None:
    engine = ScriptedEngine(replying("abcdef"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hi")
    engine.step()
    send = engine.send

    def send_and_answer(message: messages.FrontMessage) -> None:
        send(message)
        asyncio.get_running_loop().call_soon(engine.flush)

    engine.send = send_and_answer
    await manager.drain(0.0)
    end = next(event for event in connection.events if isinstance(event, ResponseIncomplete))
    assert (end.reason, end.item.content) == ("draining", "a")


async def test_created_is_followed_by_its_response_before_any_delta() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, connection = await open_session(manager, title="t")
    await say(manager, session, "hi")
    created = connection.events[1]
    assert isinstance(created, ResponseCreated)
    assert (created.item.role, created.item.content, created.item.status) == ("assistant", "", "in_progress")


class SpyEncoder(ByteChatEncoder):
    def __init__(self) -> None:
        self.calls: list[int] = []
        self.gate: threading.Event | None = None
        self.error: Exception | None = None

    def extend(self, new_messages, **fields):
        self.calls.append(sum(len(message.content) for message in new_messages))
        return super().extend(new_messages, **fields)

    def begin(self, system, messages, **fields):
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return super().begin(system, messages, **fields)


@pytest.mark.parametrize("num_turns", [4, 32])
async def test_the_work_of_a_turn_does_not_grow_with_the_history(num_turns: int) -> None:
    engine = ScriptedEngine(replying("answer " * 10), context=65536)
    spy = SpyEncoder()
    manager = make_manager(engine, encoder=spy, context=65536, max_tokens=256)
    session, _ = await open_session(manager, system="s" * 500)
    for _ in range(num_turns):
        await say(manager, session, "x" * 100)
        engine.run()
    assert set(spy.calls) == {100}
    assert {len(messages.encode(submit)) // 8 for submit in engine.submits[2:]} == {
        len(messages.encode(engine.submits[1])) // 8
    }


async def test_nothing_blocks_while_a_prompt_is_encoded_and_a_cancel_then_ends_it_unsent() -> None:
    engine = ScriptedEngine(replying("ok"))
    spy = SpyEncoder()
    spy.gate = threading.Event()
    manager = make_manager(engine, encoder=spy)
    session, connection = await open_session(manager, title="t")
    other, _ = await open_session(manager, owner=Owner("acme", "bob"))
    turn = asyncio.create_task(say(manager, session, "hi"))
    await asyncio.sleep(0)
    assert session.info().busy
    assert session.snapshot("full").response is None
    with pytest.raises(Conflict):
        await say(manager, session, "again")
    await manager.update(other, SessionUpdate(session=other.id, title="loop is free"))
    await manager.cancel(session)
    spy.gate.set()
    await turn
    assert engine.submits == []
    assert kinds(transcript(connection.events)) == ["item.added", "response.created", "response.incomplete"]
    assert manager.items(session)[-1].reason == "cancelled"
    assert session.turn is None
    spy.gate = None
    await say(manager, session, "now")
    engine.run()
    assert engine.submits[0].base_len == 0
    assert engine.leases[engine.submits[0].lease] == list(session.conversation.log())


async def test_whatever_the_encoder_raises_the_session_is_free_again() -> None:
    engine = ScriptedEngine(replying("ok"))
    spy = SpyEncoder()
    manager = make_manager(engine, encoder=spy, limits=SessionLimits(max_turns_per_user=1))
    session, connection = await open_session(manager)
    for error in (InvalidRequest("no place for it"), RuntimeError("a fault")):
        spy.error = error
        with pytest.raises(type(error)):
            await say(manager, session, "hi")
        assert (session.turn, manager.num_in_flight, manager.items(session)) == (None, 0, [])
    spy.error = None
    assert connection.events == []
    await say(manager, session, "hi")


async def test_a_command_that_is_given_up_while_it_is_encoded_leaves_nothing() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    session, _ = await open_session(manager)
    task = asyncio.create_task(say(manager, session, "hi"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (session.turn, manager.num_in_flight, manager.items(session), engine.sent) == (None, 0, [], [])


async def test_an_engine_that_dies_while_a_prompt_is_encoded_refuses_the_turn() -> None:
    engine = ScriptedEngine(replying("ok"))
    spy = SpyEncoder()
    spy.gate = threading.Event()
    manager = make_manager(engine, encoder=spy)
    session, connection = await open_session(manager)
    task = asyncio.create_task(say(manager, session, "hi"))
    await asyncio.sleep(0)
    engine.die()
    spy.gate.set()
    with pytest.raises(Unavailable):
        await task
    assert (session.turn, manager.items(session), connection.events) == (None, [], [])
    engine.restart()
    await say(manager, session, "hi")
    engine.run()
    assert manager.items(session)[-1].content == "ok"


@pytest.mark.parametrize("ending", ["stop", "cancel"])
async def test_an_answer_that_was_over_when_the_engine_died_is_kept(ending: str) -> None:
    engine = ScriptedEngine(replying("ab.cd"))
    manager = make_manager(engine)
    session, connection = await open_session(manager)
    await say(manager, session, "hi", params=Params(stop=(".",)))
    engine.send = lambda _message: None
    if ending == "stop":
        engine.step(num_tokens=3)
    else:
        engine.step(num_tokens=2)
        await manager.cancel(session)
    engine.die()
    ends = [event for event in connection.events if isinstance(event, ResponseCompleted | ResponseIncomplete)]
    assert [(event.item.content, event.reason) for event in ends] == [
        ("ab", "stop_string" if ending == "stop" else "cancelled")
    ]
    assert session.turn is None


async def test_run_takes_the_engines_batches_until_cancelled() -> None:
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine)
    engine.on_messages = None
    running = asyncio.create_task(manager.run())
    session, _ = await open_session(manager)
    await say(manager, session, "hi")
    turn = session.turn
    engine.run()
    await turn.ended.wait()
    assert manager.items(session)[-1].content == "ok"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_old_events_go_when_it_is_swept() -> None:
    now = [1000.0]
    engine = ScriptedEngine(replying("ok"))
    manager = make_manager(engine, clock=lambda: now[0])
    session, _ = await open_session(manager)
    await say(manager, session, "hi")
    engine.run()
    assert len(session.ring) > 0
    now[0] += 301.0
    manager.sweep()
    assert len(session.ring) == 0


class CountingObserver:
    def __init__(self) -> None:
        self.calls = []

    def turn_started(self, owner):
        self.calls.append(("started", owner.user))

    def first_token(self, owner, ttft_s):
        self.calls.append(("first", ttft_s))

    def next_tokens(self, owner, num_tokens, gap_s):
        self.calls.append(("next", num_tokens, gap_s))

    def turn_ended(self, owner, reason, usage, timings):
        self.calls.append(("ended", reason, None if usage is None else usage.output_tokens))


async def test_observers_are_told_of_every_turn() -> None:
    now = iter(range(100))
    engine = ScriptedEngine(replying("abc"))
    manager = make_manager(engine, monotonic=lambda: float(next(now)))
    observer = CountingObserver()
    manager.add_observer(observer)
    session, _ = await open_session(manager)
    await say(manager, session, "hi")
    engine.step()
    engine.step(num_tokens=2)
    engine.run()
    await say(manager, session, "hi")
    engine.end(next(iter(engine.running)), FinishReason.FAILED, "engine_error", "no")
    assert observer.calls == [
        ("started", "ann"),
        ("first", 1.0),
        ("next", 2, 1.0),
        ("next", 1, 1.0),
        ("ended", "stop", 4),
        ("started", "ann"),
        ("ended", "failed", None),
    ]
    assert manager.stats.turns_ended == {"stop": 1, "failed": 1}
    assert (manager.stats.turns_started, manager.stats.output_tokens, manager.stats.deltas) == (2, 4, 2)
