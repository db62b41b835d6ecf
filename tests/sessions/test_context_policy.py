"""A full context, and another system prompt: what is left out, what stays, and that the tree is as it was."""

import asyncio

import pytest

from chatd.engine.messages import FinishReason
from chatd.errors import Conflict, ContextLengthExceeded
from chatd.protocol import (
    BranchSelect,
    ItemAdded,
    Message,
    MessageEdit,
    Params,
    ResponseCreated,
    ResponseRegenerate,
    SessionAttach,
    SessionCreate,
    SessionFork,
    SessionTruncated,
    SessionUpdate,
    UserMessage,
)
from chatd.sessions.logs import common_prefix, log_between, log_of
from chatd.sessions.manager import Owner, Session, SessionManager
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
Engine = ScriptedEngine | CoreEngine
ANSWER = "a" * 20


def replying(_log: list[int]) -> list[int]:
    return [*encode_text(ANSWER), TURN_END]


async def opened(manager: SessionManager, **fields: object) -> tuple[Session, RecordingSubscriber]:
    session = await manager.create(ANN, SessionCreate(title="t", **fields))
    connection = RecordingSubscriber(f"con_{session.id}")
    manager.created(session, connection)
    manager.start(session, connection)
    return session, connection


async def say(engine: Engine, manager: SessionManager, session: Session, text: str, **fields: object) -> None:
    await manager.user_message(session, UserMessage(session=session.id, content=text, **fields))
    engine.run()


def spelled(system: str | None, *texts: str) -> list[int]:
    """Return the ids of a whole conversation up to where the next answer begins; answers and messages in turn."""
    ids = [] if system is None else [SYSTEM, *encode_text(system), TURN_END]
    for place, text in enumerate(texts):
        ids += [ASSISTANT if place % 2 else USER, *encode_text(text), TURN_END]
    return [*ids, ASSISTANT]


def last_log(engine: ScriptedEngine) -> list[int]:
    """Return what the engine has of the last submission's lease up to the answer."""
    submit = engine.submits[-1]
    return engine.leases[submit.lease]


async def test_a_full_context_is_refused_with_the_numbers_where_nothing_else_is_said() -> None:
    engine = ScriptedEngine(replying, context=200)
    manager = make_manager(engine, context=200)
    session, connection = await opened(manager, system="s" * 30)
    for _ in range(2):
        await say(engine, manager, session, "u" * 40)
    before = manager.items(session)
    with pytest.raises(ContextLengthExceeded) as refused:
        await say(engine, manager, session, "u" * 40)
    assert "the limit is 199" in refused.value.message
    assert manager.items(session) == before
    assert not any(isinstance(event, SessionTruncated) for event in connection.events)


@pytest.mark.parametrize("engine_type", [ScriptedEngine, CoreEngine])
async def test_the_oldest_turns_are_dropped_and_stay_in_the_conversation(engine_type: type) -> None:
    if engine_type is ScriptedEngine:
        engine: Engine = ScriptedEngine(replying, context=400)
    else:
        engine = CoreEngine(answer_ids=encode_text("xyz"), max_model_len=400)
    manager = make_manager(engine, context=400, max_tokens=21)
    session, connection = await opened(manager, system="s" * 30, context_policy="drop_oldest")
    assert manager.info(session).context_policy == "drop_oldest"
    for number in range(6):
        await say(engine, manager, session, f"{number}" * 40)
    events = [e for e in connection.events if isinstance(e, ItemAdded | SessionTruncated | ResponseCreated)]
    (place,) = [i for i, event in enumerate(events) if isinstance(event, SessionTruncated)]
    added, truncated, created = events[place - 1 : place + 2]
    assert isinstance(added, ItemAdded)
    items = manager.items(session)
    kept = [item.id for item in items].index(truncated.kept_from)
    assert items[kept].role == "user"
    assert truncated.dropped_items == kept > 0
    assert created.item.context_from == truncated.kept_from
    assert len(items) == 12, "nothing is gone from the conversation"
    answer = session.conversation.get(created.item.id)
    log = answer.num_tokens_before + len(answer.prompt_ids)
    assert log <= 200, "half of the context is free after turns were dropped"
    assert truncated.dropped_tokens > 0
    texts = [item.content for item in items[kept : items.index(manager.items(session)[-1])]]
    prompt = list(answer.prompt_ids)
    assert prompt[: len(spelled("s" * 30, texts[0])) - 1] == spelled("s" * 30, texts[0])[:-1]
    assert session.context_used == session.conversation.num_tokens < 400


