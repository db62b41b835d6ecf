"""Moves what is committed from the log into the database, beside the writer, so that commits hardly wait for it.

The log begins anew only where all of it was moved, and while commits go on there is always a rest. So the writer moves
that one itself, between two commits: it is short.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import suppress

LOG_BYTES = 8 * 2**20
"""At about so much log a checkpoint is due."""
QUIET_S = 30.0
"""What is there is moved after so long in any case, so that a crash leaves little to go through."""

_logger = logging.getLogger("chatd.journal")


class Checkpointer:
    """A thread that checkpoints passively: neither readers nor the writer wait for it.

    Args:
        connection: For it alone; `close` closes it.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._log_bytes = LOG_BYTES
        self._condition = threading.Condition()
        self._num_bytes = 0
        self._has_rest = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="journal-checkpoints", daemon=True)
        self._thread.start()

    def note(self, num_bytes: int) -> None:
        """Count what was written to the log, about; for any thread."""
        with self._condition:
            was_due, self._num_bytes = self._num_bytes >= self._log_bytes, self._num_bytes + num_bytes
            if self._num_bytes >= self._log_bytes and not was_due:
                self._condition.notify()

    def move_rest(self, connection: sqlite3.Connection) -> None:
        """Move what came while a checkpoint was made, if one was, on the writer's connection."""
        with self._condition:
            has_rest, self._has_rest = self._has_rest, False
        if has_rest:
            _checkpoint(connection)

    def close(self) -> None:
        """End the thread and close the connection."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            _checkpoint(self._db)
            with self._condition:
                self._has_rest = True
        with suppress(sqlite3.Error):
            self._db.close()

    def _wait(self) -> bool:
        """Wait until a checkpoint is due; return False where there is none to come."""
        with self._condition:
            while not self._is_closed:
                self._condition.wait_for(lambda: self._is_closed or self._num_bytes >= self._log_bytes, QUIET_S)
                if self._num_bytes and not self._is_closed:
                    self._num_bytes = 0
                    return True
            return False


def _checkpoint(connection: sqlite3.Connection) -> None:
    """Move what nobody needs in the log any more."""
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        # The log has it all, and grows until this goes.
        _logger.error("the journal's log could not be moved into its database: %s", error)
