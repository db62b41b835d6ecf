"""Sessions that nobody uses give up their KV, leave the list, and are erased, each after its time."""

import asyncio

from chatd.errors import DamagedRecord
from chatd.protocol import SessionCreate, SessionList, SessionUpdate, UserMessage
from chatd.sessions.idle_policy import DAY_S
from chatd.sessions.manager import Owner, Session, SessionLimits, SessionManager
from chatd.testing.engine import FakeClock
from chatd.testing.journal import MemoryJournal
from chatd.testing.sessions import CoreEngine, RecordingSubscriber, encode_text, make_manager

ANN, EVE = Owner("acme", "ann"), Owner("zeta", "eve")


async def made(engine: CoreEngine, manager: SessionManager, owner: Owner = ANN) -> Session:
    session = await manager.create(owner, SessionCreate(title="t"))
    await manager.user_message(session, UserMessage(session=session.id, content="hello " * 9))
    turn = session.turn
    engine.run()
    await turn.ended.wait()
    return session


def held(engine: CoreEngine) -> int:
    return sum(len(lease.table.block_ids) for lease in engine.core.leases)


async def listed(manager: SessionManager, owner: Owner = ANN, *, archived: bool = False) -> list[str]:
    return [row.id for row in (await manager.list(owner, SessionList(archived=archived))).sessions]


def served(clock: FakeClock, **limits: object) -> tuple[CoreEngine, SessionManager, MemoryJournal]:
    engine, journal = CoreEngine(answer_ids=encode_text("abc ")), MemoryJournal()
    manager = make_manager(engine, limits=SessionLimits(**limits), clock=clock, journal=journal, max_tokens=8)
    return engine, manager, journal


async def test_kv_is_given_up_when_nobody_uses_it() -> None:
    clock = FakeClock(1000.0)
    engine, manager, _ = served(clock, idle_release_s=60)
    session = await made(engine, manager)
    clock.advance(59)
    await manager._idle.sweep()
    assert held(engine) > 0
    clock.advance(1)
    await manager._idle.sweep()
    assert held(engine) == 0
    assert await listed(manager) == [session.id]
    await manager.user_message(session, UserMessage(session=session.id, content="again"))
    engine.run()


async def test_sessions_that_are_used_or_looked_at_stay() -> None:
    clock = FakeClock(1000.0)
    engine, manager, _ = served(clock, idle_release_s=60, idle_archive_days=1, retention_days=2)
    session = await made(engine, manager)
    connection = RecordingSubscriber()
    manager.created(session, connection)
    manager.start(session, connection)
    clock.advance(9 * DAY_S)
    await manager._idle.sweep()
    assert held(engine) > 0
    assert await listed(manager) == [session.id]


async def test_sessions_are_archived_and_then_erased() -> None:
    clock = FakeClock(1000.0)
    engine, manager, journal = served(clock, idle_archive_days=1, retention_days=3, retention_days_of={"zeta": 9})
    mine, theirs, pinned = await made(engine, manager), await made(engine, manager, EVE), await made(engine, manager)
    await manager.update(pinned, SessionUpdate(session=pinned.id, pinned=True))
    clock.advance(DAY_S)
    await manager._idle.sweep()
    assert await listed(manager) == [pinned.id]
    assert await listed(manager, archived=True) == [mine.id]
    assert {record.id for record in await journal.sessions() if record.archived} == {mine.id, theirs.id}
    clock.advance(2 * DAY_S)
    sweeping = asyncio.create_task(manager._idle.sweep())
    while not sweeping.done():
        await asyncio.sleep(0)
        engine.flush()
    await sweeping
    assert {record.id for record in await journal.sessions()} == {theirs.id, pinned.id}
    assert await listed(manager, archived=True) == []


async def test_by_default_sessions_stay_as_they_are() -> None:
    clock = FakeClock(1000.0)
    engine, manager, _ = served(clock)
    session = await made(engine, manager)
    clock.advance(1000 * DAY_S)
    await manager._idle.sweep()
    assert await listed(manager) == [session.id]
    assert held(engine) > 0


async def test_a_damaged_session_keeps_no_other_from_being_put_away() -> None:
    clock = FakeClock(1000.0)
    engine, manager, journal = served(clock, retention_days=3)
    bad, broken = await made(engine, manager), await made(engine, manager)
    others = [await made(engine, manager) for _ in range(2)]
    read = journal.messages

    async def messages(session: str):
        if session == bad.id:
            raise DamagedRecord("a message is damaged")
        if session == broken.id:
            raise AssertionError("no sampling")
        return await read(session)

    journal.messages = messages
    for session in (bad, broken):
        manager._store.loader.unload(session)
    clock.advance(4 * DAY_S)
    sweeping = asyncio.create_task(manager._idle.sweep())
    while not sweeping.done():
        await asyncio.sleep(0)
        engine.flush()
    await sweeping
    # What is damaged cannot be read, and is erased all the same.
    assert await listed(manager) == [broken.id]
    assert [record.id for record in await journal.sessions()] == [broken.id]
    assert [await read(session.id) for session in (bad, *others)] == [[], [], []]
