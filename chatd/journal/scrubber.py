"""Removes what an erasure left, in parts between commits: messages, and in the index, in free pages and in the log."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from chatd.journal.search import is_index_damaged, merge_index, rebuild_index
from chatd.journal.tables import Tables

_VACUUM_PAGES = 2048
_PART_CHARS = 2**17
"""Of messages that are deleted in one transaction, about; taking texts out of the index is what takes long."""
_PART_MESSAGES = 64


class Scrubber:
    """What is still to do after erasures on one connection, also those from before a crash.

    Args:
        connection: The writer's; outside of a transaction whenever a method is called.
        tables: Of that connection.

    Attributes:
        is_done: Nothing of what was erased is left in any file.
        must_wait: The next part is to wait for others to read to their end.
    """

    def __init__(self, connection: sqlite3.Connection, tables: Tables) -> None:
        self._db = connection
        self._tables = tables
        self._unused: list[int] = []
        self.begin(())
        if not self.is_done:
            # A crash, or an error, came before the end.
            unused = "SELECT pk FROM messages WHERE NOT EXISTS (SELECT 1 FROM members WHERE message = messages.pk)"
            self._unused = [pk for (pk,) in connection.execute(unused)]

    def begin(self, unused: Sequence[int]) -> None:
        """Take up what was erased since, and the messages that it left."""
        self._unused += unused
        self._parts = [part for (part,) in self._db.execute("SELECT part FROM scrubs")]
        self._is_first = True
        self.is_done = not self._parts
        self.must_wait = False

    def do_part(self) -> None:
        """Do the next part.

        Raises:
            sqlite3.Error: It is to be tried again.
        """
        if self._unused:
            self._delete_some()
            return
        if self._parts:
            self._is_first = not self._merge(self._parts[-1])
            if self._is_first:
                self._parts.pop()
                if not self._parts:
                    # As a script: `execute` would end it after its first page.
                    self._db.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            return
        # Busy where somebody reads what was there before; that takes moments, in which commits go on.
        (timeout_ms,) = self._db.execute("PRAGMA busy_timeout").fetchone()
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            (is_busy, _, _) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {timeout_ms}")
        self.must_wait = bool(is_busy)
        if not is_busy:
            self._db.execute("DELETE FROM scrubs")
            self.is_done = True

    def _delete_some(self) -> None:
        num_left, num_chars = len(self._unused), 0
        try:
            self._db.execute("BEGIN IMMEDIATE")
            while num_left and num_chars < _PART_CHARS and len(self._unused) - num_left < _PART_MESSAGES:
                num_left -= 1
                num_chars += self._tables.delete_unused(self._unused[num_left])
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            if is_index_damaged(error):
                for part in self._parts:
                    self._rebuild(part)
            raise
        del self._unused[num_left:]

    def _merge(self, part: int) -> bool:
        """Do a bit of a part of the index; return whether there is more to do of it."""
        try:
            return merge_index(self._db, part, is_first=self._is_first)
        except sqlite3.DatabaseError as error:
            if not is_index_damaged(error):
                raise
        self._rebuild(part)
        return False

    def _rebuild(self, part: int) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            rebuild_index(self._db, part)
            self._db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        self._tables.forget()
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