async def test_the_next_turns_go_on_from_the_new_log() -> None:
    engine = ScriptedEngine(replying, context=400)
    manager = make_manager(engine, context=400)
    session, connection = await opened(manager, system="s" * 30, context_policy="drop_oldest")
    for number in range(5):
        await say(engine, manager, session, f"{number}" * 40)
    assert sum(isinstance(event, SessionTruncated) for event in connection.events) == 1
    head = session.conversation.head
    num_new = len(engine.submits[-1].new_ids)
    await say(engine, manager, session, "next")
    assert sum(isinstance(event, SessionTruncated) for event in connection.events) == 1
    assert len(engine.submits[-1].new_ids) < num_new
    kept = [item.content for item in manager.items(session)]
    first = next(i for i, item in enumerate(manager.items(session)) if item.id == head.log_start.context_from)
    assert last_log(engine) == [*spelled("s" * 30, *kept[first:-1]), *encode_text(ANSWER), TURN_END]
    assert list(log_of(session.conversation.head)) == last_log(engine)
    assert log_between(session.conversation.head, 7) == last_log(engine)[7:]


async def test_the_system_prompts_blocks_are_found_again() -> None:
    engine = CoreEngine(answer_ids=encode_text("xyz"), max_model_len=400)
    manager = make_manager(engine, context=400, max_tokens=21)
    session, connection = await opened(manager, system="s" * 62, context_policy="drop_oldest")
    for number in range(5):
        await say(engine, manager, session, f"{number}" * 40)
    truncated = next(i for i, e in enumerate(connection.events) if isinstance(e, SessionTruncated))
    ends = [e for e in connection.events[truncated:] if hasattr(e, "usage")]
    assert ends[0].usage.cached_tokens >= 64, "system, its header and its end are four blocks of 16"


async def test_a_snapshot_and_a_replay_say_from_where_the_context_is() -> None:
    engine = ScriptedEngine(replying, context=400)
    manager = make_manager(engine, context=400)
    session, _ = await opened(manager, context_policy="drop_oldest")
    for number in range(6):
        await say(engine, manager, session, f"{number}" * 40)
    late = RecordingSubscriber("late")
    attached = manager.attach(session, late, SessionAttach(session=session.id))
    starts = [item.context_from for item in attached.snapshot.items if item.context_from]
    again = RecordingSubscriber("again")
    manager.attach(session, again, SessionAttach(session=session.id, after_seq=0, boot="boot_1"))
    manager.start(session, again)
    told = [event.kept_from for event in again.events if isinstance(event, SessionTruncated)]
    assert told == starts != []


async def test_a_turn_that_can_never_fit_is_refused_all_the_same() -> None:
    engine = ScriptedEngine(replying, context=400)
    manager = make_manager(engine, context=400)
    session, _ = await opened(manager, context_policy="drop_oldest")
    await say(engine, manager, session, "hello")
    before = manager.items(session)
    with pytest.raises(ContextLengthExceeded):
        await say(engine, manager, session, "x" * 500)
    with pytest.raises(ContextLengthExceeded):
        await say(engine, manager, session, "x" * 8 * 500)
    assert manager.items(session) == before
    await say(engine, manager, session, "x" * 300)
    answer = session.conversation.head
    assert (answer.context_from, len(answer.prompt_ids)) == (answer.parent.id, 303)


async def test_room_is_what_was_asked_for_at_most_a_quarter() -> None:
    engine = ScriptedEngine(replying, context=400)
    manager = make_manager(engine, context=400)
    session, connection = await opened(manager, context_policy="drop_oldest")
    await say(engine, manager, session, "x" * 280)
    assert session.conversation.num_tokens == 304
    await say(engine, manager, session, "y" * 60, params=Params(max_tokens=10))
    assert not any(isinstance(event, SessionTruncated) for event in connection.events)
    await manager.regenerate(session, ResponseRegenerate(session=session.id, params=Params(max_tokens=40)))
    engine.run()
    assert any(isinstance(event, SessionTruncated) for event in connection.events)


async def test_a_history_that_was_brought_along_is_cut_before_it_is_counted() -> None:
    engine = ScriptedEngine(replying, context=400)
    manager = make_manager(engine, context=400)
    messages = tuple(Message(role="assistant" if i % 2 else "user", content=f"{i % 10}" * 400) for i in range(20))
    short = (Message(role="user", content="short"), Message(role="assistant", content="too"))
    session, connection = await opened(manager, messages=(*messages, *short), context_policy="drop_oldest")
    await say(engine, manager, session, "now")
    truncated = next(event for event in connection.events if isinstance(event, SessionTruncated))
    assert (truncated.dropped_items, truncated.dropped_tokens) == (20, None)
    assert last_log(engine)[: len(spelled(None, "short", "too", "now"))] == spelled(None, "short", "too", "now")


