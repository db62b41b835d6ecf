"""After thoughts are dropped, what the next prompt has of an answer is computed at the end of the turn."""

import pytest

from chatd import protocol
from chatd.engine.messages import Cancel, FinishReason, RequestClass
from chatd.protocol import Params, SessionCreate, UserMessage
from chatd.sessions.manager import Owner, Session, SessionManager
from chatd.sessions.prompt_encoder import SettledAnswer
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
NUM_THOUGHTS = 9


class ThinkingEncoder(ByteChatEncoder):
    """The first ids of each answer are thoughts, which later prompts do not have."""

    def settle(self, answer_ids) -> SettledAnswer | None:
        return SettledAnswer(0, list(answer_ids[NUM_THOUGHTS:]))


async def begun(engine, *, max_tokens: int) -> tuple[SessionManager, Session, RecordingSubscriber]:
    """Begin a turn whose answer the model ends with its last token: one that is cut short keeps its thoughts."""
    manager = make_manager(engine, encoder=ThinkingEncoder(), max_tokens=max_tokens)
    session = await manager.create(ANN, SessionCreate(params=Params(min_tokens=max_tokens - 1)))
    connection = RecordingSubscriber()
    manager.created(session, connection)
    manager.start(session, connection)
    await say(manager, session, "hello there, how are you?")
    return manager, session, connection


async def say(manager: SessionManager, session: Session, text: str) -> None:
    await manager.user_message(session, UserMessage(session=session.id, content=text))


def run_to_end_of_turn(engine: CoreEngine, session: Session) -> None:
    while session.turn is not None:
        engine.step()


def usage_of(connection: RecordingSubscriber) -> protocol.Usage:
    ends = protocol.ResponseCompleted | protocol.ResponseIncomplete
    return next(event.usage for event in reversed(connection.take()) if isinstance(event, ends))


@pytest.mark.parametrize("max_tokens", [12, 24, 41])
async def test_the_next_turn_computes_only_what_is_new(max_tokens: int) -> None:
    engine = CoreEngine(answer_ids=[TURN_END])
    manager, session, connection = await begun(engine, max_tokens=max_tokens)
    engine.run()
    connection.take()
    num_before = session.conversation.num_tokens
    lease = engine.core.leases.get(session.lease.id)
    assert lease.table.num_computed_tokens == num_before
    assert list(lease.token_ids) == list(session.conversation.log())
    await say(manager, session, "and now?")
    engine.run()
    assert usage_of(connection).cached_tokens == num_before
    assert engine.core.stats().num_failed_steps == 0


async def test_it_has_the_lowest_priority_and_is_charged_to_no_turn() -> None:
    engine = CoreEngine(answer_ids=[TURN_END])
    manager, session, _ = await begun(engine, max_tokens=24)
    engine.run()
    ahead = [message for message in engine.sent if getattr(message, "compute_only", False)]
    assert [message.request_class for message in ahead] == [RequestClass.PREFILL_AHEAD]
    assert ahead[0].new_ids == list(session.conversation.head.ids)
    assert manager.stats.turns_started == 1
    assert manager.stats.prompt_tokens == session.conversation.head.usage.input_tokens


async def test_the_next_turn_ends_it_wherever_it_is() -> None:
    for num_steps in range(5):
        engine = CoreEngine(answer_ids=[TURN_END], max_num_batched_tokens=8)
        manager, session, connection = await begun(engine, max_tokens=41)
        run_to_end_of_turn(engine, session)
        connection.take()
        num_before = session.conversation.num_tokens
        for _ in range(num_steps):
            engine.step()
        is_done = session.lease.ahead is None
        await say(manager, session, "and now?")
        assert any(isinstance(message, Cancel) for message in engine.sent) != is_done
        engine.run()
        assert usage_of(connection).cached_tokens >= num_before - 41
        lease = engine.core.leases.get(session.lease.id)
        assert list(lease.token_ids) == list(session.conversation.log())
        assert engine.core.stats().num_failed_steps == 0
        assert manager.stats.turns_ended["failed"] == 0


async def test_a_session_that_is_closed_meanwhile_leaves_nothing() -> None:
    engine = CoreEngine(answer_ids=[TURN_END], max_num_batched_tokens=8)
    manager, session, _ = await begun(engine, max_tokens=41)
    run_to_end_of_turn(engine, session)
    assert session.lease.ahead is not None
    await manager.close(session)
    engine.run()
    assert engine.core.pool.num_active == 0
    await say(manager, session, "again")
    engine.run()
    assert manager.stats.turns_ended["failed"] == 0


async def test_an_engine_that_dies_or_loses_the_lease_meanwhile_is_given_the_whole_log() -> None:
    for kind in ("die", "lose"):
        engine = ScriptedEngine(lambda _log: [*encode_text("x" * 20), TURN_END])
        manager, session, _ = await begun(engine, max_tokens=24)
        while session.turn is not None:
            engine.step()
        if kind == "die":
            engine.die()
            engine.restart()
        else:
            engine.lose(session.lease.id)
            engine.run()
        await say(manager, session, "and now?")
        engine.run()
        assert engine.leases[session.lease.id] == list(session.conversation.log())
        assert manager.stats.turns_ended["failed"] == 0


async def test_a_refused_computation_leaves_the_lease_as_it_was() -> None:
    engine = ScriptedEngine(lambda _log: [*encode_text("x" * 20), TURN_END])
    manager, session, _ = await begun(engine, max_tokens=24)
    while session.turn is not None:
        engine.step()
    held = session.lease.num_tokens
    (request,) = engine.running
    engine.end(request, FinishReason.FAILED, "unavailable", "4096 requests wait already")
    assert (session.lease.ahead, session.lease.num_tokens) == (None, held)
    await say(manager, session, "and now?")
    assert engine.submits[-1].base_len == held
    engine.run()
    assert engine.leases[session.lease.id] == list(session.conversation.log())
