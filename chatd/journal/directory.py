"""The journal's directory: who may use it, and that nobody else can read what is in it.

```
DIRECTORY/           0700, this user's own
  lock               held by the one daemon that uses the directory; says which process, and where it answers
  crash              what the daemon before wrote in the moment in which it crashed; empty where it did not
  memory-kills       while a daemon runs: how many the kernel has killed for want of memory
  journal.db         0600, and beside it -wal and -shm, which SQLite makes with the same mode
```
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from chatd.errors import ConfigError
from chatd.journal.crash_note import NAME as CRASH_NOTE
from chatd.journal.memory_kills import NAME as MEMORY_KILLS

DATABASE = "journal.db"
_LOCK = "lock"
_MAX_LOCK_BYTES = 4096
_PARAM = "journal.directory"
_DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal")


class JournalInUse(ConfigError):
    """Another process writes the journal.

    Attributes:
        url: Where that daemon answers, on this machine; None where it has not said so yet.
    """

    code = "journal_in_use"
    url: str | None = None


class JournalDirectory:
    """A directory that this process alone writes until `close`; made where it is not there.

    Args:
        path: The directory.

    Attributes:
        database: The file of the database, which is there, 0600.

    Raises:
        JournalInUse: Another process writes it.
        ConfigError: It cannot be made or read, is somebody else's, or others may use it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / DATABASE
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_directory(path)
            self._lock = _take_lock(path)
            try:
                _make_file(self.database)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise ConfigError(
                f"the journal in {path} cannot be opened: {error.strerror or error} ({_PARAM})", param=_PARAM
            ) from error

    def announce(self, url: str) -> None:
        """Say where the daemon answers that uses the directory, to whoever finds it locked.

        Raises:
            OSError: The system's.
        """
        os.pwrite(self._lock, f"{os.getpid()}\n{url}\n".encode(), 0)

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock)


def check_directory(path: Path) -> None:
    """Refuse a directory, or a file of the journal in it, that is not this user's alone; writes nothing but modes.

    Raises:
        ConfigError: Says what is wrong, and what to do.
        OSError: The system's.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a directory ({_PARAM})", param=_PARAM, hint="name a directory, not a link")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user ({_PARAM})", param=_PARAM, hint="name one of your own")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{path} is open to other users, and conversations are private ({_PARAM})",
            param=_PARAM,
            hint=f"chmod 700 {path}",
        )
    for name in (*_DATABASE_FILES, _LOCK, CRASH_NOTE, MEMORY_KILLS):
        file = path / name
        try:
            status = file.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
            raise ConfigError(
                f"{file} is a link, or not a file of your own, and is left as it is ({_PARAM})", param=_PARAM
            )
        if status.st_mode & 0o077:
            file.chmod(0o600)


def _make_file(path: Path) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _take_lock(path: Path) -> int:
    """Return the descriptor that holds the lock; the system lets go of it when the process ends, however it ends."""
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder, _, url = os.pread(descriptor, _MAX_LOCK_BYTES, 0).decode("ascii", "replace").partition("\n")
        os.close(descriptor)
        error = JournalInUse(
            f"the journal in {path} is in use by process {holder or 'unknown'} ({_PARAM})",
            param=_PARAM,
            hint="stop that daemon, or give this one a directory of its own",
        )
        error.url = url.strip() or None
        raise error from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
