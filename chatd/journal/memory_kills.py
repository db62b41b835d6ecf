"""Whether the daemon before may have been killed for want of memory: by the kernel's own count of such kills.

A process that is killed writes nothing. But Linux counts whom it kills for want of memory, in all of the machine and
since it was switched on (`oom_kill` in /proc/vmstat, from inside of containers too). A daemon keeps that count in its
journal's folder, as it is while it runs, and takes it away when it ends by itself. So where there is one that the
kernel is past, the daemon did not end by itself, and something was killed for want of memory since it looked last.
`kill -9` leaves the two the same, and after a power cut the machine is another start's.

Somebody else's end for want of memory is taken for the daemon's own where that was killed otherwise: from the last look
before its end to the next start. So a single one ends no answer (`sessions.crashes`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

NAME = "memory-kills"
MAX_BYTES = 256

_log = logging.getLogger(__name__)


class MemoryKills:
    """The count in a directory that this process alone uses.

    Args:
        directory: Of the journal.
        is_own: This process is a daemon, and its end is to be known.
        proc: Where the kernel says what it knows; elsewhere than on Linux nothing is there.

    Attributes:
        found: What is known of the end of the daemon before, in words; "" where that was no such kill.

    Raises:
        OSError: The system's, of the directory.
    """

    def __init__(self, directory: Path, *, is_own: bool, proc: Path = Path("/proc")) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(directory / NAME, flags, 0o600)
        self._proc = proc
        self._is_own, self._is_kept = is_own, False
        self._last = ""
        self._lock = threading.Lock()
        self.found = _difference(os.pread(self._file, MAX_BYTES, 0).decode("ascii", "replace"), self._now())

    def renew(self, *, is_counted: bool) -> None:
        """Keep the count from now on, where this process is a daemon and what was found before is counted."""
        if self._is_own and (is_counted or not self.found):
            with contextlib.suppress(OSError):
                os.truncate(self._file, 0)
            self._is_kept, self._last = True, ""
            self.refresh()

    def refresh(self) -> None:
        """Keep the count as it is now: to be called every few seconds, from any thread."""
        with self._lock:
            now = self._now() if self._is_kept else ""
            if not now or now == self._last:
                return
            try:
                # In one write, and a count only grows: a kill in between leaves the one or the other.
                os.pwrite(self._file, f"{now}\n".encode(), 0)
                self._last = now
            except OSError as error:
                _log.warning("the kernel's count of kills for want of memory cannot be kept: %s", error)

    def close(self) -> None:
        """Take the count away: this process ends by itself."""
        with self._lock:
            if self._is_kept:
                with contextlib.suppress(OSError):
                    os.truncate(self._file, 0)
            self._is_kept = False
            os.close(self._file)

    def _now(self) -> str:
        """Return which start of the machine this is, and how many were killed in it; "" where nobody says."""
        try:
            start = (self._proc / "sys/kernel/random/boot_id").read_text().strip()
            rows = (row.split() for row in (self._proc / "vmstat").read_text().splitlines())
            count = next((int(row[1]) for row in rows if row[0] == "oom_kill"), None)
        except (OSError, ValueError, IndexError):
            return ""
        return "" if count is None or not start else f"{start} {count}"


def _difference(kept: str, now: str) -> str:
    """Return what two counts say of the daemon that kept the first."""
    try:
        (start, count), (start_now, count_now) = kept.split(), now.split()
        num_killed = int(count_now) - int(count)
    except ValueError:
        return ""
    if start != start_now or num_killed <= 0:
        return ""
    return f"killed, and since it looked last the kernel has killed {num_killed} for want of memory"
