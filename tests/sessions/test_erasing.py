"""An erased session is nowhere: not in a list, not in the pool or below it, not in the journal; forks keep theirs."""

import asyncio
from array import array
from pathlib import Path

import pytest

from chatd.errors import DamagedRecord, NotFound, PermissionDenied, StorageError, Unavailable
from chatd.journal.journal import Journal
from chatd.protocol import (
    MessageEdit,
    Params,
    ResponseContinue,
    SessionAttach,
    SessionCreate,
    SessionErased,
    SessionFork,
    SessionUpdate,
    UserMessage,
)
from chatd.sessions.erasing import logs_of
from chatd.sessions.manager import Owner, Session, SessionManager
from chatd.testing.journal import MemoryJournal
from chatd.testing.sessions import CoreEngine, RecordingSubscriber, encode_text, make_manager

ANN, BOB = Owner("acme", "ann"), Owner("acme", "bob")
CANARY = "canary-of-ann"


async def opened(manager: SessionManager, owner: Owner = ANN, **fields: object) -> tuple[Session, RecordingSubscriber]:
    session = await manager.create(owner, SessionCreate(params=Params(ignore_eos=True, max_tokens=20), **fields))
    connection = RecordingSubscriber(f"con_{session.id}")
    manager.created(session, connection)
    manager.start(session, connection)
    return session, connection


async def finished(engine: CoreEngine, work: object) -> object:
    """Return what comes of something that waits for the engine."""
    task = asyncio.ensure_future(work)
    for _ in range(200):
        await asyncio.sleep(0)
        engine.run()
        if task.done():
            break
        await asyncio.sleep(0.002)
    return await task


async def say(engine: CoreEngine, manager: SessionManager, session: Session, text: str) -> None:
    await manager.user_message(session, UserMessage(session=session.id, content=text))
    turn = session.turn
    engine.run()
    if turn is not None:
        await asyncio.wait_for(turn.ended.wait(), 10)


def cached(engine: CoreEngine, ids: list[int], tenant: str = "acme") -> int:
    table = engine.core.kv.open_table(tenant)
    return len(engine.core.kv.get_computed_blocks(table, array("i", ids), last_too=True))


