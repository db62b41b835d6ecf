"""Type-ahead: what is typed is computed before it is sent, and what is not sent leaves nothing behind."""

import asyncio
from array import array

import pytest

from chatd import protocol
from chatd.engine.messages import Cancel, RequestClass, Submit, Trim
from chatd.errors import Conflict, PermissionDenied
from chatd.protocol import (
    PrefillState,
    SessionAttach,
    SessionCreate,
    SessionUpdate,
    UserMessage,
)
from chatd.sessions import drafts
from chatd.sessions.manager import Owner, Session, SessionManager
from chatd.testing.engine import FakeClock
from chatd.testing.sessions import (
    CoreEngine,
    RecordingSubscriber,
    ScriptedEngine,
    encode_text,
    make_manager,
)

ANN = Owner("acme", "ann")
TEXT = "Tell me a long story about a river, a lake and the sea. "


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are not held back."""
    monkeypatch.setattr(drafts, "INTERVAL_S", 0.0)


async def opened(
    engine: CoreEngine | ScriptedEngine, **fields: object
) -> tuple[SessionManager, Session, RecordingSubscriber]:
    options = {name: fields.pop(name) for name in ("monotonic", "max_tokens") if name in fields}
    manager = make_manager(engine, **{"max_tokens": 24, **options})
    session = await manager.create(ANN, SessionCreate(**fields))
    connection = RecordingSubscriber()
    manager.created(session, connection)
    manager.start(session, connection)
    return manager, session, connection


async def settled(manager: SessionManager) -> None:
    """Return once every draft is with the engine."""
    async with asyncio.timeout(10):
        while manager._drafts._tasks:
            await asyncio.gather(*manager._drafts._tasks.values(), return_exceptions=True)
            await asyncio.sleep(0)


async def typed(
    engine: CoreEngine, manager: SessionManager, session: Session, text: str | None, connection: RecordingSubscriber
) -> None:
    manager.prefill(session, text, connection, re="p")
    await settled(manager)
    engine.run()


def usage_of(connection: RecordingSubscriber) -> protocol.Usage:
    ends = protocol.ResponseCompleted | protocol.ResponseIncomplete
    return next(event.usage for event in reversed(connection.events) if isinstance(event, ends))


def states(connection: RecordingSubscriber) -> list[tuple[int, bool, str | None]]:
    return [(e.tokens, e.computed, e.re) for e in connection.events if isinstance(e, PrefillState)]


def cached(engine: CoreEngine, text: str) -> int:
    """Return how many blocks of a first message with this text are in the pool."""
    table = engine.core.kv.open_table("acme")
    ids = make_ids(text)
    return len(engine.core.kv.get_computed_blocks(table, array("i", ids), last_too=True))


def make_ids(text: str) -> list[int]:
    return [257, *encode_text(text)]


async def test_what_was_typed_is_not_computed_again_when_it_is_sent() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    for end in (7, 20, 33, len(TEXT)):
        await typed(engine, manager, session, TEXT[:end], connection)
    assert states(connection)[-1] == (len(TEXT), True, None)
    await manager.user_message(session, UserMessage(session=session.id, content=TEXT))
    engine.run()
    usage = usage_of(connection)
    assert usage.input_tokens - usage.cached_tokens == 3, "the last token, the turn's end and the answer's header"
    await typed(engine, manager, session, "And then?", connection)
    await manager.user_message(session, UserMessage(session=session.id, content="And then?"))
    engine.run()
    usage = usage_of(connection)
    assert usage.input_tokens - usage.cached_tokens == 3
    assert len(manager._drafts) == 0


async def test_each_change_computes_only_what_is_new_at_the_lowest_priority() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    await typed(engine, manager, session, TEXT[:20], connection)
    await typed(engine, manager, session, TEXT[:30], connection)
    sent = [message for message in engine.sent if isinstance(message, Submit)]
    assert [len(message.new_ids) for message in sent] == [20, 10]
    assert all(message.compute_only for message in sent)
    assert all(message.request_class is RequestClass.PREFILL_AHEAD for message in sent)


async def test_an_edit_rolls_back_to_what_stays() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    await typed(engine, manager, session, TEXT, connection)
    assert cached(engine, TEXT) == 3
    other = TEXT[:10] + "X" * 30
    await typed(engine, manager, session, other, connection)
    assert cached(engine, TEXT) == 0, "what was typed before is nowhere"
    assert [message.length for message in engine.sent if isinstance(message, Trim)] == [11]
    await manager.user_message(session, UserMessage(session=session.id, content=other))
    engine.run()
    usage = usage_of(connection)
    assert usage.input_tokens - usage.cached_tokens == 3


@pytest.mark.parametrize("way", ["nothing typed", "empty", "detached", "gone", "timeout", "closed"])
async def test_a_draft_that_is_taken_back_leaves_nothing(way: str) -> None:
    engine, time = CoreEngine(), FakeClock()
    manager, session, connection = await opened(engine, monotonic=time)
    await typed(engine, manager, session, TEXT, connection)
    before = engine.core.pool.num_active
    assert cached(engine, TEXT) > 0
    assert before > 0
    match way:
        case "nothing typed":
            manager.prefill(session, None, connection)
        case "empty":
            manager.prefill(session, "", connection)
        case "detached":
            manager.detach(session, connection)
        case "gone":
            manager.detach_all(connection)
        case "timeout":
            time.advance(drafts.KEPT_S + 1)
            manager.sweep()
            assert states(connection)[-1] == (0, False, None)
        case "closed":
            await manager.close(session)
    engine.run()
    assert (cached(engine, TEXT), engine.core.pool.num_active) == (0, 0)
    assert len(manager._drafts) == 0


async def test_a_message_that_is_another_one_forgets_the_draft() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    await typed(engine, manager, session, TEXT, connection)
    await manager.user_message(session, UserMessage(session=session.id, content="Hello."))
    engine.run()
    assert cached(engine, TEXT) == 0
    log = list(session.conversation.log())
    assert list(engine.core.leases.get(session.lease.id).token_ids)[: len(log)] == log


async def test_what_is_typed_while_an_answer_comes_is_computed_after_it() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    await manager.user_message(session, UserMessage(session=session.id, content="Hello."))
    engine.step()
    manager.prefill(session, TEXT, connection)
    await settled(manager)
    assert not any(getattr(message, "compute_only", False) for message in engine.sent)
    engine.run()
    await settled(manager)
    engine.run()
    assert states(connection)[-1][:2] == (len(TEXT) + 1, True), "with the end of an answer that was cut short"
    await manager.user_message(session, UserMessage(session=session.id, content=TEXT))
    engine.run()
    usage = usage_of(connection)
    assert usage.input_tokens - usage.cached_tokens == 3


async def test_of_what_is_typed_fast_the_latest_counts() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    for end in range(1, len(TEXT)):
        manager.prefill(session, TEXT[:end], connection)
    await settled(manager)
    engine.run()
    sent = [message for message in engine.sent if isinstance(message, Submit)]
    assert len(sent) <= 2
    assert states(connection)[-1] == (len(TEXT) - 1, True, None)


async def test_a_draft_is_in_no_event_and_no_list() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    other = RecordingSubscriber("other")
    manager.attach(session, other, SessionAttach(session=session.id))
    manager.start(session, other)
    await typed(engine, manager, session, "canary " * 10, connection)
    assert session.ring.head_seq == 0
    assert "canary" not in repr([*connection.events, *other.events, manager.info(session), manager.items(session)])
    assert not any(isinstance(event, PrefillState) for event in other.events), "nobody else is told"


async def test_observers_and_strangers_type_nothing() -> None:
    engine = CoreEngine()
    manager, session, _ = await opened(engine)
    observer, stranger = RecordingSubscriber("o"), RecordingSubscriber("s")
    manager.attach(session, observer, SessionAttach(session=session.id, role="observer"))
    manager.start(session, observer)
    with pytest.raises(PermissionDenied):
        manager.prefill(session, "x", observer)
    with pytest.raises(Conflict) as refused:
        manager.prefill(session, "x", stranger)
    assert refused.value.error_code == "not_attached"


async def test_what_was_computed_is_charged_once() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    charged: list[int] = []
    for end in (20, 40):
        manager.prefill(session, TEXT[:end], connection, charge=charged.append)
        await settled(manager)
        engine.run()
    assert charged == [20, 20]


async def test_a_draft_that_can_never_fit_computes_nothing() -> None:
    engine = CoreEngine(max_model_len=128)
    manager, session, connection = await opened(engine)
    manager.prefill(session, "x" * 2000, connection)
    await settled(manager)
    assert len(manager._drafts) == 0


async def test_only_so_many_sessions_of_a_user_have_a_draft() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    sessions = [session]
    for _ in range(drafts.MAX_DRAFTS_PER_USER):
        other = await manager.create(ANN, SessionCreate())
        manager.created(other, connection)
        manager.start(other, connection)
        sessions.append(other)
    for number, each in enumerate(sessions):
        await typed(engine, manager, each, f"{number}" * 40, connection)
    assert len(manager._drafts) == drafts.MAX_DRAFTS_PER_USER
    assert sessions[0].lease.draft_ids == []


async def test_an_engine_that_dies_takes_a_draft_with_it_and_loses_nothing() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    await typed(engine, manager, session, TEXT, connection)
    engine.die()
    engine.restart()
    await manager.user_message(session, UserMessage(session=session.id, content=TEXT))
    engine.run()
    assert usage_of(connection).cached_tokens == 0
    await typed(engine, manager, session, "again " * 9, connection)
    assert states(connection)[-1][1]


async def test_a_turn_cancels_what_computes_its_draft() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine)
    manager.prefill(session, TEXT * 5, connection)
    await settled(manager)
    engine.step()
    await manager.user_message(session, UserMessage(session=session.id, content=TEXT))
    assert any(isinstance(message, Cancel) for message in engine.sent)
    engine.run()
    assert usage_of(connection).input_tokens == len(TEXT) + 3


async def test_another_system_prompt_is_read_ahead_too() -> None:
    engine = CoreEngine()
    manager, session, connection = await opened(engine, system="s" * 50)
    await manager.user_message(session, UserMessage(session=session.id, content="Hello."))
    engine.run()
    await manager.update(session, SessionUpdate(session=session.id, system="t" * 50))
    await typed(engine, manager, session, TEXT, connection)
    await manager.user_message(session, UserMessage(session=session.id, content=TEXT))
    engine.run()
    usage = usage_of(connection)
    assert usage.input_tokens - usage.cached_tokens == 3
