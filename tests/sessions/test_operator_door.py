"""What an operator does with other people's sessions, over the fakes: what is owed, is on the disk, or is refused."""

import asyncio
from collections.abc import Sequence
from datetime import date

import pytest

from chatd.engine.messages import EraseTenant
from chatd.errors import NotFound, StorageError, Unavailable
from chatd.journal.records import CountUsage
from chatd.protocol import SessionErased
from chatd.sessions.operator_door import MAX_NAMES, TenantErased
from chatd.testing.restarts import RestartingDaemon

DAY = date(2026, 1, 1)


async def erased(daemon: RestartingDaemon, tenant: str = "acme", names: Sequence[bytes] = ()) -> TenantErased:
    async def find(_tenant: str) -> Sequence[bytes]:
        return names

    task = asyncio.create_task(daemon.manager.operator.erase_tenant(tenant, find))
    while not task.done():
        await daemon.settle()
    return await task


async def test_nothing_that_is_owed_of_a_tenant_is_written_after_it_is_gone() -> None:
    daemon = await RestartingDaemon().start()
    await daemon.open()
    recorder = daemon.manager._recorder
    recorder.owe([CountUsage("acme", "k", DAY, 5, 0, 1)])
    recorder.owe([CountUsage("beta", "k", DAY, 7, 0, 1)])
    assert (await erased(daemon)).sessions == 1
    await daemon.manager.settle()
    assert [count.tenant for count in daemon.journal.usage] == ["beta"]
    assert await daemon.journal.sessions() == []


async def test_a_tenants_blocks_on_the_disk_are_named_to_the_engine() -> None:
    daemon = await RestartingDaemon().start()
    names = [number.to_bytes(32, "big") for number in range(MAX_NAMES + 1)]
    gone = await erased(daemon, names=names)
    told = [message.digests for message in daemon.engine.sent if isinstance(message, EraseTenant)]
    assert told == [[], names[:MAX_NAMES], names[MAX_NAMES:]]
    assert gone.disk_blocks == MAX_NAMES + 1


async def test_who_is_attached_is_told_and_an_answer_in_progress_ends() -> None:
    daemon = await RestartingDaemon().start()
    session, listener = await daemon.open()
    await daemon.say(session, "one")
    daemon.engine.step()
    assert (await erased(daemon)).messages == 2
    assert isinstance(listener.events[-1], SessionErased)
    assert session.turn is None
    with pytest.raises(NotFound):
        await daemon.get(session)


async def test_what_cannot_be_erased_is_there_and_can_be_asked_for_again() -> None:
    daemon = await RestartingDaemon().start()
    session, listener = await daemon.open()
    await daemon.say(session, "one")
    await daemon.run()
    daemon.engine.ready = None
    with pytest.raises(Unavailable):
        await erased(daemon)
    daemon.engine.restart()
    daemon.journal.error = StorageError("no room")
    with pytest.raises(StorageError):
        await erased(daemon)
    assert not any(isinstance(event, SessionErased) for event in listener.events)
    assert not session.is_erasing
    daemon.journal.error = None
    await daemon.say(session, "two")
    await daemon.run()
    assert [item.content for item in daemon.manager.items(session)] == ["one", "hello", "two", "hello"]
    assert (await erased(daemon)).sessions == 1


async def test_another_tenants_sessions_stay() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    assert (await erased(daemon, "beta")).sessions == 0
    assert await daemon.get(session) is session
