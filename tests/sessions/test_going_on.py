"""An answer that was cut short goes on beside itself, and becomes what one longer run would have made."""

import pytest

from chatd import protocol
from chatd.engine.messages import FinishReason, Submit
from chatd.errors import Conflict, ContextLengthExceeded, InvalidRequest, PermissionDenied
from chatd.protocol import (
    Params,
    ResponseContinue,
    ResponseCreated,
    SessionAttach,
    SessionCreate,
    SessionTruncated,
    SessionUpdate,
    UserMessage,
)
from chatd.sessions.manager import Owner, Session, SessionManager
from chatd.sessions.prompt_encoder import SettledAnswer
from chatd.testing.journal import MemoryJournal
from chatd.testing.sessions import (
    TURN_END,
    ByteChatEncoder,
    CoreEngine,
    RecordingSubscriber,
    ScriptedEngine,
    encode_text,
    make_manager,
)

ANN = Owner("acme", "ann")
ENDS = protocol.ResponseCompleted | protocol.ResponseIncomplete
STORY = "Once upon a time there was a river, and it ran to the sea."


def telling(log: list[int]) -> list[int]:
    """Return the rest of the story after what of it stands at the end of a log."""
    text = bytes(i for i in log[log.index(258) :] if i < 256).decode() if 258 in log else ""
    begun = next((n for n in range(len(STORY), 0, -1) if text.endswith(STORY[:n])), 0)
    return [*encode_text(STORY[begun:]), TURN_END]


async def opened(
    engine: CoreEngine | ScriptedEngine, *, system: str | None = None, params: Params | None = None, **options: object
) -> tuple[SessionManager, Session, RecordingSubscriber]:
    manager = make_manager(engine, **{"max_tokens": None, **options})
    session = await manager.create(ANN, SessionCreate(title="t", system=system, params=params or Params()))
    connection = RecordingSubscriber()
    manager.created(session, connection)
    manager.start(session, connection)
    return manager, session, connection


async def say(manager: SessionManager, session: Session, text: str, **params: object) -> None:
    await manager.user_message(session, UserMessage(session=session.id, content=text, params=Params(**params)))


async def go_on(manager: SessionManager, session: Session, **fields: object) -> None:
    await manager.go_on(session, ResponseContinue(session=session.id, **fields))


def last_end(connection: RecordingSubscriber) -> protocol.ResponseCompleted | protocol.ResponseIncomplete:
    return next(event for event in reversed(connection.events) if isinstance(event, ENDS))


def said_again(connection: RecordingSubscriber) -> str:
    """Return the last answer's text as its events tell it: the item that began, and the deltas."""
    place = max(i for i, event in enumerate(connection.events) if isinstance(event, ResponseCreated))
    deltas = [e.delta for e in connection.events[place:] if isinstance(e, protocol.OutputTextDelta)]
    return connection.events[place].item.content + "".join(deltas)


async def test_an_answer_goes_on_as_a_sibling_that_begins_with_its_text() -> None:
    engine = ScriptedEngine(telling)
    manager, session, connection = await opened(engine)
    await say(manager, session, "A story?", max_tokens=10)
    engine.run()
    first = manager.items(session)[-1]
    assert (first.content, first.reason) == (STORY[:10], "max_output_tokens")
    await go_on(manager, session)
    created = next(event for event in reversed(connection.events) if isinstance(event, ResponseCreated))
    assert (created.item.content, created.item.parent) == (STORY[:10], first.parent)
    assert (created.item.siblings.index, created.item.siblings.previous) == (2, first.id)
    engine.run()
    assert said_again(connection) == STORY
    end = last_end(connection)
    assert (end.item.content, end.reason) == (STORY, "stop")
    assert end.usage.output_tokens == len(STORY) - 10 + 1, "what comes now, with the turn's end"
    assert end.usage.input_tokens == first.usage.input_tokens + 10
    assert session.conversation.get(first.id).content == STORY[:10], "nothing is overwritten"
    assert engine.submits[-1].num_answered == 10


@pytest.mark.parametrize("stops", [(), ("there was",), ("was a", "xyz")])
@pytest.mark.parametrize("cuts", [(1,), (5, 7), (17, 3, 4), (20,)])
async def test_pieces_make_the_text_of_one_run(stops: tuple[str, ...], cuts: tuple[int, ...]) -> None:
    engine = ScriptedEngine(telling)
    whole_manager, whole, whole_connection = await opened(engine)
    await say(whole_manager, whole, "A story?", stop=stops)
    engine.run()
    expected = last_end(whole_connection)
    engine = ScriptedEngine(telling)
    manager, session, connection = await opened(engine)
    await say(manager, session, "A story?", stop=stops, max_tokens=cuts[0])
    engine.run()
    for more in cuts[1:]:
        await go_on(manager, session, max_tokens=more)
        engine.run()
        assert said_again(connection) == last_end(connection).item.content
    await go_on(manager, session)
    engine.run()
    assert said_again(connection) == expected.item.content
    assert last_end(connection).reason == expected.reason
    assert session.conversation.head.ids == whole.conversation.head.ids


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}, {"min_tokens": 30, "repetition_penalty": 1.2}])
async def test_on_the_core_a_cancelled_answer_goes_on_to_what_it_would_have_been(params: dict[str, object]) -> None:
    words = encode_text("abcdefgh ")

    answers = []
    for is_cut in (False, True):
        engine = CoreEngine(answer_ids=words)
        manager, session, connection = await opened(engine, system="s" * 40)
        await say(manager, session, "hello", max_tokens=60, ignore_eos=True, **params)
        if is_cut:
            for _ in range(17):
                engine.step()
            await manager.cancel(session)
            engine.run()
            num_more = 60 - len(session.conversation.head.ids)
            assert 0 < num_more < 60
            await go_on(manager, session, max_tokens=num_more)
        engine.run()
        answers.append(list(session.conversation.head.ids))
    assert last_end(connection).usage.cached_tokens > 40
    assert next(m for m in reversed(engine.sent) if isinstance(m, Submit)).num_answered == 60 - num_more
    assert answers[0] == answers[1]


