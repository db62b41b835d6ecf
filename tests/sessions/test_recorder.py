"""What is owed of one session keeps nobody else's changes from the journal, whatever is wrong with it."""

import asyncio
from datetime import date

import msgspec
import pytest

from chatd.errors import StorageError
from chatd.journal.records import CountUsage, SaveMessage
from chatd.sessions.manager import Session
from chatd.sessions.recorder import MAX_FAILED, session_of
from chatd.testing.restarts import RestartingDaemon


async def with_bad_sessions(number: int = 1) -> tuple[RestartingDaemon, list[Session], Session]:
    """Return a daemon that owes changes of sessions which the journal never takes again, and a good session."""
    daemon = await RestartingDaemon().start()
    bad = [(await daemon.open())[0] for _ in range(number)]
    good, _ = await daemon.open()
    for session in bad:
        await daemon.say(session, "one")
    names = {session.id for session in bad}

    def refuse(changes) -> None:
        if any(session_of(change) in names for change in changes):
            raise StorageError("the page is malformed")

    daemon.journal.before_commit = refuse
    await daemon.run()
    assert all(session.turn is None for session in bad)
    assert daemon.manager._recorder.num_owed
    return daemon, bad, good


@pytest.mark.parametrize("number", [1, MAX_FAILED + 2])
async def test_others_go_on_where_a_sessions_changes_are_never_taken(number: int) -> None:
    daemon, (bad, *_), good = await with_bad_sessions(number)
    await daemon.say(good, "two")
    await daemon.run()
    assert [item.content for item in daemon.manager.items(good)] == ["two", "hello"]
    assert [m.content for m in await daemon.journal.messages(good.id)] == ["two", "hello"]
    with pytest.raises(StorageError):
        await daemon.say(bad, "again")
    assert bad.turn is None
    assert (daemon.manager._recorder.owes(good), daemon.manager._recorder.owes(bad)) == (False, True)
    # What was owed is not lost: it is taken as soon as it can be.
    daemon.journal.before_commit = None
    await daemon.manager.settle()
    assert daemon.manager._recorder.num_owed == 0
    assert await daemon.journal.in_flight() == []


async def test_what_is_owed_of_a_good_session_does_not_wait_behind_bad_ones() -> None:
    daemon, _, good = await with_bad_sessions(MAX_FAILED + 2)
    usage = CountUsage("acme", "k", date(2026, 1, 1), 1, 0, 1)
    daemon.manager._recorder.owe([usage])
    for _ in range(3):
        await daemon.manager._recorder.commit(())
    assert daemon.journal.usage == [usage]
    assert good.turn is None


async def test_usage_that_is_owed_takes_no_more_the_longer_the_disk_is_full() -> None:
    daemon, _, good = await with_bad_sessions()
    recorder, others = daemon.manager._recorder, daemon.manager._recorder.num_owed
    daemon.journal.before_commit, daemon.journal.error = None, StorageError("no room")
    days = date(2026, 1, 1), date(2026, 1, 2)
    for number in range(60):
        recorder.owe([CountUsage("acme", f"k{number % 2}", days[number % 3 == 0], 10, 3, 1)])
        if number % 7 == 0:
            with pytest.raises(StorageError):
                await recorder.commit(())
    assert recorder.num_owed == others + 4
    daemon.journal.error = None
    await recorder.commit(())
    assert recorder.num_owed == 0
    counted = {(c.key_id, c.day): (c.requests, c.input_tokens, c.cached_tokens, c.output_tokens) for c in usage(daemon)}
    assert counted == {
        (key, day): (number, 10 * number, 3 * number, number)
        for key in ("k0", "k1")
        for day, number in ((days[0], 20), (days[1], 10))
    }
    assert good.turn is None


def usage(daemon: RestartingDaemon) -> list[CountUsage]:
    return [count for count in daemon.journal.usage if count.key_id in ("k0", "k1")]


async def test_a_session_whose_changes_are_never_taken_can_be_erased() -> None:
    daemon, (bad,), good = await with_bad_sessions()
    erasing = asyncio.create_task(daemon.manager.erase(bad))
    while not erasing.done():
        await daemon.settle()
    await erasing
    assert daemon.manager._recorder.num_owed == 0
    assert {record.id for record in await daemon.journal.sessions()} == {good.id}


async def test_a_full_disk_loses_nothing_that_is_owed_and_keeps_its_order() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    await daemon.say(session, "one", respond=False)
    message = (await daemon.journal.messages(session.id))[0]
    recorder = daemon.manager._recorder
    daemon.journal.error = StorageError("no room")
    for number in range(3):
        text = f"version {number}"
        recorder.owe([SaveMessage(session.id, msgspec.structs.replace(message, content=text))])
        with pytest.raises(StorageError):
            await recorder.commit(())
    daemon.journal.error = None
    await recorder.commit(())
    assert [m.content for m in await daemon.journal.messages(session.id)] == ["version 2"]
