"""After an erasure nothing of what was erased is in any file of the journal."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import string
from pathlib import Path

import pytest

from chatd.journal import scrubber
from chatd.journal.directory import DATABASE
from chatd.journal.journal import Journal
from chatd.journal.reader import connect_to_read
from chatd.journal.records import EraseSession, SaveAnswer, SaveMessage, SaveSession
from chatd.journal.scrubber import Scrubber
from chatd.journal.tables import Tables
from chatd.testing.journal_records import make_answer, make_session, make_user_message

SECRET = "Zwischenfallsbericht-4711"
SECRET_IDS = list(range(40000, 40064))


def files_with(directory: Path, *needles: bytes) -> list[str]:
    """Return the names of files that have one of these, whatever the case."""
    return [
        file.name
        for file in directory.iterdir()
        if any(needle.lower() in file.read_bytes().lower() for needle in needles)
    ]


def secret_needles() -> list[bytes]:
    """Return the text, and ids as they are written: a plane of low bytes."""
    return [SECRET.encode(), bytes(token & 255 for token in SECRET_IDS)]


def index_of(directory: Path) -> bytes:
    """Return all that the full-text index has."""
    entries = connect_to_read(directory / DATABASE)
    tables = [name for (name,) in entries.execute("SELECT name FROM sqlite_schema WHERE name LIKE 'search%data'")]
    blocks = b"".join(block for name in tables for (block,) in entries.execute(f"SELECT block FROM {name}"))
    entries.close()
    return blocks


def random_text(rng: random.Random) -> str:
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(rng.randrange(1, 200)))


async def fill(journal: Journal, num_sessions: int, num_messages: int) -> None:
    """Write sessions by turns, so that their rows lie between one another; the one called "secret" among them."""
    rng = random.Random(3)
    sessions = [f"s{i}" for i in range(num_sessions)] + ["secret"]
    for session in sessions:
        await journal.commit([SaveSession(make_session(session, title=SECRET if session == "secret" else "other"))])
    for number in range(num_messages):
        for session in sessions:
            message, text = f"{session}-{number}", random_text(rng)
            if session == "secret":
                text = f"{text} {SECRET} {text}"
                ids = SECRET_IDS
            else:
                ids = list(range(64))
            await journal.commit(
                [
                    SaveMessage(session, make_user_message(f"{message}-u", text)),
                    SaveMessage(session, make_answer(f"{message}-a", f"{message}-u", text, ids)),
                    SaveAnswer(
                        "acme", "ann", message, b"", f'{{"session":"{session}","content":"{text}"}}'.encode(), 1.0
                    ),
                ]
            )
    await journal.commit([SaveMessage("secret", make_answer("flying", None, None, [], prompt_ids=SECRET_IDS))])
    journal.append_tokens("flying", 0, SECRET_IDS)
    await journal.flush()


async def test_erased_text_and_ids_are_in_no_file(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    await fill(journal, 5, 12)
    assert files_with(journal.directory, *secret_needles())
    await journal.erase("secret")
    assert files_with(journal.directory, *secret_needles()) == []
    assert len(await journal.sessions()) == 5
    assert await journal.search("acme", "ann", SECRET[:6], 10) == []
    await journal.close()
    assert files_with(journal.directory, *secret_needles()) == []


async def test_no_entry_of_the_index_is_left_that_only_the_erased_text_had(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    await fill(journal, 2, 6)
    # An entry is written whole where the one before it begins with another letter.
    assert b"471" in index_of(journal.directory)
    await journal.erase("secret")
    assert b"471" not in index_of(journal.directory)
    await journal.close()


async def test_an_erasure_goes_on_where_a_crash_came_before_its_end(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    journal = Journal.open(before)
    await fill(journal, 2, 6)
    await journal.close()
    connection = sqlite3.connect(before / DATABASE, isolation_level=None)
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("BEGIN")
    Tables(connection).erase("secret")
    connection.execute("COMMIT")
    shutil.copytree(before, after)
    connection.close()
    assert files_with(after, *secret_needles())
    journal = Journal.open(after)
    async with asyncio.timeout(10):
        while files_with(after, *secret_needles()):
            await journal.flush()
    await journal.close()


async def test_a_long_conversation_is_erased_in_parts_between_which_others_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber, "_PART_MESSAGES", 5)
    journal = Journal.open(tmp_path / "journal")
    await fill(journal, 1, 8)
    await journal.close()
    connection = sqlite3.connect(journal.directory / DATABASE, isolation_level=None)
    tables = Tables(connection)

    def num_messages() -> int:
        (number,) = connection.execute("SELECT count(*) FROM messages").fetchone()
        return int(number)

    assert num_messages() == 33
    connection.execute("BEGIN")
    assert tables.erase("secret").messages == 17
    connection.execute("COMMIT")
    parts = Scrubber(connection, Tables(connection))  # As after a crash: it finds what there is to delete.
    assert num_messages() == 33
    for left in (28, 23, 18, 16):
        assert not parts.is_done
        parts.do_part()
        assert num_messages() == left
        assert not connection.in_transaction
    while not parts.is_done:
        parts.do_part()
    assert num_messages() == 16
    connection.close()


async def test_a_reader_of_an_older_state_holds_up_an_erasure_and_no_commit(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    await fill(journal, 1, 3)
    reader = connect_to_read(journal.directory / DATABASE)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM messages").fetchone()
    erasure = asyncio.ensure_future(journal.commit([EraseSession("secret")]))
    for number in range(20):
        await journal.commit([SaveSession(make_session(f"new{number}"))])
    assert not erasure.done()
    reader.execute("COMMIT")
    await erasure
    assert files_with(journal.directory, *secret_needles()) == []
    reader.close()
    await journal.close()


async def test_room_that_was_used_is_given_back(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    await fill(journal, 5, 12)
    await journal.commit([EraseSession("s0")])
    full = (journal.directory / DATABASE).stat().st_size
    for session in ("s1", "s2", "s3", "s4", "secret"):
        await journal.erase(session)
    assert (journal.directory / DATABASE).stat().st_size < full / 2
    await journal.close()


@pytest.mark.parametrize("case", [str.upper, str.lower])
async def test_a_search_finds_what_was_not_erased(tmp_path: Path, case: object) -> None:
    assert callable(case)
    journal = Journal.open(tmp_path / "journal")
    await fill(journal, 1, 2)
    await journal.commit([SaveMessage("s0", make_user_message("x", f"also {SECRET}"))])
    await journal.erase("secret")
    assert await journal.search("acme", "ann", case(SECRET), 10) == ["s0"]
    await journal.close()