async def test_branches_before_a_cut_have_their_own_log_again() -> None:
    engine = CoreEngine(answer_ids=encode_text("xyz"), max_model_len=400)
    manager = make_manager(engine, context=400, max_tokens=21)
    session, _ = await opened(manager, system="s", context_policy="drop_oldest")
    for number in range(6):
        await say(engine, manager, session, f"{number}" * 40)
    items = manager.items(session)
    leaf = items[-1].id
    await manager.edit(session, MessageEdit(session=session.id, item=items[2].id, content="anew"))
    engine.run()
    assert session.conversation.head.log_start.context_from is None
    await manager.select_branch(session, BranchSelect(session=session.id, leaf=leaf))
    await say(engine, manager, session, "and on")
    assert session.conversation.head.log_start.context_from is not None


async def test_another_system_prompt_holds_from_the_next_answer_on() -> None:
    engine = ScriptedEngine(replying)
    manager = make_manager(engine)
    session, connection = await opened(manager, system="old")
    await say(engine, manager, session, "one")
    await manager.update(session, SessionUpdate(session=session.id, system="new"))
    assert manager.info(session).system == "new"
    await say(engine, manager, session, "two")
    whole = spelled("new", "one", ANSWER, "two")
    assert last_log(engine)[: len(whole)] == whole
    assert not any(isinstance(event, SessionTruncated) for event in connection.events), "nothing was dropped"
    num_new = len(engine.submits[-1].new_ids)
    await say(engine, manager, session, "three")
    assert len(engine.submits[-1].new_ids) < num_new, "from then on a turn costs what is new"
    await manager.update(session, SessionUpdate(session=session.id, system="new"))
    await say(engine, manager, session, "four")
    assert session.conversation.head.log_system == "", "the same prompt changes nothing"


async def test_another_system_prompt_is_computed_and_found_by_forks_and_branches() -> None:
    engine = CoreEngine(answer_ids=encode_text("xyz"))
    manager = make_manager(engine, max_tokens=21)
    session, _ = await opened(manager, system="s" * 100)
    for number in range(3):
        await say(engine, manager, session, f"{number}" * 40)
    leaf = manager.items(session)[-1].id
    await manager.update(session, SessionUpdate(session=session.id, system="s" * 50 + "t" * 50))
    await manager.regenerate(session, ResponseRegenerate(session=session.id))
    engine.run()
    await manager.select_branch(session, BranchSelect(session=session.id, leaf=leaf))
    await say(engine, manager, session, "on the other branch")
    command = SessionFork(session=session.id, at=leaf)
    forking = asyncio.create_task(manager.fork(session, command))
    await asyncio.sleep(0)
    engine.flush()
    fork, _ = await forking
    await say(engine, manager, fork, "in the fork")
    await say(engine, manager, session, "and once more")


async def test_the_system_prompt_does_not_change_while_an_answer_is_in_progress() -> None:
    engine = ScriptedEngine(replying)
    manager = make_manager(engine)
    session, _ = await opened(manager, system="old")
    await manager.user_message(session, UserMessage(session=session.id, content="one"))
    with pytest.raises(Conflict) as refused:
        await manager.update(session, SessionUpdate(session=session.id, system="new"))
    assert refused.value.error_code == "session_busy"
    engine.run()


async def test_a_failed_turn_leaves_the_context_as_it_was() -> None:
    engine = ScriptedEngine(replying, context=400)
    manager = make_manager(engine, context=400)
    session, _ = await opened(manager, context_policy="drop_oldest")
    for number in range(5):
        await say(engine, manager, session, f"{number}" * 40)
    items, used = manager.items(session), session.context_used
    await manager.user_message(session, UserMessage(session=session.id, content="5" * 40))
    assert session.conversation.head.context_from is not None
    engine.end(next(iter(engine.running)), FinishReason.FAILED, "engine_error", "no")
    assert (manager.items(session), session.context_used) == (items, used)
    await say(engine, manager, session, "6" * 40)
    assert session.conversation.head.context_from is not None


async def test_logs_that_begin_at_different_places_share_what_they_have_alike() -> None:
    engine = ScriptedEngine(replying)
    manager = make_manager(engine)
    session, _ = await opened(manager, system="same")
    await say(engine, manager, session, "one")
    old = session.conversation.head
    await manager.update(session, SessionUpdate(session=session.id, system="sane"))
    await say(engine, manager, session, "two")
    assert common_prefix(old, session.conversation.head) == 3
