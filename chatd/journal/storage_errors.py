"""SQLite's errors as the errors that chatd shows."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from chatd.errors import DamagedRecord, StorageError

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
    """Return what to show for an error of the journal's database."""
    code = primary_code(error)
    if code == sqlite3.SQLITE_FULL:
        return StorageError(
            f"there is no room for the journal in {directory}; nothing was changed",
            hint="make room on that disk, or shorten what is kept (journal.retention_days)",
        )
    if code in _DAMAGED or isinstance(error, UnicodeDecodeError):
        return DamagedRecord(f"the journal in {directory} is damaged: {error}")
    return StorageError(f"the journal in {directory} cannot be written or read: {error}; nothing was changed")
