"""What is left of a journal whose files were cut or changed: all of it, all but the last commit, or an error."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from chatd.errors import DamagedRecord
from chatd.journal.directory import DATABASE
from chatd.journal.journal import Journal
from chatd.journal.reader import JournalReader, connect_to_read
from chatd.journal.records import MessageRecord, SaveAnswer, SaveMessage, SaveSession, SessionRecord
from chatd.journal.storage_errors import DATABASE_ERRORS
from chatd.testing.journal_records import make_answer, make_session, make_user_message

LOG = f"{DATABASE}-wal"


class State(NamedTuple):
    """Everything in a journal."""

    sessions: list[SessionRecord]
    messages: dict[str, list[MessageRecord]]
    in_flight: list[tuple[str, str]]
    answers: list[SaveAnswer]


class Copies(NamedTuple):
    """A journal's files before and after its last commit, and what was in it then."""

    database: bytes
    log_before: bytes
    log_after: bytes
    before: State
    after: State


def read_state(reader: JournalReader) -> State:
    sessions = reader.sessions()
    messages = {session.id: reader.messages(session.id) for session in sessions}
    return State(sessions, messages, reader.in_flight(), reader.answers(0.0))


def state_of(directory: Path) -> State:
    reader = JournalReader(connect_to_read(directory / DATABASE))
    try:
        return read_state(reader)
    finally:
        reader.close()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    async def make(directory: Path) -> Copies:
        journal = Journal.open(directory)
        answer = SaveAnswer("acme", "ann", "c1", b"\1" * 32, b'{"type":"item.added"}', 1.0)
        await journal.commit([SaveSession(make_session("s", title="a title")), answer])
        await journal.commit([SaveMessage("s", make_user_message("m1", "hello there"))])
        await journal.commit([SaveMessage("s", make_answer("m2", "m1", None, []))])
        journal.append_tokens("m2", 0, [5, 6, 7])
        await journal.flush()
        log_before, before = (directory / LOG).read_bytes(), state_of(directory)
        await journal.commit([SaveMessage("s", make_answer("m2", "m1", "general", [5, 6, 7, 8]))])
        copies = Copies(
            (directory / DATABASE).read_bytes(), log_before, (directory / LOG).read_bytes(), before, state_of(directory)
        )
        await journal.close()
        return copies

    # Small pages make a short log, each byte of which can be tried.
    directory = tmp_path_factory.mktemp("damage") / "journal"
    directory.mkdir(mode=0o700)
    with_small_pages = sqlite3.connect(directory / DATABASE, isolation_level=None)
    with_small_pages.execute("PRAGMA page_size = 512")
    with_small_pages.execute("PRAGMA journal_mode = WAL")
    with_small_pages.close()
    return asyncio.run(make(directory))


@pytest.fixture
def restore(tmp_path: Path) -> Iterator[Callable[[bytes, bytes], State]]:
    """Return a function that reads the state from a database and a log."""

    def read(database: bytes, log: bytes) -> State:
        for name, data in ((DATABASE, database), (LOG, log)):
            (tmp_path / name).write_bytes(data)
        (tmp_path / f"{DATABASE}-shm").unlink(missing_ok=True)
        return state_of(tmp_path)

    return read


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.night)])
def test_a_log_cut_at_any_byte_of_the_last_commit_loses_that_one_only(
    copies: Copies, restore: Callable[[bytes, bytes], State], stride: int
) -> None:
    assert copies.log_after.startswith(copies.log_before)
    assert len(copies.log_after) - len(copies.log_before) < 16000
    assert restore(copies.database, copies.log_after) == copies.after
    for cut in (*range(len(copies.log_before), len(copies.log_after), stride), len(copies.log_after) - 1):
        assert restore(copies.database, copies.log_after[:cut]) == copies.before, cut


def test_a_flipped_bit_in_the_last_commits_log_is_detected(
    copies: Copies, restore: Callable[[bytes, bytes], State]
) -> None:
    rng = random.Random(1)
    for index in range(len(copies.log_before), len(copies.log_after), 7):
        log = bytearray(copies.log_after)
        log[index] ^= 1 << rng.randrange(8)
        assert restore(copies.database, bytes(log)) == copies.before, index


