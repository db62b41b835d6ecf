"""Changes as statements on the database. Knows nothing of threads, files and transactions, which are the writer's."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chatd.errors import StorageError
from chatd.journal.encoding import answer_checksum, checksum, message_row, pack_ids, session_row, unpack_ids
from chatd.journal.records import (
    ANSWER_TTL_S,
    MAX_ANSWER_BYTES_PER_USER,
    MAX_ANSWERS_PER_USER,
    Change,
    CountUsage,
    Erased,
    EraseSession,
    MessageRecord,
    RemoveMessages,
    SaveAnswer,
    SaveMessage,
    SaveSession,
    SessionRecord,
    ShareMessages,
)
from chatd.journal.search import change_index, part_of

_NEW_SESSION = """
    INSERT INTO sessions (owner, id, title, updated_at, pinned, head, details, checksum)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
_CHANGE_SESSION = """
    UPDATE sessions SET owner = ?, id = ?, title = ?, updated_at = ?, pinned = ?, head = ?, details = ?, checksum = ?
    WHERE pk = ?"""
_NEW_MESSAGE = """
    INSERT INTO messages (owner, id, parent, role, status, created_at, content, is_answer, prompt_ids, ids, details,
        checksum)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_CHANGE_MESSAGE = """
    UPDATE messages SET id = ?, parent = ?, role = ?, status = ?, created_at = ?, content = ?, is_answer = ?,
        prompt_ids = ?, ids = ?, details = ?, checksum = ?
    WHERE pk = ?"""
_COUNT_USAGE = """
    INSERT INTO usage (tenant, key_id, day, requests, input_tokens, cached_tokens, output_tokens)
    VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (tenant, key_id, day) DO UPDATE SET requests = requests + excluded.requests,
        input_tokens = input_tokens + excluded.input_tokens, cached_tokens = cached_tokens + excluded.cached_tokens,
        output_tokens = output_tokens + excluded.output_tokens"""
_FORGET_ANSWERS = """
    DELETE FROM answers WHERE rowid IN (
        SELECT number FROM (
            SELECT rowid AS number, sum(length(event)) OVER (ORDER BY at DESC, rowid DESC) - length(event) AS newer
            FROM answers WHERE tenant = ? AND user = ?)
        WHERE newer > ?)"""
_EXPIRED = """
    SELECT sessions.id FROM sessions JOIN owners ON owners.pk = sessions.owner
    WHERE owners.tenant = ? AND updated_at < ? AND NOT pinned AND NOT EXISTS (
        SELECT 1 FROM members JOIN messages ON messages.pk = members.message
        WHERE members.session = sessions.pk AND messages.status = 'in_progress')
    ORDER BY updated_at"""


@dataclass(slots=True)
class _Removed:
    """What became of messages that were taken out of a session."""

    messages: int = 0
    shared_messages: int = 0
    tokens: int = 0
    num_bytes: int = 0


class Tables:
    """The tables of one connection, inside of whatever transaction it is in.

    Args:
        connection: To a database of the newest schema.

    Attributes:
        has_erased: Something was erased whose remains may still be in free pages, the index and the log.
        unused: Messages that only erased sessions had, to be deleted by whoever takes them; those of work that was
            rolled back are among them, and `delete_unused` lets them be.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.has_erased = False
        self.unused: list[int] = []
        self._db = connection
        # Number, and length of the answer so far, of answers in flight that tokens were written of.
        self._in_flight: dict[str, tuple[int, int]] = {}
        self._answer_bytes: dict[tuple[str, str], int] = {}  # By owner, since they were counted.

    def forget(self) -> None:
        """Forget what is known of a transaction that was rolled back."""
        self._in_flight.clear()

    def apply(self, changes: Iterable[Change]) -> None:
        """Make changes, in order.

        Raises:
            StorageError: A change names a session or a message that is not there.
            sqlite3.Error: The database's.
        """
        for change in changes:
            match change:
                case SaveSession(session=record):
                    self._save_session(record)
                case SaveMessage(session=session, message=message):
                    self._save_message(session, message)
                case ShareMessages(session=session, messages=ids):
                    self._share(session, ids)
                case RemoveMessages(session=session, messages=ids):
                    self._remove(session, ids)
                case SaveAnswer():
                    self._save_answer(change)
                case CountUsage():
                    self._db.execute(
                        _COUNT_USAGE,
                        (
                            change.tenant,
                            change.key_id,
                            change.day.isoformat(),
                            change.requests,
                            change.input_tokens,
                            change.cached_tokens,
                            change.output_tokens,
                        ),
                    )
                case EraseSession(session=session):
                    self.erase(session)

    def append_tokens(self, message: str, start: int, ids: array[int]) -> None:
        """Note tokens of an answer in flight from `start` on; nothing where it has ended, or where some are missing."""
        known = self._in_flight.get(message) or self._find_in_flight(message)
        if known is None:
            return
        pk, length = known
        if start > length:
            return
        if start < length:
            self._db.execute("DELETE FROM tokens_in_flight WHERE message = ? AND start >= ?", (pk, start))
        data = pack_ids(ids)
        self._db.execute(
            "INSERT INTO tokens_in_flight (message, start, ids, checksum) VALUES (?, ?, ?, ?)",
            (pk, start, data, checksum(pk, start, data)),
        )
        self._in_flight[message] = (pk, start + len(ids))

    def erase(self, session: str) -> Erased:
        """Remove a session and the kept answers that tell of it, and leave the messages that no other one has."""
        row = self._db.execute(
            "SELECT sessions.pk, owner, title, tenant, user FROM sessions JOIN owners ON owners.pk = owner"
            " WHERE id = ?",
            (session,),
        ).fetchone()
        if row is None:
            return Erased(messages=0, shared_messages=0, tokens=0, num_bytes=0)
        pk, owner, title, tenant, user = row
        members = [m for (m,) in self._db.execute("SELECT message FROM members WHERE session = ?", (pk,))]
        self._db.execute("DELETE FROM members WHERE session = ?", (pk,))
        removed = self._leave_unused(members)
        self._db.execute("DELETE FROM sessions WHERE pk = ?", (pk,))
        change_index(self._db, -pk, owner, title, "")
        self._db.execute(
            "DELETE FROM answers WHERE tenant = ? AND user = ? AND instr(event, CAST(? AS BLOB))",
            (tenant, user, f'"{session}"'),
        )
        self._db.execute(
            "DELETE FROM owners WHERE pk = ? AND NOT EXISTS (SELECT 1 FROM sessions WHERE owner = ?)", (owner, owner)
        )
        self._db.execute("INSERT OR IGNORE INTO scrubs (part) VALUES (?)", (part_of(owner),))
        self.has_erased = True
        return Erased(
            messages=removed.messages,
            shared_messages=removed.shared_messages,
            tokens=removed.tokens,
            num_bytes=removed.num_bytes + len(title.encode()),
        )

    def erase_tenant(self, tenant: str) -> tuple[int, Erased]:
        """Remove all that there is of a tenant: sessions, kept answers, usage; return how many sessions, and what."""
        rows = self._db.execute(
            "SELECT id FROM sessions JOIN owners ON owners.pk = owner WHERE tenant = ?", (tenant,)
        ).fetchall()
        gone = [self.erase(session) for (session,) in rows]
        for table in ("answers", "usage", "owners"):
            self._db.execute(f"DELETE FROM {table} WHERE tenant = ?", (tenant,))  # noqa: S608
        return len(gone), Erased(
            messages=sum(erased.messages for erased in gone),
            shared_messages=0,
            tokens=sum(erased.tokens for erased in gone),
            num_bytes=sum(erased.num_bytes for erased in gone),
        )

    def wait_for_scrub(self) -> None:
        """Let this work end when nothing is left of what was erased by now."""
        self.has_erased = self._db.execute("SELECT 1 FROM scrubs").fetchone() is not None

    def expired(self, before: Mapping[str, float], default: float | None) -> list[str]:
        """Return sessions that nobody used since, by tenant; those that are pinned or answer are not among them.

        Args:
            before: Unix seconds, by tenant.
            default: Of other tenants; None keeps theirs.
        """
        found: list[str] = []
        for (tenant,) in self._db.execute("SELECT DISTINCT tenant FROM owners").fetchall():
            limit = before.get(tenant, default)
            if limit is not None:
                found += [session for (session,) in self._db.execute(_EXPIRED, (tenant, limit))]
        return found

    def _save_session(self, session: SessionRecord) -> None:
        owner = self._owner(session.tenant, session.user)
        row = (owner, *session_row(session))
        before = self._db.execute("SELECT pk, owner, title FROM sessions WHERE id = ?", (session.id,)).fetchone()
        if before is None:
            pk = _number(self._db.execute(_NEW_SESSION, row))
        else:
            pk = before[0]
            self._db.execute(_CHANGE_SESSION, (*row, pk))
            if before[1:] == (owner, session.title):
                return
            change_index(self._db, -pk, before[1], before[2], "")
        change_index(self._db, -pk, owner, "", session.title)

    def _owner(self, tenant: str, user: str) -> int:
        row = self._db.execute("SELECT pk FROM owners WHERE tenant = ? AND user = ?", (tenant, user)).fetchone()
        if row is None:
            return _number(self._db.execute("INSERT INTO owners (tenant, user) VALUES (?, ?)", (tenant, user)))
        return int(row[0])

    def _session(self, session: str) -> tuple[int, int]:
        """Return a session's number and its owner's."""
        row = self._db.execute("SELECT pk, owner FROM sessions WHERE id = ?", (session,)).fetchone()
        if row is None:
            raise StorageError(f"session {session} is not in the journal")
        return row[0], row[1]

    def _save_message(self, session: str, message: MessageRecord) -> None:
        session_pk, owner = self._session(session)
        row = message_row(message)
        before = self._db.execute("SELECT pk, owner, content FROM messages WHERE id = ?", (message.id,)).fetchone()
        if before is None:
            pk, old = _number(self._db.execute(_NEW_MESSAGE, (owner, *row))), ""
        else:
            pk, owner, old = before
            self._db.execute(_CHANGE_MESSAGE, (*row, pk))
            self._db.execute("DELETE FROM tokens_in_flight WHERE message = ?", (pk,))
        if old != message.content:
            change_index(self._db, pk, owner, old, message.content)
        if message.status == "in_progress":
            self._in_flight[message.id] = (pk, len(message.ids))
        else:
            self._in_flight.pop(message.id, None)
        self._add_member(session_pk, pk)

    def _share(self, session: str, messages: Sequence[str]) -> None:
        session_pk, _ = self._session(session)
        for message in messages:
            row = self._db.execute("SELECT pk FROM messages WHERE id = ?", (message,)).fetchone()
            if row is None:
                raise StorageError(f"message {message} is not in the journal")
            self._add_member(session_pk, row[0])

    def _add_member(self, session: int, message: int) -> None:
        known = self._db.execute("SELECT 1 FROM members WHERE message = ? AND session = ?", (message, session))
        if known.fetchone() is not None:
            return
        (last,) = self._db.execute("SELECT max(position) FROM members WHERE session = ?", (session,)).fetchone()
        position = 0 if last is None else last + 1
        self._db.execute(
            "INSERT INTO members (session, position, message, checksum) VALUES (?, ?, ?, ?)",
            (session, position, message, checksum(session, position, message)),
        )

    def _remove(self, session: str, messages: Sequence[str]) -> None:
        session_pk, _ = self._session(session)
        for message in messages:
            row = self._db.execute("SELECT pk FROM messages WHERE id = ?", (message,)).fetchone()
            if row is not None:
                self._db.execute("DELETE FROM members WHERE message = ? AND session = ?", (row[0], session_pk))
                self.delete_unused(row[0])

    def delete_unused(self, pk: int) -> int:
        """Delete a message if no session has it; return about how much was written for that."""
        if self._db.execute("SELECT 1 FROM members WHERE message = ?", (pk,)).fetchone() is not None:
            return 0
        row = self._db.execute("SELECT id, owner, content FROM messages WHERE pk = ?", (pk,)).fetchone()
        if row is None:
            return 0
        message, owner, content = row
        self._db.execute("DELETE FROM tokens_in_flight WHERE message = ?", (pk,))
        self._db.execute("DELETE FROM messages WHERE pk = ?", (pk,))
        change_index(self._db, pk, owner, content, "")
        self._in_flight.pop(message, None)
        return len(content)

    def _leave_unused(self, messages: Iterable[int]) -> _Removed:
        """Leave those messages that no session has to be deleted in parts: a long conversation takes seconds."""
        removed = _Removed()
        for pk in messages:
            if self._db.execute("SELECT 1 FROM members WHERE message = ?", (pk,)).fetchone() is not None:
                removed.shared_messages += 1
                continue
            row = self._db.execute("SELECT content, prompt_ids, ids FROM messages WHERE pk = ?", (pk,)).fetchone()
            if row is None:
                continue
            content, *ids = row
            ids += [data for (data,) in self._db.execute("SELECT ids FROM tokens_in_flight WHERE message = ?", (pk,))]
            self.unused.append(pk)
            removed.messages += 1
            removed.tokens += sum(map(_num_ids, ids))
            removed.num_bytes += len(content.encode()) + sum(map(len, ids))
        return removed

    def _save_answer(self, answer: SaveAnswer) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO answers (tenant, user, command, body, event, at, checksum)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                answer.tenant,
                answer.user,
                answer.command,
                answer.body,
                answer.event,
                float(answer.at),
                answer_checksum(answer),
            ),
        )
        self._db.execute("DELETE FROM answers WHERE at < ?", (answer.at - ANSWER_TTL_S,))
        self._db.execute(
            "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers WHERE tenant = ? AND user = ?"
            " ORDER BY at DESC, rowid DESC LIMIT -1 OFFSET ?)",
            (answer.tenant, answer.user, MAX_ANSWERS_PER_USER),
        )
        owner = (answer.tenant, answer.user)
        num_bytes = self._answer_bytes.get(owner, 0) + len(answer.event)
        if num_bytes > MAX_ANSWER_BYTES_PER_USER // 4:  # So much more is kept until it is counted again.
            self._db.execute(_FORGET_ANSWERS, (*owner, MAX_ANSWER_BYTES_PER_USER))
            num_bytes = 0
        self._answer_bytes[owner] = num_bytes

    def _find_in_flight(self, message: str) -> tuple[int, int] | None:
        """Return number and length of an answer that has not ended."""
        row = self._db.execute(
            "SELECT pk, ids FROM messages WHERE id = ? AND status = 'in_progress'", (message,)
        ).fetchone()
        if row is None:
            return None
        pk, ids = row
        last = self._db.execute(
            "SELECT start, ids FROM tokens_in_flight WHERE message = ? ORDER BY start DESC LIMIT 1", (pk,)
        ).fetchone()
        return pk, len(unpack_ids(ids)) if last is None else last[0] + len(unpack_ids(last[1]))


def _number(inserted: sqlite3.Cursor) -> int:
    """Return the number of the row that was inserted."""
    assert inserted.lastrowid is not None, "nothing was inserted"
    return inserted.lastrowid


def _num_ids(data: bytes) -> int:
    """Return how many ids are packed, of damaged ones about as many."""
    return (len(data) - 1) // (data[0] or 1) if data else 0