def with_canary(folder: Path) -> list[Path]:
    """Return the files that have the canary in them."""
    return [path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


async def test_nothing_is_left_of_a_session_with_branches_and_logs_of_its_own() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    manager = make_manager(engine)
    session, connection = await opened(manager, system="s" * 20)
    for text in ("first " * 5, "second " * 5):
        await say(engine, manager, session, text)
    item = manager.items(session)[2].id
    await manager.edit(session, MessageEdit(session=session.id, item=item, content="another " * 5))
    engine.run()
    await manager.update(session, SessionUpdate(session=session.id, system="t" * 20))
    await say(engine, manager, session, "third " * 5)
    await manager.go_on(session, ResponseContinue(session=session.id))
    engine.run()
    logs = [list(log) for log in logs_of(session.conversation)]
    assert len(logs) >= 4
    assert all(cached(engine, log) > 0 for log in logs)
    await finished(engine, manager.erase(session, re="e", subscriber=connection))
    assert [cached(engine, log) for log in logs] == [0] * len(logs)
    assert engine.core.pool.num_active == engine.core.pool.num_cached == 0
    (erased,) = [event for event in connection.events if isinstance(event, SessionErased)]
    assert (erased.re, erased.receipt.messages, erased.receipt.shared_messages) == ("e", 9, 0)
    assert erased.receipt.blocks > 10
    with pytest.raises(NotFound):
        await manager.resolve(ANN, session.id)
    assert manager._store.by_lease == {}


async def test_a_fork_keeps_the_messages_and_blocks_that_it_shares() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    manager = make_manager(engine)
    session, connection = await opened(manager)
    for text in ("first " * 8, "second " * 8):
        await say(engine, manager, session, text)
    at = manager.items(session)[1].id
    fork, _ = await finished(engine, manager.fork(session, SessionFork(session=session.id, at=at)))
    texts = [item.content for item in manager.items(fork)]
    num_tokens = fork.conversation.num_tokens
    erased = await finished(engine, manager.erase(session, subscriber=connection))
    assert (erased.receipt.messages, erased.receipt.shared_messages) == (2, 2)
    assert [item.content for item in manager.items(fork)] == texts
    other = RecordingSubscriber("other")
    manager.attach(fork, other, SessionAttach(session=fork.id))
    manager.start(fork, other)
    await say(engine, manager, fork, "and now?")
    end = next(event for event in other.events if hasattr(event, "usage") and hasattr(event, "timings"))
    assert end.usage.cached_tokens >= num_tokens - 1


async def test_another_users_session_with_the_same_text_is_not_touched() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    manager = make_manager(engine)
    mine, _ = await opened(manager)
    theirs, _ = await opened(manager, BOB)
    for session in (mine, theirs):
        await say(engine, manager, session, "the same text " * 5)
    log = list(theirs.conversation.log())
    before = cached(engine, log)
    await finished(engine, manager.erase(mine))
    assert cached(engine, log) == before
    assert len(manager.items(theirs)) == 2


async def test_an_answer_in_progress_is_cancelled_and_what_waits_finds_nothing() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    manager = make_manager(engine, journal=MemoryJournal())
    session, connection = await opened(manager)
    await manager.user_message(session, UserMessage(session=session.id, content="hello"))
    engine.step()
    erasing = asyncio.create_task(manager.erase(session, subscriber=connection))
    await asyncio.sleep(0)
    late = asyncio.create_task(manager.user_message(session, UserMessage(session=session.id, content="too late")))
    await finished(engine, erasing)
    with pytest.raises(Exception) as refused:  # noqa: PT011
        await late
    assert refused.value.error_code in ("not_found", "session_busy")
    assert manager._store.by_lease == {}


async def test_an_observer_erases_nothing() -> None:
    engine = CoreEngine()
    manager = make_manager(engine)
    session, _ = await opened(manager)
    observer = RecordingSubscriber("o")
    manager.attach(session, observer, SessionAttach(session=session.id, role="observer"))
    manager.start(session, observer)
    with pytest.raises(PermissionDenied):
        await manager.erase(session, subscriber=observer)


async def test_what_cannot_be_erased_is_refused_and_can_be_asked_for_again() -> None:
    engine, journal = CoreEngine(answer_ids=encode_text("abc ")), MemoryJournal()
    manager = make_manager(engine, journal=journal)
    session, connection = await opened(manager)
    await say(engine, manager, session, "hello " * 9)
    journal.error = StorageError("no room")
    with pytest.raises(StorageError):
        await finished(engine, manager.erase(session, subscriber=connection))
    assert len(manager.items(await manager.resolve(ANN, session.id))) == 2
    journal.error = None
    engine.die()
    with pytest.raises(Unavailable):
        await manager.erase(session, subscriber=connection)
    engine.restart()
    await say(engine, manager, session, "still here " * 5)
    await finished(engine, manager.erase(session, subscriber=connection))
    assert await journal.sessions() == []
    assert engine.core.pool.num_cached == engine.core.pool.num_active == 0


async def test_no_file_has_a_word_of_it(tmp_path: Path) -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    journal = Journal.open(tmp_path / "journal")
    try:
        manager = make_manager(engine, journal=journal)
        mine, connection = await opened(manager, system=f"system {CANARY}", title=f"title {CANARY}")
        theirs, _ = await opened(manager, BOB)
        await say(engine, manager, mine, f"{CANARY} " * 5)
        await say(engine, manager, theirs, "nothing of that")
        erased = await finished(engine, manager.erase(mine, subscriber=connection))
        assert erased.receipt.messages == 2
        assert erased.receipt.journal_bytes > 5 * len(CANARY)
        assert with_canary(tmp_path) == []
        await manager.settle()
    finally:
        await journal.close()
    assert with_canary(tmp_path) == []
    again = Journal.open(tmp_path / "journal")
    try:
        assert [record.id for record in await again.sessions()] == [theirs.id]
    finally:
        await again.close()


async def test_a_failed_turn_leaves_nothing_computed_behind() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    manager = make_manager(engine)
    session, _ = await opened(manager)
    await manager.user_message(session, UserMessage(session=session.id, content="secret " * 12))
    answer = session.conversation.head
    ids = [*answer.prompt_ids]
    request = session.turn.request
    engine.step()
    engine.step()
    manager._runner.progress.fail_request(request, StorageError("no room"))
    engine.run()
    assert manager.items(session) == []
    assert cached(engine, ids) == 0
    assert engine.core.pool.num_active == 0


async def test_what_is_typed_while_a_session_is_erased_leaves_nothing_behind() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    journal = MemoryJournal()
    manager = make_manager(engine, journal=journal)
    session, connection = await opened(manager)
    await say(engine, manager, session, "tell me " * 12)
    log = list(session.conversation.log())
    assert cached(engine, log) > 0
    gate, erase = asyncio.Event(), journal.erase

    async def slow(name: str):
        await gate.wait()
        return await erase(name)

    journal.erase = slow
    erasing = asyncio.create_task(manager.erase(session))
    for _ in range(20):
        await asyncio.sleep(0)
        engine.run()
    assert cached(engine, log) == 0
    manager.prefill(session, "another long question of mine " * 4, connection)
    for _ in range(50):
        await asyncio.sleep(0.002)
        engine.run()
    gate.set()
    await finished(engine, erasing)
    engine.run()
    assert cached(engine, log) == 0
    assert not any(len(lease.table.block_ids) for lease in engine.core.leases)


async def test_a_damaged_session_can_be_erased() -> None:
    engine, journal = CoreEngine(answer_ids=encode_text("abc ")), MemoryJournal()
    first = make_manager(engine, journal=journal)
    session, _ = await opened(first)
    await say(engine, first, session, "one")

    async def messages(name: str):
        raise DamagedRecord("a message is damaged")

    journal.messages = messages
    manager = make_manager(engine, journal=journal, boot="boot_2")
    await manager.restore()
    with pytest.raises(DamagedRecord):
        await manager.resolve(ANN, session.id)
    with pytest.raises(NotFound):
        await manager.resolve(BOB, session.id, with_messages=False)
    again = await manager.resolve(ANN, session.id, with_messages=False)
    receipt = (await finished(engine, manager.erase(again))).receipt
    assert receipt.messages == 2
    assert await journal.sessions() == []


async def test_branches_of_one_log_are_erased_once() -> None:
    engine = CoreEngine(answer_ids=encode_text("abc "))
    manager = make_manager(engine)
    session, _ = await opened(manager)
    await say(engine, manager, session, "one")
    answer = session.conversation.head
    for text in ("a", "b", "c"):
        beside = UserMessage(session=session.id, content=text, parent=answer.id, respond=False)
        await manager.user_message(session, beside)
    assert len(list(logs_of(session.conversation))) == 1
