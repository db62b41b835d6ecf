"""The tables of the journal's database, and how an older database becomes a newer one.

`PRAGMA user_version` is the version of the schema. Each step from one version to the next is one transaction, so a
crash in the middle leaves the version before. There is no way back: a database of a newer version is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from chatd.errors import ConfigError

APPLICATION_ID = 0x63686174
"""Of the database file: "chat"."""

Migration = Callable[[sqlite3.Connection], None]

_VERSION_1 = (
    # To whom sessions belong. The number is also what the full-text index knows an owner by.
    """CREATE TABLE owners (
        pk INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        user TEXT NOT NULL,
        UNIQUE (tenant, user)
    )""",
    """CREATE TABLE sessions (
        pk INTEGER PRIMARY KEY AUTOINCREMENT,
        owner INTEGER NOT NULL REFERENCES owners (pk),
        id TEXT NOT NULL UNIQUE,
        title TEXT NOT NULL,
        updated_at REAL NOT NULL,
        pinned INTEGER NOT NULL,
        head TEXT,
        details BLOB NOT NULL,
        checksum BLOB NOT NULL
    )""",
    "CREATE INDEX sessions_by_owner ON sessions (owner, updated_at)",
    # `owner` is under whom the full-text index has it, also where a fork has it later.
    # `ids` of an answer in flight are those that its record was saved with; more are in tokens_in_flight.
    # Numbers are never used again, so that a stale entry of the full-text index leads nowhere.
    """CREATE TABLE messages (
        pk INTEGER PRIMARY KEY AUTOINCREMENT,
        owner INTEGER NOT NULL,
        id TEXT NOT NULL UNIQUE,
        parent TEXT,
        role TEXT NOT NULL,
        status TEXT NOT NULL,
        created_at REAL NOT NULL,
        content TEXT NOT NULL,
        is_answer INTEGER NOT NULL,
        prompt_ids BLOB NOT NULL,
        ids BLOB NOT NULL,
        details BLOB NOT NULL,
        checksum BLOB NOT NULL
    )""",
    "CREATE INDEX messages_in_flight ON messages (pk) WHERE status = 'in_progress'",
    """CREATE TABLE members (
        session INTEGER NOT NULL REFERENCES sessions (pk),
        position INTEGER NOT NULL,
        message INTEGER NOT NULL REFERENCES messages (pk),
        checksum BLOB NOT NULL,
        PRIMARY KEY (session, position)
    ) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX members_by_message ON members (message, session)",
    # Each row begins at `start` of the answer, and what rows before it have from there on does not count.
    """CREATE TABLE tokens_in_flight (
        message INTEGER NOT NULL REFERENCES messages (pk),
        start INTEGER NOT NULL,
        ids BLOB NOT NULL,
        checksum BLOB NOT NULL,
        PRIMARY KEY (message, start)
    ) WITHOUT ROWID""",
    """CREATE TABLE answers (
        tenant TEXT NOT NULL,
        user TEXT NOT NULL,
        command TEXT NOT NULL,
        body BLOB NOT NULL,
        event BLOB NOT NULL,
        at REAL NOT NULL,
        checksum BLOB NOT NULL,
        PRIMARY KEY (tenant, user, command)
    )""",
    "CREATE INDEX answers_by_time ON answers (at)",
    "CREATE INDEX answers_by_owner ON answers (tenant, user, at)",
    """CREATE TABLE usage (
        tenant TEXT NOT NULL,
        key_id TEXT NOT NULL,
        day TEXT NOT NULL,
        requests INTEGER NOT NULL,
        input_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        PRIMARY KEY (tenant, key_id, day)
    ) WITHOUT ROWID""",
    # Parts of the index that had something which was erased, until nothing of it is left there, in free pages, in the
    # log.
    "CREATE TABLE scrubs (part INTEGER PRIMARY KEY)",
    # Of text that is not kept here. Messages by their number, titles by their session's, negated; by owner in 16 parts.
    *(
        f"CREATE VIRTUAL TABLE search_{part} USING fts5"
        " (text, content='', columnsize=0, detail=none, tokenize='trigram')"
        for part in range(16)
    ),
)


def _to_version_1(connection: sqlite3.Connection) -> None:
    for statement in _VERSION_1:
        connection.execute(statement)


MIGRATIONS: tuple[Migration, ...] = (_to_version_1,)
"""The one at i leads from version i to i + 1; an empty file is version 0. What was released is never changed."""


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of a database's schema.

    Raises:
        sqlite3.DatabaseError: It is no database, or damaged.
    """
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_version(connection: sqlite3.Connection, file: object, newest: int = len(MIGRATIONS)) -> int:
    """Return the version of a journal's schema.

    Raises:
        ConfigError: It is another program's database, or a newer journal than `newest`.
    """
    version = version_of(connection)
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    is_empty = version == application == 0 and not connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    if not is_empty and application != APPLICATION_ID:
        raise ConfigError(f"{file} is another program's database, and is left as it is", param="journal.directory")
    if version > newest:
        raise ConfigError(
            f"{file} has version {version} of the journal, and this chatd knows versions up to {newest}",
            param="journal.directory",
            hint="run the newer chatd that wrote it, or name another directory (journal.directory)",
        )
    return version


def migrate(connection: sqlite3.Connection, file: object, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Bring a journal to the newest version, one transaction a version, and return the version that it had.

    Raises:
        ConfigError: As `check_version`.
        sqlite3.Error: A step failed; the database has the version before it.
    """
    found = check_version(connection, file, len(migrations))
    for version in range(found, len(migrations)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            migrations[version](connection)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    return found
