"""What an owner's sessions have is known without a look at each of them, and is what a look would find."""

from __future__ import annotations

import pytest

from chatd.journal.records import SaveSession
from chatd.protocol import SessionCreate, SessionList, SessionUpdate
from chatd.sessions.owned import OwnedSessions
from chatd.sessions.session import Session
from chatd.testing.journal_records import make_session
from chatd.testing.restarts import ANN, RestartingDaemon


def owned(daemon: RestartingDaemon) -> OwnedSessions:
    return daemon.manager._store._by_owner[ANN]


def assert_counted(daemon: RestartingDaemon) -> None:
    """Compare the counts with the sessions."""
    counts = owned(daemon)
    resting = [session for session in counts if not session.is_loaded]
    assert set(counts.in_memory) == {session.id for session in counts if session.is_loaded}
    assert counts.resting_bytes == sum(session.num_bytes for session in resting)
    assert counts.num_kept_bytes == sum(session.num_kept_bytes for session in counts)
    assert counts.num_bytes == sum(session.num_bytes for session in counts)
    still_open = [session for session in counts if not session.closed]
    assert (counts.num_open, counts.num_closed) == (len(still_open), len(counts) - len(still_open))
    assert counts.num_archived_open == sum(session.archived for session in still_open)
    for archived in (False, True):
        listed = [session for session in counts if session.archived == archived]
        listed.sort(key=lambda session: (session.updated_at, session.id), reverse=True)
        assert [session for _place, session in counts.last_used(archived=archived)] == listed


async def test_the_counts_are_right_wherever_messages_come_and_go() -> None:
    daemon = await RestartingDaemon().start()
    sessions: list[Session] = []
    for number in range(4):
        session, listener = await daemon.open(system="be brief" * (number + 1))
        sessions.append(session)
        await daemon.say(session, "what is a whale? " * 9)
        assert_counted(daemon)
        await daemon.run()
        daemon.manager.detach_all(listener)
        assert_counted(daemon)
    for session in sessions[:3]:
        daemon.manager._store.loader.unload(session)
        assert_counted(daemon)
    assert len(owned(daemon).in_memory) == 1
    await daemon.get(sessions[0])
    assert_counted(daemon)
    await daemon.start()
    assert not owned(daemon).in_memory
    assert owned(daemon).num_kept_bytes > 4 * 9 * 17
    assert_counted(daemon)
    again = await daemon.get(sessions[1])
    await daemon.say(again, "more")
    assert_counted(daemon)
    await daemon.run()
    assert_counted(daemon)
    await daemon.manager.update(again, SessionUpdate(session=again.id, archived=True, system=None))
    assert_counted(daemon)
    await daemon.manager.close(again)
    assert_counted(daemon)
    await daemon.say(again, "and more")
    await daemon.run()
    assert not again.closed
    assert_counted(daemon)
    daemon.manager._store.drop(again)
    assert_counted(daemon)
    assert again.id not in owned(daemon).by_name


async def test_a_message_looks_at_no_session_that_is_left_to_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = await RestartingDaemon().start()
    await daemon.journal.commit([SaveSession(make_session(f"s{number}", user="ann")) for number in range(100)])
    await daemon.start()
    session, _ = await daemon.open()
    looked: list[str] = []
    counted = Session.num_kept_bytes.fget
    monkeypatch.setattr(
        Session, "num_kept_bytes", property(lambda session: looked.append(session.id) or counted(session))
    )
    await daemon.say(session, "hello")
    assert set(looked) == {session.id}


async def test_a_conversation_that_gets_longer_or_shorter_is_counted_whoever_makes_it_so() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    added = session.conversation.add_message("msg_1", "user", "x" * 1000, None)
    assert_counted(daemon)
    session.conversation.remove_from(added, None)
    assert_counted(daemon)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the sessions that are looked at, from now on."""
    seen: list[str] = []
    for name in ("num_bytes", "num_kept_bytes", "updated_at", "closed"):
        read = getattr(Session, name)

        def look(session: Session, read: property = read) -> object:
            seen.append(session.id)
            return read.fget(session)

        monkeypatch.setattr(Session, name, property(look, read.fset))
    return seen


async def test_opening_a_session_looks_at_no_other_one(looked: list[str]) -> None:
    daemon = await RestartingDaemon().start()
    for _ in range(20):
        await daemon.manager.create(ANN, SessionCreate())
    looked.clear()
    session = await daemon.manager.create(ANN, SessionCreate())
    assert set(looked) == {session.id}


async def test_a_page_of_a_list_looks_at_what_is_on_it(looked: list[str]) -> None:
    daemon = await RestartingDaemon().start()
    sessions = [await daemon.manager.create(ANN, SessionCreate()) for _ in range(20)]
    for number, session in enumerate(sessions):
        session.updated_at = float(number)
    looked.clear()
    first = await daemon.manager.list(ANN, SessionList(limit=3))
    second = await daemon.manager.list(ANN, SessionList(limit=3, cursor=first.next_cursor))
    newest_first = [session.id for session in reversed(sessions)]
    assert [row.id for row in first.sessions + second.sessions] == newest_first[:6]
    assert set(looked) == set(newest_first[:6])


async def test_a_session_that_is_used_while_a_list_goes_on_is_not_in_it_twice() -> None:
    daemon = await RestartingDaemon().start()
    sessions = [await daemon.manager.create(ANN, SessionCreate()) for _ in range(3)]
    for number, session in enumerate(sessions):
        session.updated_at = float(number)
    walk = owned(daemon).last_used(archived=False)
    assert next(walk) == ((2.0, sessions[2].id), sessions[2])
    sessions[2].updated_at = 0.5
    sessions[0].archived = True
    daemon.manager._store.drop(sessions[1])
    assert list(walk) == []
    assert [place for place, _session in owned(daemon).last_used(archived=False)] == [(0.5, sessions[2].id)]
