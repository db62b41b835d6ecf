from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
from array import array
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from chatd.errors import ConfigError, StorageError
from chatd.journal import checkpoints
from chatd.journal.directory import JournalInUse
from chatd.journal.journal import Journal
from chatd.journal.records import (
    ANSWER_TTL_S,
    MAX_ANSWER_BYTES_PER_USER,
    MAX_ANSWERS_PER_USER,
    CountUsage,
    Erased,
    EraseSession,
    RemoveMessages,
    SaveAnswer,
    SaveMessage,
    SaveSession,
    ShareMessages,
    UsageRow,
)
from chatd.testing.journal_records import make_answer, make_session, make_user_message


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal.open(tmp_path / "journal")
    yield journal
    await journal.close()


async def reopened(journal: Journal) -> Journal:
    await journal.close()
    return Journal.open(journal.directory)


async def test_what_was_committed_is_there_after_reopening(journal: Journal) -> None:
    session = make_session("ses_1", title="Über Käse", head="msg_2")
    messages = [make_user_message("msg_1", "hello"), make_answer("msg_2", "msg_1", "hi", [5, 70000, 2**32 - 1])]
    await journal.commit([SaveSession(session), *(SaveMessage("ses_1", message) for message in messages)])
    journal = await reopened(journal)
    assert await journal.sessions() == [session]
    assert await journal.messages("ses_1") == messages
    assert await journal.in_flight() == []
    await journal.close()


async def test_no_use_opens_a_file_that_was_not_open_from_the_start(journal: Journal) -> None:
    process = psutil.Process()
    num_open = process.num_fds()
    await journal.commit([SaveSession(make_session("s")), SaveMessage("s", make_user_message("m", "hello"))])
    await journal.messages("s")
    await journal.search("acme", "ada", "hello", 5)
    checkpoints._checkpoint(journal._checkpointer._db)
    assert process.num_fds() == num_open


async def test_a_message_is_kept_as_it_was_when_it_was_committed(journal: Journal) -> None:
    answer = make_answer("msg_1", None, None, [])
    commit = asyncio.ensure_future(journal.commit([SaveSession(make_session("s")), SaveMessage("s", answer)]))
    await asyncio.sleep(0)
    answer.ids.extend([1, 2, 3])
    await commit
    assert (await journal.messages("s"))[0].ids == array("I")


