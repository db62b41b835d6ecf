"""Reading the journal on a connection that cannot write. Knows no threads; every record was checked."""

from __future__ import annotations

import logging
import os
import sqlite3
from array import array
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chatd.errors import ConfigError, DamagedRecord
from chatd.journal.directory import DATABASE, check_directory
from chatd.journal.encoding import MessageRow, SessionRow, check, message_record, session_record, unpack_ids
from chatd.journal.passages import has_words, passage, words_of
from chatd.journal.records import Match, MessageRecord, SaveAnswer, SessionRecord, UsageRow
from chatd.journal.schema import MIGRATIONS, check_version
from chatd.journal.search import MAX_INDEXED_CHARS, candidates
from chatd.journal.storage_errors import DATABASE_ERRORS

_logger = logging.getLogger("chatd.journal")
MAX_SEARCHED_CHARS = 16 * 2**20
MESSAGE_CHARS = 128
"""As many characters is a message looked at worth beside its own."""
_SESSIONS = """
    SELECT sessions.pk, tenant, user, id, title, updated_at, pinned, head, details, checksum
    FROM sessions JOIN owners ON owners.pk = owner"""
_MESSAGES = """
    SELECT members.position, members.message, members.checksum, messages.pk,
        id, parent, role, status, created_at, content, is_answer, prompt_ids, ids, details, messages.checksum
    FROM members LEFT JOIN messages ON messages.pk = members.message
    WHERE members.session = ? ORDER BY members.position"""


def connect_to_read(file: Path, *, is_immutable: bool = False) -> sqlite3.Connection:
    """Return a connection that cannot write, for any one thread at a time; the file stays as it is.

    Args:
        file: The database.
        is_immutable: Nobody can write it, and there is nothing in its log; so no file beside it is needed.

    Raises:
        sqlite3.Error: There is no such file, or it cannot be read.
    """
    uri = f"file:{quote(str(file))}?mode=ro{'&immutable=1' if is_immutable else ''}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
    # A flipped bit may leave no UTF-8; what comes out then fails its checksum.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA temp_store = MEMORY")
    open_files(connection)
    return connection


def open_files(connection: sqlite3.Connection) -> None:
    """Have SQLite open its files now and not at the first use: what a daemon has open is the same all the time."""
    connection.execute("SELECT 1 FROM sqlite_master").fetchone()


def open_to_read(directory: Path) -> JournalReader:
    """Return a reader of a journal that somebody else may be writing.

    Raises:
        ConfigError: The directory is not this user's alone, or has another version of the journal.
        sqlite3.Error: It cannot be read.
    """
    try:
        check_directory(directory)
    except OSError as error:
        raise ConfigError(f"the journal in {directory} cannot be read: {error.strerror}") from None
    file = directory / DATABASE
    is_immutable = _is_read_only(directory)
    if is_immutable and _has_log(file):
        raise ConfigError(
            f"{directory} cannot be written, and the journal's log has changes that are not in the database yet",
            hint="copy the folder, 0700, to where it can be written, and name the copy with --directory",
        )
    connection = connect_to_read(file, is_immutable=is_immutable)
    try:
        version = check_version(connection, file)
        if version < len(MIGRATIONS):
            raise ConfigError(
                f"{file} has version {version} of the journal, which a daemon of this version brings up to date",
                hint="start the daemon once (chatd serve)",
            )
    except BaseException:
        connection.close()
        raise
    return JournalReader(connection)


def _is_read_only(directory: Path) -> bool:
    """Return whether SQLite could not make the files beside a database that it reads by."""
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY) or not os.access(directory, os.W_OK)


def _has_log(file: Path) -> bool:
    try:
        return file.with_name(f"{file.name}-wal").stat().st_size > 0
    except OSError:
        return False


