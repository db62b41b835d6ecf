"""Forks, edits, regenerations and going back: nothing is overwritten, and what was computed is found again."""

import asyncio

import pytest

from chatd import protocol
from chatd.engine.messages import FinishReason, Fork, Submit
from chatd.errors import Conflict, InvalidRequest, PermissionDenied, RateLimited, Unavailable
from chatd.protocol import (
    BranchSelect,
    BranchSelected,
    Message,
    MessageEdit,
    Params,
    ResponseCreated,
    ResponseRegenerate,
    SessionAttach,
    SessionCreate,
    SessionFork,
    Siblings,
    UserMessage,
)
from chatd.sessions.manager import Owner, Session, SessionLimits, SessionManager
from chatd.testing.sessions import (
    ASSISTANT,
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


def counting(**options: int) -> ScriptedEngine:
    """An engine whose answers are "1", "2", …"""
    count = 0

    def reply(_log: list[int]) -> list[int]:
        nonlocal count
        count += 1
        return [*encode_text(str(count)), TURN_END]

    return ScriptedEngine(reply, **options)


async def opened(manager: SessionManager, owner: Owner = ANN, **fields: object) -> tuple[Session, RecordingSubscriber]:
    session = await manager.create(owner, SessionCreate(title="t", **fields))
    connection = RecordingSubscriber(f"con_{session.id}")
    manager.created(session, connection)
    manager.start(session, connection)
    return session, connection


async def say(engine: Engine, manager: SessionManager, session: Session, text: str) -> None:
    await manager.user_message(session, UserMessage(session=session.id, content=text))
    engine.run()


async def fork(
    engine: Engine, manager: SessionManager, session: Session, at: str | None = None, **fields: object
) -> tuple[Session, tuple[int, int]]:
    """Fork; return the session, and the tokens and blocks that are shared."""
    forking = asyncio.create_task(manager.fork(session, SessionFork(session=session.id, at=at, **fields)))
    await asyncio.sleep(0)
    engine._deliver() if isinstance(engine, CoreEngine) else engine.flush()
    made, forked = await forking
    return made, (forked.num_tokens, forked.num_blocks)


def texts(manager: SessionManager, session: Session) -> list[str]:
    return [item.content for item in manager.items(session)]


# Edits.


async def test_an_edited_message_is_a_sibling_with_an_answer_of_its_own() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, connection = await opened(manager)
    for text in ("hello", "more"):
        await say(engine, manager, session, text)
    before = manager.items(session)
    connection.take()
    command = MessageEdit(session=session.id, item=before[0].id, content="help!", id="e1")
    await manager.edit(session, command, connection)
    engine.run()
    added, created, *_ = connection.take()
    assert (added.re, added.item.content, added.item.parent) == ("e1", "help!", None)
    assert added.item.siblings == Siblings(index=2, count=2, previous=before[-1].id)
    assert created.item.parent == added.item.id
    assert texts(manager, session) == ["help!", "3"]
    # Nothing is overwritten: the old branch is there, and its items say where the new one is.
    await manager.select_branch(session, BranchSelect(session=session.id, leaf=added.item.siblings.previous))
    first, *rest = manager.items(session)
    assert first.siblings == Siblings(index=1, count=2, next=created.item.id)
    assert rest == before[1:]


async def test_an_edit_sends_only_what_differs() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, _ = await opened(manager, system="be brief")
    for text in ("hello", "more"):
        await say(engine, manager, session, text)
    first = engine.submits[0]
    await manager.edit(session, MessageEdit(session=session.id, item=manager.items(session)[0].id, content="help me"))
    engine.run()
    edited = engine.submits[-1]
    num_shared = len(first.new_ids) - len([*encode_text("lo"), TURN_END, ASSISTANT])
    assert (edited.lease, edited.base_len) == (first.lease, num_shared)
    assert edited.new_ids == [*encode_text("p me"), TURN_END, ASSISTANT]
    assert engine.leases[edited.lease] == list(session.conversation.log())


async def test_only_a_users_message_is_answered_when_it_is_edited() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, connection = await opened(manager)
    await say(engine, manager, session, "hello")
    answer = manager.items(session)[-1]
    with pytest.raises(InvalidRequest) as refused:
        await manager.edit(session, MessageEdit(session=session.id, item=answer.id, content="2"))
    assert refused.value.param == "respond"
    connection.take()
    await manager.edit(session, MessageEdit(session=session.id, item=answer.id, content="two", respond=False))
    (added,) = connection.take()
    assert (added.item.role, added.item.content, added.item.siblings.index) == ("assistant", "two", 2)
    assert len(engine.submits) == 1
    await say(engine, manager, session, "and?")
    assert texts(manager, session) == ["hello", "two", "and?", "2"]
    # The answer that was written is read as one.
    expected = [ASSISTANT, *encode_text("two"), TURN_END, USER, *encode_text("and?"), TURN_END, ASSISTANT]
    assert engine.leases[session.lease.id][-2 - len(expected) : -2] == expected


# Regenerations.


async def test_a_regenerated_answer_has_the_same_prompt_and_a_fresh_seed() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, connection = await opened(manager, params=Params(seed=3, max_tokens=5))
    await say(engine, manager, session, "hello")
    connection.take()
    await manager.regenerate(session, ResponseRegenerate(session=session.id, id="r1"), connection)
    engine.run()
    first, second = engine.submits
    created = connection.take()[0]
    assert isinstance(created, ResponseCreated)
    assert created.re == "r1"
    assert created.item.siblings == Siblings(index=2, count=2, previous=first_answer(session).id)
    assert (first.params.seed, second.params.seed, second.params.max_tokens) == (3, 7, 5)
    # All of the prompt but its last id is in the lease.
    assert (second.base_len, second.new_ids) == (len(first.new_ids) - 1, first.new_ids[-1:])
    assert texts(manager, session) == ["hello", "2"]
    await manager.regenerate(session, ResponseRegenerate(session=session.id, params=Params(seed=9)))
    engine.run()
    assert engine.submits[-1].params.seed == 9
    assert manager.items(session)[-1].siblings == Siblings(index=3, count=3, previous=created.item.id)


def first_answer(session: Session) -> protocol.Item:
    return next(node for node in session.conversation if node.role == "assistant")


async def test_an_earlier_answer_can_be_regenerated_and_a_message_without_one_answered() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, _ = await opened(manager)
    for text in ("hello", "more"):
        await say(engine, manager, session, text)
    items = manager.items(session)
    await manager.regenerate(session, ResponseRegenerate(session=session.id, item=items[1].id))
    engine.run()
    assert texts(manager, session) == ["hello", "3"]
    await manager.user_message(session, UserMessage(session=session.id, content="note", respond=False))
    await manager.regenerate(session, ResponseRegenerate(session=session.id))
    engine.run()
    assert texts(manager, session) == ["hello", "3", "note", "4"]
    await manager.regenerate(session, ResponseRegenerate(session=session.id, item=items[0].id))
    engine.run()
    assert texts(manager, session) == ["hello", "5"]
    assert manager.items(session)[-1].siblings.count == 3


async def test_what_cannot_be_answered_is_refused() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, connection = await opened(manager)
    with pytest.raises(InvalidRequest) as refused:
        await manager.regenerate(session, ResponseRegenerate(session=session.id))
    assert refused.value.param == "item"
    brought, _ = await opened(manager, messages=(Message(role="assistant", content="hi"),))
    with pytest.raises(InvalidRequest):
        await manager.regenerate(brought, ResponseRegenerate(session=brought.id))
    assert connection.events == []
    assert engine.submits == []


# Going back.


async def test_the_branch_that_is_selected_is_told_from_where_the_two_part() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, connection = await opened(manager)
    for text in ("a", "b", "c"):
        await say(engine, manager, session, text)
    old = manager.items(session)
    await manager.edit(session, MessageEdit(session=session.id, item=old[2].id, content="B"))
    engine.run()
    connection.take()
    await manager.select_branch(session, BranchSelect(session=session.id, leaf=old[-1].id, id="b1"), connection)
    selected, usage = connection.take()
    assert isinstance(selected, BranchSelected)
    assert (selected.re, selected.leaf, selected.parent) == ("b1", old[-1].id, old[1].id)
    assert [item.id for item in selected.items] == [item.id for item in old[2:]]
    assert selected.items[0].siblings.count == 2
    assert usage.context_used == session.conversation.num_tokens
    # To a message on the way: nothing follows it now, and the next message goes there.
    await manager.select_branch(session, BranchSelect(session=session.id, leaf=old[1].id))
    selected = connection.take()[0]
    assert (selected.leaf, selected.parent, selected.items) == (old[1].id, old[1].id, [])
    assert manager.info(session).num_items == 2


async def test_a_failed_edit_goes_back_to_the_branch_that_was_shown() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, connection = await opened(manager)
    for text in ("a", "b"):
        await say(engine, manager, session, text)
    before = manager.items(session)
    connection.take()
    await manager.edit(session, MessageEdit(session=session.id, item=before[2].id, content="B"))
    engine.step()
    engine.end(next(iter(engine.running), None) or session.turn.request, FinishReason.FAILED, "engine_error", "no")
    failed, selected = [
        event for event in connection.take() if isinstance(event, protocol.ResponseFailed | BranchSelected)
    ]
    assert failed.item_id not in [item.id for item in before]
    assert (selected.parent, selected.items) == (before[1].id, before[2:])
    assert manager.items(session) == before


async def test_going_back_finds_the_other_branch_in_the_cache() -> None:
    engine = CoreEngine()
    manager = make_manager(engine, max_tokens=40)
    session, connection = await opened(manager, system="be brief " * 4, params=Params(ignore_eos=True))
    await say(engine, manager, session, "hello there " * 3)
    await say(engine, manager, session, "the first way " * 4)
    old = manager.items(session)
    old_length = session.conversation.num_tokens
    await manager.edit(session, MessageEdit(session=session.id, item=old[2].id, content="the other way " * 6))
    engine.run()
    end = connection.take()[-2]
    common = session.conversation.get(old[1].id).num_tokens
    assert end.usage.cached_tokens >= common + len("the ")
    await manager.select_branch(session, BranchSelect(session=session.id, leaf=old[-1].id))
    await say(engine, manager, session, "go on")
    usage = connection.take()[-2].usage
    # All full blocks of the old branch, whose lease is the other branch's now.
    assert usage.cached_tokens >= old_length // 16 * 16 - 16
    assert engine.core.stats().num_failed_steps == 0


async def test_a_regeneration_computes_one_token_of_its_prompt() -> None:
    engine = CoreEngine()
    manager = make_manager(engine, max_tokens=20)
    session, connection = await opened(manager, system="be brief " * 4)
    await say(engine, manager, session, "hello there " * 3)
    first = connection.take()[-2].usage
    await manager.regenerate(session, ResponseRegenerate(session=session.id))
    engine.run()
    second = connection.take()[-2].usage
    assert (second.input_tokens, second.cached_tokens) == (first.input_tokens, first.input_tokens - 1)


# Forks.


@pytest.mark.parametrize("num_more", range(17))
async def test_a_fork_shares_all_blocks_and_says_how_many(num_more: int) -> None:
    engine = CoreEngine()
    manager = make_manager(engine, max_tokens=8)
    session, _ = await opened(manager, system="s" * (40 + num_more))
    await say(engine, manager, session, "hello")
    num_tokens = session.conversation.num_tokens
    blocks = {lease.lease_id: list(lease.table.block_ids) for lease in engine.core.leases}[session.lease.id]
    made, (shared_tokens, shared_blocks) = await fork(engine, manager, session)
    # The last token of an answer may have no KV yet.
    assert num_tokens - 1 <= shared_tokens <= num_tokens
    lease = engine.core.leases.get(made.lease.id)
    assert lease.table.block_ids == blocks
    assert shared_blocks == len(blocks) == -(-shared_tokens // 16)
    assert engine.core.pool.num_shared == len(blocks)
    assert manager.info(made).tier == "device"
    # Each goes on by itself; of what they share, at most one block is copied.
    connection = RecordingSubscriber("other")
    manager.created(made, connection)
    manager.start(made, connection)
    connection.take()
    await say(engine, manager, made, "that way")
    assert connection.take()[-2].usage.cached_tokens == shared_tokens
    copied = sum(a != b for a, b in zip(blocks, lease.table.block_ids, strict=False))
    assert copied == (1 if shared_tokens % 16 else 0)
    await say(engine, manager, session, "this way")
    assert texts(manager, session)[:2] == texts(manager, made)[:2]
    assert engine.core.stats().num_failed_steps == 0


async def test_a_fork_brings_the_messages_up_to_at_and_what_the_session_is() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, _ = await opened(manager, system="be brief", params=Params(temperature=0.5), metadata={"app": "x"})
    for text in ("a", "b"):
        await say(engine, manager, session, text)
    items = manager.items(session)
    made, shared = await fork(engine, manager, session, items[1].id)
    connection = RecordingSubscriber("new")
    created = manager.created(made, connection)
    manager.start(made, connection)
    assert shared == (session.conversation.get(items[1].id).num_tokens, 1)
    assert created.head_seq == 0
    assert [event.item for event in connection.take()] == items[:2]
    info = manager.info(made)
    assert (info.title, info.system, info.params, info.metadata) == (
        "t",
        "be brief",
        Params(temperature=0.5),
        {"app": "x"},
    )
    named, _ = await fork(engine, manager, session, title="other")
    assert (named.title, texts(manager, named)) == ("other", texts(manager, session))
    # A message without an answer shares what goes before it.
    early, shared = await fork(engine, manager, session, items[2].id)
    assert shared == (session.conversation.get(items[1].id).num_tokens, 1)
    assert texts(manager, early) == ["a", "1", "b"]


async def test_a_fork_outlives_the_session_that_it_came_from() -> None:
    engine = CoreEngine()
    manager = make_manager(engine, limits=SessionLimits(max_closed_sessions_per_user=0))
    session, _ = await opened(manager)
    await say(engine, manager, session, "hello")
    kept = manager.items(session)
    made, (shared, _) = await fork(engine, manager, session)
    num_bytes = session.num_bytes
    await manager.close(session)
    assert made.num_bytes == num_bytes
    assert manager.items(made) == kept
    await say(engine, manager, made, "go on")
    assert manager.items(made)[-1].usage.cached_tokens == shared
    await manager.close(made)
    engine.run()
    assert engine.core.pool.num_active == 0
    assert list(manager._store.by_lease) == []


async def test_only_what_has_ended_is_shared() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, _ = await opened(manager)
    await say(engine, manager, session, "a")
    await manager.user_message(session, UserMessage(session=session.id, content="b"))
    *finished, answer = manager.items(session)
    for at in (None, answer.id):
        with pytest.raises(Conflict) as refused:
            await manager.fork(session, SessionFork(session=session.id, at=at))
        assert (refused.value.error_code, refused.value.param) == ("session_busy", "at")
    made, shared = await fork(engine, manager, session, finished[-1].id)
    assert texts(manager, made) == ["a", "1", "b"]
    assert shared[0] == session.conversation.get(finished[1].id).num_tokens
    engine.run()
    assert texts(manager, session) == ["a", "1", "b", "2"]
    assert len([message for message in engine.sent if isinstance(message, Fork)]) == 1


async def test_a_fork_without_kv_shares_text_only() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, _ = await opened(manager)
    empty, shared = await fork(engine, manager, session)
    assert (texts(manager, empty), shared) == ([], (0, 0))
    await say(engine, manager, session, "a")
    engine.lose(session.lease.id)
    lost, shared = await fork(engine, manager, session)
    assert shared == (0, 0)
    await say(engine, manager, lost, "b")
    assert texts(manager, lost) == ["a", "1", "b", "2"]
    engine.die()
    dead, shared = await fork(engine, manager, session)
    assert (texts(manager, dead), shared, manager.info(dead).tier) == (["a", "1"], (0, 0), "tokens")
    engine.restart()
    await say(engine, manager, dead, "c")
    assert [submit.base_len for submit in engine.submits[-1:]] == [0]


async def test_an_engine_that_dies_while_it_forks_leaves_the_text() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, _ = await opened(manager)
    await say(engine, manager, session, "a")
    forking = asyncio.create_task(manager.fork(session, SessionFork(session=session.id)))
    await asyncio.sleep(0)
    engine.die()
    made, forked = await forking
    assert (forked.num_tokens, texts(manager, made)) == (0, ["a", "1"])
    engine.restart()
    await say(engine, manager, made, "b")
    assert texts(manager, made) == ["a", "1", "b", "2"]


# What is refused, before anything changes.


async def test_the_bounds_hold_before_anything_changes() -> None:
    engine = counting(context=2**15)
    manager = make_manager(
        engine,
        context=2**15,
        limits=SessionLimits(max_sessions_per_user=2, max_session_bytes=100_000, max_text_bytes_per_user=200_000),
    )
    session, _ = await opened(manager)
    await say(engine, manager, session, "x" * 15_000)
    items, seq = manager.items(session), session.ring.head_seq
    held = session.conversation.num_bytes
    session.conversation._size(97_000 - held)  # As with other branches.
    edit = MessageEdit(session=session.id, item=items[0].id, content="y" * 4_000)
    with pytest.raises(InvalidRequest) as refused:
        await manager.edit(session, edit)
    assert refused.value.error_code == "session_too_large"
    session.conversation._size(100_001 - 97_000)
    with pytest.raises(InvalidRequest) as refused:
        await manager.regenerate(session, ResponseRegenerate(session=session.id))
    assert refused.value.error_code == "session_too_large"
    with pytest.raises(RateLimited) as limited:
        await opened(manager, system="z" * 100_000)
    assert limited.value.error_code == "too_much_text"
    session.conversation._size(held - 100_001)
    await fork(engine, manager, session)
    with pytest.raises(RateLimited) as limited:
        await manager.fork(session, SessionFork(session=session.id))
    assert limited.value.error_code == "too_many_sessions"
    assert (manager.items(session), session.ring.head_seq) == (items, seq)
    assert len(engine.submits) == 1


async def test_shared_text_counts_for_each_session_that_has_it() -> None:
    engine = counting(context=2**15)
    manager = make_manager(engine, context=2**15, limits=SessionLimits(max_text_bytes_per_user=120_000))
    session, _ = await opened(manager)
    await say(engine, manager, session, "x" * 10_000)
    await fork(engine, manager, session)
    with pytest.raises(RateLimited) as limited:
        await manager.fork(session, SessionFork(session=session.id))
    assert limited.value.error_code == "too_much_text"


async def test_a_busy_session_and_an_observer_are_refused() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, writer = await opened(manager)
    await say(engine, manager, session, "a")
    first = manager.items(session)[0].id
    observer = RecordingSubscriber("observer")
    manager.attach(session, observer, SessionAttach(session=session.id, role="observer"))
    verbs = [
        (manager.edit, MessageEdit(session=session.id, item=first, content="b")),
        (manager.regenerate, ResponseRegenerate(session=session.id)),
        (manager.select_branch, BranchSelect(session=session.id, leaf=first)),
    ]
    for verb, command in [*verbs, (manager.fork, SessionFork(session=session.id))]:
        with pytest.raises(PermissionDenied):
            await verb(session, command, observer)
    await manager.user_message(session, UserMessage(session=session.id, content="b"))
    for verb, command in verbs:
        with pytest.raises(Conflict) as refused:
            await verb(session, command, writer)
        assert refused.value.error_code == "session_busy"
    engine.run()
    for verb, command in (
        (manager.edit, MessageEdit(session=session.id, item="nope", content="b")),
        (manager.regenerate, ResponseRegenerate(session=session.id, item="nope")),
        (manager.select_branch, BranchSelect(session=session.id, leaf="nope")),
        (manager.fork, SessionFork(session=session.id, at="nope")),
    ):
        with pytest.raises(InvalidRequest) as unknown:
            await verb(session, command, writer)
        assert unknown.value.param in ("item", "leaf", "at")
    engine.die()
    for verb, command in verbs[:2]:
        with pytest.raises(Unavailable):
            await verb(session, command, writer)
    assert texts(manager, session) == ["a", "1", "b", "2"]


async def test_a_closed_session_is_opened_by_an_edit_and_stays_closed_by_a_selection() -> None:
    engine = counting()
    manager = make_manager(engine)
    session, _ = await opened(manager)
    await say(engine, manager, session, "a")
    first = manager.items(session)[0].id
    await manager.close(session)
    await manager.select_branch(session, BranchSelect(session=session.id, leaf=first))
    assert session.closed
    await manager.edit(session, MessageEdit(session=session.id, item=first, content="b"))
    engine.run()
    assert not session.closed
    assert isinstance(engine.submits[-1], Submit)
    assert engine.submits[-1].base_len == 0