async def test_tokens_in_flight_go_on_where_the_record_ends(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s")), SaveMessage("s", make_answer("m", None, None, [1, 2]))])
    journal.append_tokens("m", 2, [3, 4])
    journal.append_tokens("m", 4, [5])
    await journal.flush()
    assert await journal.in_flight() == [("s", "m")]
    assert (await journal.messages("s"))[0].ids.tolist() == [1, 2, 3, 4, 5]
    journal.append_tokens("m", 3, [40])
    await journal.flush()
    assert (await journal.messages("s"))[0].ids.tolist() == [1, 2, 3, 40]
    journal.append_tokens("m", 1, [20, 30])
    await journal.flush()
    assert (await journal.messages("s"))[0].ids.tolist() == [1, 20, 30]


async def test_tokens_are_written_without_being_waited_for(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s")), SaveMessage("s", make_answer("m", None, None, []))])
    journal.append_tokens("m", 0, [1, 2])
    while not (await journal.messages("s"))[0].ids:
        pass
    assert (await journal.messages("s"))[0].ids.tolist() == [1, 2]


async def test_tokens_from_before_the_end_do_not_come_back_after_it(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s")), SaveMessage("s", make_answer("m", None, None, []))])
    journal.append_tokens("m", 0, [1, 2, 3])
    end = asyncio.ensure_future(journal.commit([SaveMessage("s", make_answer("m", None, "ab", [1, 2]))]))
    await asyncio.sleep(0)
    journal.append_tokens("m", 2, [9])
    await end
    await journal.flush()
    assert (await journal.messages("s"))[0] == make_answer("m", None, "ab", [1, 2])
    await journal.commit([EraseSession("s"), SaveSession(make_session("s"))])
    journal.append_tokens("m", 0, [9])
    await journal.flush()
    assert await journal.messages("s") == []


async def test_tokens_with_others_missing_before_them_are_not_kept(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s")), SaveMessage("s", make_answer("m", None, None, []))])
    journal.append_tokens("m", 0, [1])
    journal.append_tokens("m", 2, [3])
    await journal.flush()
    assert (await journal.messages("s"))[0].ids.tolist() == [1]


async def test_a_wrong_commit_fails_alone_and_as_a_whole(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s"))])
    good = [SaveMessage("s", make_user_message("m1", "good"))]
    bad = [SaveMessage("s", make_user_message("m2", "bad")), SaveMessage("t", make_user_message("m3", "bad"))]
    also_good = [SaveMessage("s", make_user_message("m4", "also good", "m1"))]
    results = await asyncio.gather(*map(journal.commit, (good, bad, also_good)), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), StorageError, type(None)]
    assert [message.id for message in await journal.messages("s")] == ["m1", "m4"]


async def test_commits_that_wait_together_share_a_transaction(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s"))])
    before = journal.num_transactions
    await asyncio.gather(*(journal.commit([SaveMessage("s", make_user_message(f"m{i}", "x"))]) for i in range(100)))
    assert journal.num_transactions - before <= 3
    assert [message.id for message in await journal.messages("s")] == [f"m{i}" for i in range(100)]


async def test_forks_share_messages_until_the_last_one_lets_go(journal: Journal) -> None:
    first, second = make_user_message("m1", "shared"), make_user_message("m2", "own", "m1")
    await journal.commit(
        [
            SaveSession(make_session("s")),
            SaveMessage("s", first),
            SaveMessage("s", second),
            SaveSession(make_session("fork")),
            ShareMessages("fork", ("m1",)),
        ]
    )
    assert await journal.messages("fork") == [first]
    assert await journal.erase("s") == Erased(messages=1, shared_messages=1, tokens=0, num_bytes=3)
    assert await journal.messages("fork") == [first]
    await journal.commit([RemoveMessages("fork", ("m1",))])
    assert await journal.messages("fork") == []
    assert await journal.erase("fork") == Erased(messages=0, shared_messages=0, tokens=0, num_bytes=0)
    assert await journal.erase("fork") == Erased(messages=0, shared_messages=0, tokens=0, num_bytes=0)


async def test_an_erasure_counts_the_ids_that_are_gone(journal: Journal) -> None:
    await journal.commit(
        [
            SaveSession(make_session("s", title="abc")),
            SaveMessage("s", make_answer("m1", None, "ab", [7, 8], prompt_ids=[1, 2, 3])),
            SaveMessage("s", make_answer("m2", None, None, [7], prompt_ids=[1, 2, 3])),
        ]
    )
    journal.append_tokens("m2", 1, [9, 9])
    erased = await journal.erase("s")
    assert (erased.messages, erased.tokens) == (2, 5 + 6)


async def test_answers_to_commands_are_kept_for_a_day_and_so_many_of_a_user(journal: Journal) -> None:
    def answer(number: int, at: float, user: str = "ann") -> SaveAnswer:
        return SaveAnswer("acme", user, f"c{number}", b"\0" * 32, b'{"type":"x"}', at)

    await journal.commit([answer(i, 10.0 + i) for i in range(MAX_ANSWERS_PER_USER + 2)])
    await journal.commit([answer(0, 5.0, "bob")])
    kept = await journal.answers(0.0)
    assert kept[0] == answer(0, 5.0, "bob")
    assert kept[1:] == [answer(i, 10.0 + i) for i in range(2, MAX_ANSWERS_PER_USER + 2)]
    assert await journal.answers(10.0 + MAX_ANSWERS_PER_USER) == kept[-2:]
    await journal.commit([answer(1, 20.0 + ANSWER_TTL_S, "bob")])
    assert [a.command for a in await journal.answers(0.0) if a.user == "bob"] == ["c1"]


async def test_an_erasure_takes_the_answers_that_tell_of_the_session(journal: Journal) -> None:
    about = SaveAnswer("acme", "ann", "c1", b"", b'{"session":"s"}', 1.0)
    other = SaveAnswer("acme", "ann", "c2", b"", b'{"session":"st"}', 1.0)
    await journal.commit([SaveSession(make_session("s")), about, other])
    await journal.commit([EraseSession("s")])
    assert await journal.answers(0.0) == [other]


async def test_usage_adds_up_by_tenant_key_and_day(journal: Journal) -> None:
    days = date(2026, 1, 31), date(2026, 2, 1)
    await journal.commit([CountUsage("acme", "k1", days[0], 10, 4, 3), CountUsage("acme", "k1", days[0], 1, 0, 2)])
    await journal.commit([CountUsage("acme", "k1", days[1], 5, 5, 5, 3), CountUsage("other", "k2", days[1], 7, 0, 0)])
    first = UsageRow("acme", "k1", days[0], 2, 11, 4, 5)
    second = UsageRow("acme", "k1", days[1], 3, 5, 5, 5)
    foreign = UsageRow("other", "k2", days[1], 1, 7, 0, 0)
    assert await journal.usage() == [first, second, foreign]
    assert await journal.usage("acme") == [first, second]
    assert await journal.usage(first=days[1]) == [second, foreign]
    assert await journal.usage("acme", last=days[0]) == [first]


async def test_expired_sessions_go_but_not_pinned_ones_nor_those_that_answer(journal: Journal) -> None:
    day = 86400.0
    await journal.commit(
        [
            SaveSession(make_session("old", updated_at=1 * day)),
            SaveSession(make_session("pinned", updated_at=1 * day, pinned=True)),
            SaveSession(make_session("answers", updated_at=1 * day)),
            SaveMessage("answers", make_answer("m", None, None, [])),
            SaveSession(make_session("shown", updated_at=1 * day)),
            SaveSession(make_session("new", updated_at=8 * day)),
            SaveSession(make_session("other", tenant="other", updated_at=1 * day)),
        ]
    )
    assert await journal.expire(10 * day, {"acme": 3.0}, in_use={"shown"}) == ["old"]
    assert {session.id for session in await journal.sessions()} == {"pinned", "answers", "shown", "new", "other"}
    assert await journal.expire(10 * day, {"acme": 3.0}, 5.0) == ["shown", "other"]


async def test_a_second_daemon_is_told_who_has_the_directory(journal: Journal) -> None:
    with pytest.raises(JournalInUse, match=r"is in use by process \d+"):
        Journal.open(journal.directory)


async def test_a_closed_journal_keeps_nothing(journal: Journal) -> None:
    await journal.close()
    with pytest.raises(StorageError, match="the journal is closed"):
        await journal.commit([SaveSession(make_session("s"))])
    with pytest.raises(StorageError, match="the journal is closed"):
        await journal.sessions()
    journal.append_tokens("m", 0, [1])
    await journal.close()


async def test_commits_that_wait_at_the_close_are_durable(journal: Journal) -> None:
    commits = [asyncio.ensure_future(journal.commit([SaveSession(make_session(f"s{i}"))])) for i in range(20)]
    await asyncio.sleep(0)
    await journal.close()
    await asyncio.gather(*commits)
    journal = Journal.open(journal.directory)
    assert len(await journal.sessions()) == 20
    await journal.close()


async def test_what_a_cancelled_caller_committed_is_kept(journal: Journal) -> None:
    commit = asyncio.ensure_future(journal.commit([SaveSession(make_session("s"))]))
    await asyncio.sleep(0)
    commit.cancel()
    await journal.flush()
    assert [session.id for session in await journal.sessions()] == ["s"]


async def test_the_log_stays_short_while_commits_never_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOG_BYTES", 2**19)
    journal = Journal.open(tmp_path / "journal")
    log = journal.directory / "journal.db-wal"
    largest = 0
    for number in range(8):
        session = f"s{number}"
        commits = [journal.commit([SaveSession(make_session(session))])]
        commits += [
            journal.commit([SaveMessage(session, make_answer(f"{session}-{i}", None, "x", range(4000)))])
            for i in range(60)
        ]
        await asyncio.gather(*commits)
        largest = max(largest, log.stat().st_size)
    assert (journal.directory / "journal.db").stat().st_size > 8 * 60 * 2 * 4000
    assert largest < 4 * 2**20
    await journal.close()


async def test_a_copy_of_a_running_journal_is_a_journal(journal: Journal, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    backup.mkdir(mode=0o700)
    page = Path(__file__).parents[2] / "docs" / "operating.md"
    (code,) = re.findall(r"python3 -c '(.*)' \\\n", page.read_text())
    await journal.commit([SaveSession(make_session("s")), SaveMessage("s", make_answer("m", None, None, [1]))])
    await journal.commit([SaveMessage("s", make_user_message("m2", "to be found", "m"))])
    database, copy = str(journal.directory / "journal.db"), str(backup / "journal.db")
    command = [sys.executable, "-W", "ignore", "-c", code, database, copy]
    done = await asyncio.create_subprocess_exec(*command, umask=0o077)
    assert await done.wait() == 0
    restored = Journal.open(backup)
    assert await restored.sessions() == await journal.sessions()
    assert await restored.messages("s") == await journal.messages("s")
    assert await restored.search("acme", "ann", "found", 10) == ["s"]
    await restored.commit([SaveMessage("s", make_user_message("m3", "goes on", "m2"))])
    await restored.close()


async def test_only_the_owner_can_read_any_file(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s"))])
    await journal.sessions()
    modes = {file.name: file.stat().st_mode & 0o777 for file in journal.directory.iterdir()}
    names = ["crash", "journal.db", "journal.db-wal", "journal.db-shm", "lock", "memory-kills"]
    assert modes == dict.fromkeys(names, 0o600)
    assert journal.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["directory", "database", "log", "open to others", "a file"])
def test_a_directory_that_is_not_ones_own_alone_is_refused(tmp_path: Path, what: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "file").write_bytes(b"")
    directory = tmp_path / "journal"
    if what == "directory":
        directory.symlink_to(elsewhere)
    elif what == "a file":
        directory.write_text("")
    else:
        directory.mkdir(mode=0o755 if what == "open to others" else 0o700)
        if what != "open to others":
            (directory / ("journal.db" if what == "database" else "journal.db-wal")).symlink_to(elsewhere / "file")
    with pytest.raises(ConfigError):
        Journal.open(directory)
    assert (elsewhere / "file").read_bytes() == b""


def test_another_programs_database_is_left_as_it_is(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    directory.mkdir(mode=0o700)
    other = sqlite3.connect(directory / "journal.db")
    other.execute("CREATE TABLE t (x)")
    other.close()
    before = (directory / "journal.db").read_bytes()
    with pytest.raises(ConfigError, match="another program's database"):
        Journal.open(directory)
    assert (directory / "journal.db").read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    directory.mkdir(mode=0o700)
    (directory / "journal.db").write_text("not a database" * 100)
    with pytest.raises(ConfigError, match="cannot be opened: file is not a database"):
        Journal.open(directory)


async def test_a_users_kept_answers_are_bounded_in_bytes(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    for number in range(12):
        await journal.commit([SaveAnswer("acme", "ann", f"c{number}", b"", b"x" * 2**20, float(number))])
    await journal.commit([SaveAnswer("acme", "bob", "c", b"", b"x" * (MAX_ANSWER_BYTES_PER_USER + 1), 1.0)])
    kept = await journal.answers(0.0)
    assert [answer.command for answer in kept if answer.user == "ann"] == [f"c{n}" for n in (7, 8, 9, 10, 11)]
    assert len([answer for answer in kept if answer.user == "bob"]) == 1
    await journal.close()