def test_a_journal_goes_on_after_its_log_was_cut(copies: Copies, tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "journal"
        directory.mkdir(mode=0o700)
        (directory / DATABASE).write_bytes(copies.database)
        (directory / LOG).write_bytes(copies.log_after[:-100])
        journal = Journal.open(directory)
        assert await journal.messages("s") == copies.before.messages["s"]
        journal.append_tokens("m2", 3, [80])
        await journal.flush()
        assert (await journal.messages("s"))[1].ids.tolist() == [5, 6, 7, 80]
        await journal.close()

    asyncio.run(run())


def _database_of(directory: Path) -> tuple[bytes, State]:
    """Return a journal with a few sessions, all of it in its database file."""

    async def make() -> None:
        journal = Journal.open(directory)
        for number in range(6):
            session = f"s{number}"
            messages = [make_user_message(f"{session}u", f"what is {number}? " * 20)]
            messages.append(make_answer(f"{session}a", f"{session}u", f"{number} is it" * 9, list(range(90))))
            messages.append(make_answer(f"{session}b", f"{session}a", None, [1, 2]))
            await journal.commit([SaveSession(make_session(session)), *(SaveMessage(session, m) for m in messages)])
            journal.append_tokens(f"{session}b", 2, [3, 4, 5])
        await journal.close()

    asyncio.run(make())
    return (directory / DATABASE).read_bytes(), state_of(directory)


@pytest.mark.parametrize("num_flips", [200, pytest.param(2000, marks=pytest.mark.night)])
def test_a_flipped_bit_in_the_database_is_never_another_record(tmp_path: Path, num_flips: int) -> None:
    database, truth = _database_of(tmp_path / "journal")
    known = {session.id: session for session in truth.sessions}
    directory = tmp_path / "damaged"
    directory.mkdir()
    rng = random.Random(2)
    contents = [message.content.encode() for messages in truth.messages.values() for message in messages]
    places = [database.index(text) + i for text in contents for i in range(len(text))]
    for number in range(num_flips):
        damaged = bytearray(database)
        is_in_content = number % 2 == 0
        place = rng.choice(places) if is_in_content else rng.randrange(100, len(damaged))
        damaged[place] ^= 1 << rng.randrange(8)
        (directory / DATABASE).write_bytes(damaged)
        is_detected = False
        try:
            reader = JournalReader(connect_to_read(directory / DATABASE))
        except DATABASE_ERRORS:
            continue
        try:
            sessions = reader.sessions()
        except DATABASE_ERRORS:
            sessions = []
        for session in sessions:
            assert session == known[session.id]
        for name, messages in truth.messages.items():
            try:
                found = reader.messages(name)
            except (DamagedRecord, *DATABASE_ERRORS):
                is_detected = True
                continue
            # A page that says that it has fewer rows is not always detected here, but nothing is made up.
            for message in found:
                (right,) = (other for other in messages if other.id == message.id)
                if message.status == "in_progress":
                    right = msgspec.structs.replace(right, ids=right.ids[: len(message.ids)])
                assert message == right
        reader.close()
        assert is_detected or not is_in_content


async def test_a_damaged_message_is_an_error_of_its_session_only(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    database, truth = await asyncio.to_thread(_database_of, directory)
    at = database.index(b"what is 3?")
    damaged = bytearray(database)
    damaged[at] ^= 1
    (directory / DATABASE).write_bytes(damaged)
    journal = Journal.open(directory)
    assert len(await journal.sessions()) == 6
    for session in truth.messages:
        if session == "s3":
            with pytest.raises(DamagedRecord, match="message s3u is damaged"):
                await journal.messages(session)
        else:
            assert await journal.messages(session) == truth.messages[session]
    # It can be written to, and be removed.
    await journal.commit([SaveMessage("s3", make_user_message("s3c", "more", "s3u"))])
    assert (await journal.erase("s3")).messages == 4
    assert await journal.search("acme", "ann", "what", 10) == ["s5", "s4", "s2", "s1", "s0"]
    await journal.close()