async def test_what_is_complete_does_not_go_on() -> None:
    engine = ScriptedEngine(telling)
    manager, session, _ = await opened(engine)
    with pytest.raises(InvalidRequest):
        await go_on(manager, session)
    await say(manager, session, "A story?")
    with pytest.raises(Conflict) as busy:
        await go_on(manager, session)
    assert busy.value.error_code == "session_busy"
    engine.run()
    with pytest.raises(Conflict) as refused:
        await go_on(manager, session)
    assert refused.value.error_code == "not_continuable"
    user = manager.items(session)[0]
    with pytest.raises(InvalidRequest):
        await go_on(manager, session, item=user.id)
    observer = RecordingSubscriber("o")
    manager.attach(session, observer, SessionAttach(session=session.id, role="observer"))
    manager.start(session, observer)
    with pytest.raises(PermissionDenied):
        await manager.go_on(session, ResponseContinue(session=session.id), observer)


async def test_the_next_message_follows_the_longer_answer() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    manager, session, connection = await opened(engine)
    await say(manager, session, "hello", max_tokens=20, ignore_eos=True)
    engine.run()
    await go_on(manager, session, max_tokens=20)
    engine.run()
    num_tokens = session.conversation.num_tokens
    await say(manager, session, "and?", max_tokens=5)
    engine.run()
    assert last_end(connection).usage.cached_tokens >= num_tokens - 1


async def test_an_answer_at_the_end_of_the_context_goes_on_where_turns_may_be_dropped() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "), max_model_len=256)
    manager, session, connection = await opened(engine, context=256)
    await say(manager, session, "x" * 60, max_tokens=20, ignore_eos=True)
    engine.run()
    await say(manager, session, "y" * 60, ignore_eos=True)
    engine.run()
    assert last_end(connection).reason == "context"
    with pytest.raises(ContextLengthExceeded):
        await go_on(manager, session, max_tokens=10)
    await manager.update(session, SessionUpdate(session=session.id, context_policy="drop_oldest"))
    before = last_end(connection).item
    await go_on(manager, session, max_tokens=10)
    engine.run()
    end = last_end(connection)
    assert end.item.content.startswith(before.content)
    assert end.usage.output_tokens == 10
    truncated = next(event for event in connection.events if isinstance(event, SessionTruncated))
    assert end.item.context_from == truncated.kept_from == end.item.parent


class ThinkingEncoder(ByteChatEncoder):
    """What stands before a "|" in an answer are thoughts, which later prompts do not have."""

    def settle(self, answer_ids) -> SettledAnswer | None:
        ids = list(answer_ids)
        return SettledAnswer(0, ids[ids.index(ord("|")) + 1 :]) if ord("|") in ids else None


def thinking(log: list[int]) -> list[int]:
    text = bytes(i for i in log if i < 256).decode()
    whole = "hmm, well|It is Paris."
    begun = next((n for n in range(len(whole), 0, -1) if text.endswith(whole[:n])), 0)
    return [*encode_text(whole[begun:]), TURN_END]


@pytest.mark.parametrize("cut", [4, 9, 13])
async def test_thoughts_go_on_and_are_dropped_when_something_else_is_said(cut: int) -> None:
    engine = ScriptedEngine(thinking)
    manager, session, connection = await opened(engine, encoder=ThinkingEncoder())
    await say(manager, session, "Capital?", max_tokens=cut)
    engine.run()
    partial = session.conversation.head
    assert bytes(list(partial.ids)) == b"hmm, well|It is Paris."[:cut]
    await go_on(manager, session)
    engine.run()
    assert last_end(connection).item.content == "hmm, well|It is Paris."
    assert bytes([i for i in session.conversation.head.ids if i < 256]) == b"It is Paris."
    await manager.select_branch(session, protocol.BranchSelect(session=session.id, leaf=partial.id))
    await say(manager, session, "And?")
    log = engine.leases[engine.submits[-1].lease]
    assert (b"hmm" in bytes(i for i in log if i < 256)) == (cut < 10), "thoughts that never ended stay as they are"
    engine.run()


async def test_an_answer_that_goes_on_is_kept_and_goes_on_after_a_crash() -> None:
    journal = MemoryJournal()
    engine = ScriptedEngine(telling)
    manager, session, _ = await opened(engine, journal=journal)
    await say(manager, session, "A story?", max_tokens=10)
    engine.run()
    await manager.settle()
    await go_on(manager, session, max_tokens=12)
    engine.step(5)
    (kept,) = [m for m in await journal.messages(session.id) if m.status == "in_progress"]
    assert (bytes(list(kept.ids)), kept.num_inherited) == (STORY[:15].encode(), 10)
    again = ScriptedEngine(telling)
    restarted = make_manager(again, journal=journal, max_tokens=None)
    await restarted.restore()
    again.run()
    await restarted.settle()
    restored = await restarted.resolve(ANN, session.id)
    item = restarted.items(restored)[-1]
    assert item.content == STORY[:22]
    assert (item.usage.output_tokens, item.reason) == (12, str(FinishReason.MAX_OUTPUT_TOKENS))
