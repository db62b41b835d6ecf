"""Removes what erased rows left behind, in parts between commits: in the index, in free pages and in the log."""

from __future__ import annotations

import sqlite3

from chatd.journal.search import is_index_damaged, merge_index, rebuild_index

_VACUUM_PAGES = 2048


class Scrubber:
    """What is still to do after erasures on one connection, also those from before a crash.

    Args:
        connection: The writer's; outside of a transaction whenever a method is called.

    Attributes:
        is_done: Nothing of what was erased is left in any file.
        must_wait: The next part is to wait for others to read to their end.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self.begin()

    def begin(self) -> None:
        """Take up what was erased since."""
        self._parts = [part for (part,) in self._db.execute("SELECT part FROM scrubs")]
        self._is_first = True
        self.is_done = not self._parts
        self.must_wait = False

    def do_part(self) -> None:
        """Do the next part.

        Raises:
            sqlite3.Error: It is to be tried again.
        """
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

    def _merge(self, part: int) -> bool:
        """Do a bit of a part of the index; return whether there is more to do of it."""
        try:
            return merge_index(self._db, part, is_first=self._is_first)
        except sqlite3.DatabaseError as error:
            if not is_index_damaged(error):
                raise
        self._db.execute("BEGIN IMMEDIATE")
        try:
            rebuild_index(self._db, part)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        return False
