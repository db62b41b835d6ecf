"""The journal on disk: conversations that are there again after a crash of everything.

```
Journal ── JournalDirectory    the lock, and who may read the files
   ├────── JournalWriter       a thread: changes and tokens in flight, in groups
   ├────── Checkpointer        a thread: from the log into the database
   └────── JournalReader (2)   two threads: one for searches, which may take longer
```
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from chatd.errors import ConfigError, EnvironmentProblem, StorageError
from chatd.journal.checkpoints import LOG_BYTES, Checkpointer
from chatd.journal.crash_note import CrashNote
from chatd.journal.directory import JournalDirectory
from chatd.journal.memory_kills import MemoryKills
from chatd.journal.reader import JournalReader, connect_to_read, open_files
from chatd.journal.records import (
    CHANGE_BYTES,
    Change,
    Erased,
    Match,
    MessageRecord,
    SaveAnswer,
    SaveMessage,
    SessionRecord,
    UsageRow,
    written_bytes,
)
from chatd.journal.schema import check_version, migrate
from chatd.journal.storage_errors import DATABASE_ERRORS, storage_error
from chatd.journal.tables import Tables
from chatd.journal.writer import BUSY_S, JournalWriter

DAY_S = 86400.0
_OLDEST_SQLITE = (3, 34, 0)
_EXPIRE_AT_ONCE = 16
_T = TypeVar("_T")
_log = logging.getLogger("chatd.journal")


class Journal:
    """What `sessions.ports.Journal` asks for, in a directory. Use `open`.

    Attributes:
        directory: Where it is.
    """

    def __init__(self, directory: JournalDirectory, *, notes_crashes: bool = False) -> None:
        self.directory = directory.path
        self._directory = directory
        self._is_closed = False
        self._crash_note = CrashNote(directory.path, is_own=notes_crashes)
        self._memory_kills = MemoryKills(directory.path, is_own=notes_crashes)
        self._readers = {
            name: (JournalReader(connect_to_read(directory.database)), ThreadPoolExecutor(1, f"journal-{name}"))
            for name in ("reads", "searches")
        }
        self._checkpointer = Checkpointer(_connect(directory.database))
        self._writer = JournalWriter(lambda: _connect(directory.database), directory.path, self._checkpointer)

    @classmethod
    def open(cls, directory: Path, *, notes_crashes: bool = False) -> Self:
        """Open the journal of a directory, which is made where it is not there; only one process at a time can.

        Args:
            directory: Where it is.
            notes_crashes: What a fault in native code does to this process is noted in the directory, and nowhere else;
                and so is what shows that it was killed for want of memory.

        Raises:
            JournalInUse: Another process has it; says which.
            ConfigError: The directory cannot be used, or has a newer journal or something else.
        """
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise EnvironmentProblem(
                f"SQLite {sqlite3.sqlite_version} is too old for the journal, which needs"
                f" {'.'.join(map(str, _OLDEST_SQLITE))}"
            )
        place = JournalDirectory(directory)
        try:
            connection = _connect(place.database)
            try:
                check_version(connection, place.database)
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute("PRAGMA journal_mode = WAL")
                migrate(connection, place.database)
                # What crashes left in the log is moved now, however short the daemons lived.
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                # While this one is open, so that the last one to close does not take the log away.
                return cls(place, notes_crashes=notes_crashes)
            finally:
                connection.close()
        except DATABASE_ERRORS as error:
            place.close()
            raise ConfigError(
                f"the journal in {directory} cannot be opened: {error} (journal.directory)",
                param="journal.directory",
            ) from error
        except BaseException:
            place.close()
            raise

    @property
    def num_transactions(self) -> int:
        """How many transactions were committed since the start."""
        return self._writer.num_transactions

    @property
    def crash(self) -> str:
        """What is known of a fault in native code, or of want of memory, that ended the daemon before; "" of none."""
        return self._crash_note.found or self._memory_kills.found

    def note_crashes(self, *, is_counted: bool) -> None:
        """Have a crash of this process noted from now on, and forget the one that was found where it is counted."""
        self._crash_note.renew(is_counted=is_counted)
        self._memory_kills.renew(is_counted=is_counted)

    def note_memory_kills(self) -> None:
        """Look how many the kernel has killed for want of memory; to be called every few seconds, from any thread."""
        self._memory_kills.refresh()

    def announce(self, url: str) -> None:
        """Say where the daemon answers that has the journal; where that cannot be written, commands are told it."""
        try:
            self._directory.announce(url)
        except OSError as error:
            _log.warning("the journal's lock cannot say where this daemon answers: %s", error)

    async def close(self) -> None:
        """Write what waits, and let another process have the directory."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for reader, thread in self._readers.values():
            thread.shutdown()
            reader.close()
        self._checkpointer.close()
        self._writer.close()
        self._crash_note.close()
        self._memory_kills.close()
        self._directory.close()

    async def commit(self, changes: Sequence[Change]) -> None:
        """Return when all changes are durable; see `sessions.ports.Journal`.

        What was submitted is written, also where the caller is cancelled meanwhile. A message's ids are as they are at
        the call.

        Raises:
            StorageError: Nothing of them was kept.
        """
        own = [_own(change) for change in changes]
        await self._writer.submit(lambda tables: tables.apply(own), sum(map(written_bytes, own)))

    def append_tokens(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Note tokens of an answer in flight; they are written within 0.1 s."""
        self._writer.append_tokens(message, start, ids)

    async def flush(self) -> None:
        """Return when all tokens that were noted are durable.

        Raises:
            StorageError: They are not.
        """
        await self._writer.flush()

    async def erase(self, session: str) -> Erased:
        """Remove a session as `EraseSession`, and return what was removed, when nothing of it is left in the files.

        Raises:
            StorageError: Nothing was removed.
        """
        return await self._writer.submit(lambda tables: tables.erase(session), CHANGE_BYTES)

    async def erase_tenant(self, tenant: str) -> tuple[int, Erased]:
        """Remove everything of a tenant, its usage too; return how many sessions, and what they had.

        Raises:
            StorageError: Nothing was removed.
        """
        return await self._writer.submit(lambda tables: tables.erase_tenant(tenant), CHANGE_BYTES)

    async def expired(self, now: float, days: Mapping[str, float], default_days: float | None = None) -> list[str]:
        """Return the sessions that `expire` would erase.

        Raises:
            StorageError: The journal cannot be read.
        """
        before, default = _limits(now, days, default_days)
        return await self._writer.submit(lambda tables: tables.expired(before, default), 0)

    async def expire(
        self,
        now: float,
        days: Mapping[str, float],
        default_days: float | None = None,
        in_use: Collection[str] = (),
    ) -> list[str]:
        """Erase sessions that nobody used for as long as their tenant keeps them, and return which.

        Pinned sessions stay, and so do those with an answer in flight.

        Args:
            now: Unix seconds.
            days: By tenant.
            default_days: Of the other tenants; None keeps theirs.
            in_use: Sessions that stay in any case.

        Raises:
            StorageError: As `erase`; what was erased before is erased.
        """
        before, default = _limits(now, days, default_days)
        kept = frozenset(in_use)
        erased: list[str] = []
        while found := await self._writer.submit(
            lambda tables: _erase_expired(tables, before, default, kept), CHANGE_BYTES, waits_for_scrub=False
        ):
            erased += found
        await self._writer.submit(Tables.wait_for_scrub, 0)
        return erased

    async def sessions(self) -> list[SessionRecord]:
        """Return every session; one that is damaged is left out and logged."""
        return await self._read("reads", JournalReader.sessions)

    async def in_flight(self) -> list[tuple[str, str]]:
        """Return (session id, message id) of every answer that has not ended."""
        return await self._read("reads", JournalReader.in_flight)

    async def messages(self, session: str) -> list[MessageRecord]:
        """Return a session's messages, parents before children; see `sessions.ports.Journal`.

        Raises:
            DamagedRecord: One of them is not what was written; other sessions are not concerned.
        """
        return await self._read("reads", lambda reader: reader.messages(session))

    async def message(self, message: str) -> tuple[str, str, MessageRecord] | None:
        """Return a message's tenant, user and record; None where there is none of this id.

        Raises:
            DamagedRecord: It is not what was written.
        """
        return await self._read("reads", lambda reader: reader.message(message))

    async def search(self, tenant: str, user: str, query: str, limit: int) -> list[str]:
        """Return the ids of what `find` finds."""
        return [match.session for match in await self.find(tenant, user, query, limit)]

    async def find(self, tenant: str, user: str, query: str, limit: int) -> list[Match]:
        """Return an owner's sessions with every word of the query in the title or in one message, the best first."""
        return await self._read("searches", lambda reader: reader.find(tenant, user, query, limit))

    async def answers(self, since: float) -> list[SaveAnswer]:
        """Return the kept answers to commands, oldest first."""
        return await self._read("reads", lambda reader: reader.answers(since))

    async def usage(
        self, tenant: str | None = None, first: date | None = None, last: date | None = None
    ) -> list[UsageRow]:
        """Return tokens by tenant, key and day, from `first` to `last`; of all tenants where none is named."""
        return await self._read("reads", lambda reader: reader.usage(tenant, first, last))

    async def _read(self, name: str, read: Callable[[JournalReader], _T]) -> _T:
        if self._is_closed:
            raise StorageError("the journal is closed")
        reader, thread = self._readers[name]
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, read, reader)
        except DATABASE_ERRORS as error:
            raise storage_error(error, self.directory) from error


def _connect(database: Path) -> sqlite3.Connection:
    """Return a connection that writes, for any one thread at a time."""
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
    open_files(connection)
    return connection


def _limits(now: float, days: Mapping[str, float], default_days: float | None) -> tuple[dict[str, float], float | None]:
    """Return before when a session was used last that is kept no longer, by tenant, and for the others."""
    before = {tenant: now - DAY_S * own for tenant, own in days.items()}
    return before, None if default_days is None else now - DAY_S * default_days


def _erase_expired(
    tables: Tables, before: Mapping[str, float], default: float | None, in_use: Collection[str]
) -> list[str]:
    expired = [session for session in tables.expired(before, default) if session not in in_use][:_EXPIRE_AT_ONCE]
    for session in expired:
        tables.erase(session)
    return expired


def _own(change: Change) -> Change:
    """Return a change that its maker does not go on changing."""
    if isinstance(change, SaveMessage):
        message = change.message
        return SaveMessage(
            change.session, msgspec.structs.replace(message, prompt_ids=message.prompt_ids[:], ids=message.ids[:])
        )
    return change
