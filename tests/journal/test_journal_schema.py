"""Journals of older versions open and keep what they have; those of newer ones are refused.

`versions/N.sql` has the tables of version N, `versions/N.db.gz` a journal of it and `versions/N.json` what is in that,
made by the code of that version: `python tests/journal/test_journal_schema.py`. They are never made again.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sqlite3
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chatd.errors import ConfigError
from chatd.journal.directory import DATABASE
from chatd.journal.journal import Journal
from chatd.journal.reader import JournalReader, connect_to_read
from chatd.journal.records import CountUsage, SaveAnswer, SaveMessage, SaveSession, ShareMessages
from chatd.journal.schema import MIGRATIONS, migrate, version_of
from chatd.testing.journal_records import make_answer, make_session, make_user_message

VERSIONS = Path(__file__).parent / "versions"
RELEASED = range(1, len(MIGRATIONS) + 1)


def tables_of(connection: sqlite3.Connection) -> str:
    rows = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name")
    return "\n".join(f"{sql};" for (sql,) in rows) + "\n"


def contents_of(database: Path) -> Any:
    """Return what is in a journal, as JSON has it."""
    reader = JournalReader(connect_to_read(database))
    sessions = reader.sessions()
    contents = {
        "sessions": sessions,
        "messages": {session.id: reader.messages(session.id) for session in sessions},
        "in_flight": reader.in_flight(),
        "answers": reader.answers(0.0),
        "usage": reader.usage(),
    }
    reader.close()
    return json.loads(msgspec.json.encode(contents, enc_hook=list))


def has_all(found: Any, wanted: Any) -> bool:
    """Tell whether JSON has all of another; fields that came later may be there, too."""
    if isinstance(wanted, dict):
        return all(name in found and has_all(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(has_all, found, wanted))
    return bool(found == wanted)


@pytest.mark.parametrize("version", RELEASED)
def test_the_tables_of_a_version_never_change(version: int) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection, "memory", MIGRATIONS[:version])
    assert tables_of(connection) == (VERSIONS / f"{version}.sql").read_text()


@pytest.mark.parametrize("version", RELEASED)
async def test_a_journal_of_each_version_opens_with_all_that_it_has(version: int, tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    directory.mkdir(mode=0o700)
    (directory / DATABASE).write_bytes(gzip.decompress((VERSIONS / f"{version}.db.gz").read_bytes()))
    journal = Journal.open(directory)
    assert has_all(contents_of(directory / DATABASE), json.loads((VERSIONS / f"{version}.json").read_text()))
    assert await journal.search("acme", "ann", "GRÜSSE", 10) == ["ses_1", "fork"]
    await journal.commit([SaveMessage("ses_1", make_user_message("new", "still works", "msg_1"))])
    await journal.erase("fork")
    assert len(await journal.messages("ses_1")) == 4
    await journal.close()


def _add_table(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE notes (text TEXT NOT NULL)")


def _fill_table(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO notes SELECT id FROM sessions")


def _fail(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO notes VALUES ('half')")
    connection.execute("INSERT INTO nowhere VALUES (1)")


async def _make(directory: Path) -> None:
    journal = Journal.open(directory)
    await journal.commit([SaveSession(make_session("s"))])
    await journal.close()


async def test_each_step_to_a_newer_version_is_done_once_and_in_order(tmp_path: Path) -> None:
    await _make(tmp_path / "journal")
    connection = sqlite3.connect(tmp_path / "journal" / DATABASE, isolation_level=None)
    newer = (*MIGRATIONS, _add_table, _fill_table)
    assert migrate(connection, "it", newer) == len(MIGRATIONS)
    assert migrate(connection, "it", newer) == len(newer)
    assert connection.execute("SELECT text FROM notes").fetchall() == [("s",)]
    connection.close()


async def test_a_step_that_fails_leaves_the_version_before_it(tmp_path: Path) -> None:
    await _make(tmp_path / "journal")
    connection = sqlite3.connect(tmp_path / "journal" / DATABASE, isolation_level=None)
    with pytest.raises(sqlite3.OperationalError, match="no such table: nowhere"):
        migrate(connection, "it", (*MIGRATIONS, _add_table, _fail))
    assert version_of(connection) == len(MIGRATIONS) + 1
    assert connection.execute("SELECT * FROM notes").fetchall() == []
    connection.close()


async def test_a_newer_journal_is_refused_with_what_to_do(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    await _make(directory)
    connection = sqlite3.connect(directory / DATABASE, isolation_level=None)
    connection.execute("PRAGMA user_version = 1000")
    connection.close()
    before = (directory / DATABASE).read_bytes()
    with pytest.raises(ConfigError, match=rf"has version 1000 .* knows versions up to {len(MIGRATIONS)}") as caught:
        Journal.open(directory)
    assert "run the newer chatd" in str(caught.value.hint)
    assert (directory / DATABASE).read_bytes() == before


async def _make_version(directory: Path) -> None:
    """Write a journal with something of everything."""
    journal = Journal.open(directory)
    await journal.commit(
        [
            SaveSession(make_session("ses_1", title="Grüße", head="msg_2", updated_at=5.0, pinned=True)),
            SaveMessage("ses_1", make_user_message("msg_1", "viele Grüße")),
            SaveMessage("ses_1", make_answer("msg_2", "msg_1", "zurück", [5, 300, 70000, 2**32 - 1])),
            SaveMessage("ses_1", make_answer("msg_3", "msg_1", None, [9])),
            SaveSession(make_session("fork", updated_at=6.0)),
            ShareMessages("fork", ("msg_1",)),
            SaveSession(make_session("foreign", tenant="other", user="bob", title="empty")),
            SaveAnswer("acme", "ann", "c1", b"\1" * 32, b'{"type":"item.added"}', 4.0),
            CountUsage("acme", "key_1", date(2026, 2, 28), 12, 3, 4),
        ]
    )
    journal.append_tokens("msg_3", 1, [10, 11])
    await journal.close()


def main(scratch: Path) -> None:
    """Write the files of the newest version."""
    asyncio.run(_make_version(scratch))
    version = len(MIGRATIONS)
    connection = sqlite3.connect(scratch / DATABASE)
    (VERSIONS / f"{version}.sql").write_text(tables_of(connection))
    connection.close()
    (VERSIONS / f"{version}.json").write_text(json.dumps(contents_of(scratch / DATABASE), indent=1) + "\n")
    (VERSIONS / f"{version}.db.gz").write_bytes(gzip.compress((scratch / DATABASE).read_bytes(), mtime=0))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "journal")