class JournalReader:
    """What is committed, as records.

    Args:
        connection: To a database of the newest schema; `close` closes it.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def sessions(self) -> list[SessionRecord]:
        """Return every session that can be read, in the order in which they were made; others are logged."""
        try:
            rows = self._db.execute(f"{_SESSIONS} ORDER BY sessions.pk").fetchall()
        except DATABASE_ERRORS as error:
            _logger.error("the list of sessions is damaged: %s; what can be read of it is", error)
            rows = self._rows_one_by_one()
        found = []
        for _, tenant, user, *row in rows:
            try:
                found.append(session_record(tenant, user, SessionRow(*row)))
            except DamagedRecord as error:
                _logger.error("%s; it is left out", error.message)
        return found

    def session(self, session: str) -> SessionRecord | None:
        """Return one session.

        Raises:
            DamagedRecord: It is not what was written.
        """
        return self._find(session)[1]

    def session_ids(self) -> set[str]:
        """Return the ids of all sessions, of damaged ones too."""
        return {session for (session,) in self._db.execute("SELECT id FROM sessions")}

    def message(self, message: str) -> tuple[str, str, MessageRecord] | None:
        """Return whose a message is, and the message, without tokens in flight.

        Raises:
            DamagedRecord: It is not what was written.
        """
        row = self._db.execute(
            "SELECT tenant, user, messages.id, messages.parent, role, status, messages.created_at, content, is_answer,"
            " prompt_ids, ids, messages.details, messages.checksum FROM messages"
            " JOIN members ON members.message = messages.pk JOIN sessions ON sessions.pk = members.session"
            " JOIN owners ON owners.pk = sessions.owner WHERE messages.id = ? LIMIT 1",
            (message,),
        ).fetchone()
        return None if row is None else (row[0], row[1], message_record(MessageRow(*row[2:])))

    def in_flight(self) -> list[tuple[str, str]]:
        """Return (session id, message id) of every answer that has not ended."""
        return [
            (session, message)
            for session, message in self._db.execute(
                "SELECT sessions.id, messages.id FROM messages JOIN members ON members.message = messages.pk"
                " JOIN sessions ON sessions.pk = members.session WHERE messages.status = 'in_progress'"
                " ORDER BY sessions.pk, members.position"
            )
        ]

    def messages(self, session: str) -> list[MessageRecord]:
        """Return a session's messages, in the order in which they were added; nothing of a session that is not there.

        Raises:
            DamagedRecord: One of them is not what was written.
        """
        session_pk, record_of_session = self._find(session)
        if record_of_session is None:
            return []
        found: list[MessageRecord] = []
        known: set[str | None] = {None}
        self._db.execute("BEGIN")  # Messages and their tokens in flight are of one moment.
        try:
            for position, member, member_checksum, pk, *columns in self._db.execute(_MESSAGES, (session_pk,)):
                check((position, member, member_checksum), f"a message of session {session}", session_pk)
                if pk is None:
                    raise DamagedRecord(f"a message of session {session} is missing in the journal")
                record = message_record(MessageRow(*columns))
                if record.parent not in known:
                    raise DamagedRecord(f"the message before {record.id} is missing in the journal")
                if record.status == "in_progress":
                    self._add_tokens(pk, record.ids)
                known.add(record.id)
                found.append(record)
        finally:
            self._db.execute("COMMIT")
        return found

    def search(self, tenant: str, user: str, query: str, limit: int) -> list[str]:
        """Return the ids of what `find` finds."""
        return [match.session for match in self.find(tenant, user, query, limit)]

    def find(self, tenant: str, user: str, query: str, limit: int) -> list[Match]:
        """Return an owner's sessions with every word of the query in the title or in one message, the best first.

        Titles go before messages, and later ones before earlier ones. Of messages the latest are looked at, as many as
        have `MAX_SEARCHED_CHARS` together: words that are too short for the index could be in any. Of each of them
        the first `MAX_INDEXED_CHARS` count.
        """
        words = words_of(query)
        owner = self._db.execute("SELECT pk FROM owners WHERE tenant = ? AND user = ?", (tenant, user)).fetchone()
        if owner is None or not words or limit < 1:
            return []
        found: dict[str, Match] = {}
        for rowid in candidates(self._db, owner[0], words, titles=True):
            row = self._db.execute(
                "SELECT id, title FROM sessions WHERE pk = ? AND owner = ?", (-rowid, owner[0])
            ).fetchone()
            if row is not None and has_words(row[1], words):
                found[row[0]] = Match(row[0])
                if len(found) == limit:
                    return list(found.values())
        num_left = MAX_SEARCHED_CHARS
        for rowid in candidates(self._db, owner[0], words, titles=False):
            row = self._db.execute("SELECT id, content FROM messages WHERE pk = ?", (rowid,)).fetchone()
            if row is None:
                continue
            text = row[1][:MAX_INDEXED_CHARS]
            num_left -= len(text) + MESSAGE_CHARS
            if num_left < 0:
                break
            if not has_words(text, words):
                continue
            for (session,) in self._db.execute(
                "SELECT id FROM members JOIN sessions ON sessions.pk = session WHERE message = ? AND owner = ?"
                " ORDER BY updated_at DESC",
                (rowid, owner[0]),
            ):
                if session in found and found[session].message is not None:
                    continue
                found[session] = Match(session, row[0], passage(text, words))
                if len(found) == limit:
                    return list(found.values())
        return list(found.values())

    def answers(self, since: float) -> list[SaveAnswer]:
        """Return the kept answers to commands, oldest first; damaged ones are left out."""
        found = []
        for row in self._db.execute(
            "SELECT tenant, user, command, body, event, at, checksum FROM answers WHERE at >= ? ORDER BY at, rowid",
            (since,),
        ):
            try:
                check(row, f"the answer to command {row[2]}")
            except DamagedRecord as error:
                _logger.error("%s; it is left out", error.message)
            else:
                found.append(SaveAnswer(*row[:-1]))
        return found

    def usage(self, tenant: str | None = None, first: date | None = None, last: date | None = None) -> list[UsageRow]:
        """Return tokens by tenant, key and day, from `first` to `last`; of all tenants where none is named."""
        rows: Sequence[tuple[str, str, str, int, int, int, int]] = self._db.execute(
            "SELECT tenant, key_id, day, requests, input_tokens, cached_tokens, output_tokens FROM usage"
            " WHERE (?1 IS NULL OR tenant = ?1) AND day BETWEEN ?2 AND ?3 ORDER BY tenant, key_id, day",
            (tenant, (first or date.min).isoformat(), (last or date.max).isoformat()),
        ).fetchall()
        return [
            UsageRow(
                tenant=tenant_of,
                key_id=key_id,
                day=date.fromisoformat(day),
                requests=requests,
                input_tokens=input_tokens,
                cached_tokens=cached_tokens,
                output_tokens=output_tokens,
            )
            for tenant_of, key_id, day, requests, input_tokens, cached_tokens, output_tokens in rows
        ]

    def _find(self, session: str) -> tuple[int, SessionRecord | None]:
        """Return a session's number and record."""
        row = self._db.execute(f"{_SESSIONS} WHERE id = ?", (session,)).fetchone()
        if row is None:
            return 0, None
        record = session_record(row[1], row[2], SessionRow(*row[3:]))
        if record.id != session:  # A damaged index leads to another one.
            raise DamagedRecord(f"session {session} is damaged in the journal")
        return row[0], record

    def _rows_one_by_one(self) -> list[tuple[Any, ...]]:
        """Return sessions' rows where the database is damaged in between."""
        rows = []
        (last,) = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'sessions'").fetchone() or (0,)
        for pk in range(1, last + 1):
            with suppress(*DATABASE_ERRORS):
                rows += self._db.execute(f"{_SESSIONS} WHERE sessions.pk = ?", (pk,)).fetchall()
        return rows

    def _add_tokens(self, message: int, ids: array[int]) -> None:
        """Put the tokens in flight of an answer behind those of its record."""
        for start, data, row_checksum in self._db.execute(
            "SELECT start, ids, checksum FROM tokens_in_flight WHERE message = ? ORDER BY start", (message,)
        ):
            check((start, data, row_checksum), "an answer in flight", message)
            if start > len(ids):
                raise DamagedRecord("tokens of an answer in flight are missing in the journal")
            del ids[start:]
            ids.extend(unpack_ids(data))
