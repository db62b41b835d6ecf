"""What a daemon writes in the moment in which it crashes, for the next one to find: a fault in native code.

Nothing can be written by a process that is killed, so a note tells a crash from `kill -9` and from a machine that was
switched off: those say nothing about what the daemon was doing.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from pathlib import Path

NAME = "crash"
MAX_BYTES = 16 * 1024

_log = logging.getLogger(__name__)


class CrashNote:
    """The note in a directory that this process alone uses.

    Args:
        directory: Of the journal.
        is_own: A crash of this process is one of a daemon, and nobody else notes it.

    Attributes:
        found: What the daemon before wrote; "" where it did not crash.

    Raises:
        OSError: The system's.
    """

    def __init__(self, directory: Path, *, is_own: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(directory / NAME, flags, 0o600)
        self.found = os.pread(self._file, MAX_BYTES, 0).decode("utf-8", "replace")
        self._is_own, self._is_armed = is_own, False

    def renew(self, *, is_counted: bool) -> None:
        """Have a crash of this process noted from now on, where it is its own; forget what was found once counted."""
        if is_counted:
            try:
                os.truncate(self._file, 0)
            except OSError as error:
                _log.warning("the note of a crash cannot be emptied, and is counted again at the next start: %s", error)
        if self._is_own:
            # In the main thread: the stack on which an overflow of the stack is noted is the calling thread's.
            faulthandler.enable(self._file, all_threads=False)
            self._is_armed = True

    def close(self) -> None:
        """Note no crash any more."""
        if self._is_armed:
            faulthandler.disable()
        os.close(self._file)
