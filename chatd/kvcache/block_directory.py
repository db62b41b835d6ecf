"""The directory of the disk tier: who may use it, what is in it, and the key that names its files.

```
ROOT/            must be this user's, and not for others to write
  lock           held by the one process that uses the directory
  key            32 random bytes, 0600: digests are made with it, so they survive a restart
  blocks-1/      0700; the number is that of the file format
    writing      the file that is being written
    ab/abcd….kv  0600; the name is the digest in hex, and the folder its first byte
```
Nothing outside `blocks-N` is ever removed. File names come from digests alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from chatd.errors import EnvironmentProblem
from chatd.kvcache.block_file import DIGEST_BYTES, Origin, read_origin
from chatd.kvcache.prefix_index import tenant_of_frame

KEY_BYTES = 32
_FOLDER = "blocks-1"
_WRITING = "writing"
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{64})\.kv")
_PARAM = "engine.disk_directory"


class DirectoryInUse(EnvironmentProblem):
    """Another process has the directory."""

    code = "disk_tier_in_use"


class BlockDirectory:
    """A directory that this process alone uses until `close`; made where it is not there.

    Args:
        root: The directory.

    Raises:
        DirectoryInUse: Another process uses it.
        EnvironmentProblem: It cannot be made or written, or others may write to it.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / _FOLDER
        self.writing = self._folder / _WRITING
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(root)
            self._lock = _take_lock(root)
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                _check_owner(self._folder)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise EnvironmentProblem(
                f"{root} cannot keep the disk tier: {error.strerror or error} ({_PARAM})", param=_PARAM
            ) from error

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock)

    def path(self, digest: bytes) -> Path:
        """Return where the file of a digest is, if it is."""
        assert len(digest) == DIGEST_BYTES, f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}"
        name = digest.hex()
        return self._folder / name[:2] / f"{name}.kv"

    def publish(self, digest: bytes) -> None:
        """Give the file that was written its name.

        Raises:
            OSError: The system's.
        """
        path = self.path(digest)
        try:
            self.writing.rename(path)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self.writing.rename(path)

    def remove(self, digest: bytes) -> None:
        """Remove the file of a digest, if it is there.

        Raises:
            OSError: The system's.
        """
        self.path(digest).unlink(missing_ok=True)

    def scan(self, num_bytes: int) -> list[bytes]:
        """Return the digests of the files that have this size, the longest unused first; remove all other files.

        Raises:
            OSError: The system's.
        """
        found: list[tuple[int, bytes]] = []
        for folder, entry in _entries(self._folder):
            name = _FILE.fullmatch(entry.name)
            status = entry.stat(follow_symlinks=False)
            is_whole = stat.S_ISREG(status.st_mode) and status.st_size == num_bytes
            if name is not None and folder == name[1][:2] and is_whole:
                found.append((status.st_mtime_ns, bytes.fromhex(name[1])))
            elif not stat.S_ISDIR(status.st_mode):
                Path(entry.path).unlink(missing_ok=True)
        return [digest for _, digest in sorted(found)]

    def remove_tenant(self, tenant: str) -> int:
        """Remove every file of a tenant's blocks, and what was left half written; return how many blocks those were.

        Raises:
            OSError: The system's.
        """
        num_removed = 0
        for path, origin in self.origins():
            if origin is None or tenant_of_frame(origin.namespace) == tenant:
                path.unlink(missing_ok=True)
                num_removed += origin is not None
        return num_removed

    def origins(self) -> Iterator[tuple[Path, Origin | None]]:
        """Yield every file with what its header says that it was computed from; None of one that is no block's.

        Raises:
            OSError: The system's.
        """
        for _, entry in _entries(self._folder):
            if entry.is_file(follow_symlinks=False):
                path = Path(entry.path)
                yield path, None if path == self.writing else read_origin(path)


def find_tenant(root: Path, tenant: str) -> list[bytes]:
    """Return the digests of a tenant's blocks in a directory that may be in use; it is only read.

    Raises:
        OSError: The system's.
    """
    found: list[bytes] = []
    folder = root / _FOLDER
    if not folder.is_dir():
        return found
    for _, entry in _entries(folder):
        name = _FILE.fullmatch(entry.name)
        if name is None or not entry.is_file(follow_symlinks=False):
            continue
        try:
            origin = read_origin(Path(entry.path))
        except FileNotFoundError:
            continue  # It was removed meanwhile.
        if origin is not None and tenant_of_frame(origin.namespace) == tenant:
            found.append(bytes.fromhex(name[1]))
    return found


def _entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what is in a folder of blocks, with "", and in its fan-out folders, with their names."""
    with os.scandir(folder) as outer:
        for entry in outer:
            if not entry.is_dir(follow_symlinks=False):
                yield "", entry
            elif _FAN_OUT.fullmatch(entry.name):
                with os.scandir(entry.path) as inner:
                    for file in inner:
                        yield entry.name, file


def load_key(root: Path) -> bytes:
    """Return the directory's key, which is made where there is none that others cannot read; for whoever has the lock.

    Raises:
        EnvironmentProblem: It cannot be read or made, or what has its name is somebody's file.
    """
    path = root / "key"
    try:
        key = _read_key(path)
        if key is not None:
            return key
        if path.exists() and path.stat().st_size > KEY_BYTES:
            raise EnvironmentProblem(
                f"{path} is no key of a disk tier, and is left as it is ({_PARAM})",
                param=_PARAM,
                hint="name a directory of its own",
            )
        # Others may know it, or a crash has cut it: what was stored under it is not found any more, and ages out.
        path.unlink(missing_ok=True)
        key = secrets.token_bytes(KEY_BYTES)
        unfinished = root / "key.new"
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, key)
        finally:
            os.close(descriptor)
        unfinished.rename(path)
    except OSError as error:
        raise EnvironmentProblem(
            f"the key in {root} cannot be read or made: {error.strerror or error} ({_PARAM})", param=_PARAM
        ) from error
    return key


def _read_key(path: Path) -> bytes | None:
    """Return a key that only this user can read, or None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        key = os.read(descriptor, KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return key if is_private and len(key) == KEY_BYTES else None


def _check_owner(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise EnvironmentProblem(
            f"{folder} is not a directory that you alone can write to ({_PARAM})",
            param=_PARAM,
            hint=f"name another one, or make it yours alone: chmod go-w {folder}",
        )


def _take_lock(root: Path) -> int:
    """Return the descriptor that holds the lock; the system lets go of it when the process ends, however it ends."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DirectoryInUse(
            f"{root} is the disk tier of another daemon that runs", param=_PARAM, hint="give this one its own directory"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
