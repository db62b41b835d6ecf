"""SQLite's errors as the errors that chatd shows."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from chatd.errors import DamagedRecord, StorageError

_logger = logging.getLogger("chatd.journal")

DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What reading may raise; the second where SQLite's message quotes something that is damaged."""

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY = 0xFF
"""Extended codes of SQLite have the primary one in their low byte."""


def primary_code(error: BaseException) -> int:
    """Return SQLite's code of an error, 0 where it has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return 0 if code is None else code & _PRIMARY


def storage_error(error: BaseException, directory: Path) -> StorageError:
    """Log an error of the journal's database, and return what to show: any tenant may see it, so it names no folder."""
    _logger.error("the journal in %s cannot be used: %s", directory, error)
    code = primary_code(error)
    if code == sqlite3.SQLITE_FULL:
        return StorageError(
            "there is no room for the journal; nothing was changed",
            hint="the operator makes room on its disk, or shortens what is kept (journal.retention_days)",
        )
    if code in _DAMAGED or isinstance(error, UnicodeDecodeError):
        return DamagedRecord("the journal is damaged, the daemon's log says more")
    return StorageError("the journal cannot be written or read; nothing was changed")
