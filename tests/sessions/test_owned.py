"""What an owner's sessions have is known without a look at each of them, and is what a look would find."""

from __future__ import annotations

import pytest

from chatd.journal.records import SaveSession
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
    assert counts.resting_kept_bytes == sum(session.num_kept_bytes for session in resting)
    assert counts.num_bytes == sum(session.num_bytes for session in counts)


async def test_the_counts_are_right_wherever_messages_come_and_go() -> None:
    daemon = await RestartingDaemon().start()
    sessions: list[Session] = []
    for number in range(4):
        session, listener = await daemon.open(system="be brief" * (number + 1))
        sessions.append(session)
        await daemon.say(session, "what is a whale? " * 9)
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
    assert owned(daemon).resting_kept_bytes > 4 * 9 * 17
    assert_counted(daemon)
    again = await daemon.get(sessions[1])
    await daemon.say(again, "more")
    await daemon.run()
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
