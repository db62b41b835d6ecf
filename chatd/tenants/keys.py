"""Keys: who a caller is. Secrets are shown once and kept as SHA-256; the file can be edited while the daemon runs.

A key reads `ck_<id>_<secret><check>`: an identifier that may be logged, 256 random bits, and a CRC so that a mistyped
key is told from an unknown one without a look-up. This module knows files and hashes; it does not know HTTP.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from chatd.errors import ConfigError, EnvironmentProblem, NotFound

LOCAL_TENANT = "local"
LOCAL_USER = "local"
LOCAL_KEY_ID = "local"

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_BYTES = 32
_SECRET_CHARS = 43
_CHECK_CHARS = 6
_ID_CHARS = 10
_KEY = re.compile(r"ck_([0-9A-Za-z]{1,32})_([0-9A-Za-z]{43})([0-9A-Za-z]{6})\Z")
_NO_DIGEST = "0" * 64

KeyClass = Literal["interactive", "batch"]
Name = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z][0-9A-Za-z._@-]{0,63}\Z")]
Label = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]{0,128}\Z")]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as it is stored; the secret is not in it.

    Attributes:
        id: The part of the key that may be shown.
        tenant: Whose blocks and quota it uses.
        user: Whose sessions it sees.
        sha256: Of the whole key, hexadecimal.
        label: For people.
        is_operator: May read metrics and the whole pool; "operator" in the file.
        key_class: How its requests are scheduled; "class" in the file.
        created: Unix seconds.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z]{1,32}\Z")]
    tenant: Name
    user: Name
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    label: Label = ""
    is_operator: bool = msgspec.field(default=False, name="operator")
    key_class: KeyClass = msgspec.field(default="interactive", name="class")
    created: float = 0.0

    @property
    def created_at(self) -> datetime:
        """When it was made, in UTC."""
        return datetime.fromtimestamp(self.created, UTC)


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key] = []


def mint(key_id: str | None = None) -> tuple[str, str]:
    """Return a new key and its identifier."""
    key_id = key_id or "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))
    secret = _base62(int.from_bytes(secrets.token_bytes(_SECRET_BYTES), "big"), _SECRET_CHARS)
    return f"ck_{key_id}_{secret}{_check(key_id, secret)}", key_id


def parse(token: str) -> str | None:
    """Return the identifier in a well-formed key, None for anything else."""
    match = _KEY.match(token)
    if match is None or not hmac.compare_digest(_check(match[1], match[2]), match[3]):
        return None
    return match[1]


def digest(token: str) -> str:
    """Return what is stored of a key."""
    return hashlib.sha256(token.encode()).hexdigest()


def looks_like_key(text: str) -> bool:
    """True for text that has a key's prefix: it must not be logged."""
    return "ck_" in text


# The file, for the commands.


def create_key(
    path: Path,
    *,
    tenant: str,
    user: str,
    label: str = "",
    operator: bool = False,
    key_class: KeyClass = "interactive",
    clock: Callable[[], float] = time.time,
) -> str:
    """Add a key to the file, made 0600 where it does not exist; return its text, which is kept nowhere.

    Raises:
        ConfigError: The file is broken, or a name has characters that it may not have.
        EnvironmentProblem: It cannot be written.
    """
    token, key_id = mint()
    key = Key(
        id=key_id,
        tenant=tenant,
        user=user,
        sha256=digest(token),
        label=label,
        is_operator=operator,
        key_class=key_class,
        created=round(clock(), 3),
    )
    try:
        msgspec.convert(msgspec.to_builtins(key), Key)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].strip("`")
        raise ConfigError(
            f"the {field} has characters that it may not have, or too many"
            " (tenant, user: letters, digits and ._@-, at most 64; label: at most 128, on one line)",
            param=field,
        ) from None
    with _locked(path):
        _write(path, [*list_keys(path), key])
    return token


def list_keys(path: Path) -> list[Key]:
    """Return the keys in a file; none where there is no file.

    Raises:
        ConfigError: The file is broken.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        pass  # it is said in the same words as a file that may not be read
    return read_keys(path)


def revoke_key(path: Path, key_id: str) -> Key:
    """Take a key out of the file; a daemon that reads it closes that key's connections within seconds.

    Raises:
        NotFound: No such key.
        EnvironmentProblem: The file cannot be written.
    """
    with _locked(path):
        keys = list_keys(path)
        gone = [key for key in keys if key.id == key_id]
        if not gone:
            raise NotFound(f"{key_id!r} is not a key in {path} (chatd keys list)", param="id")
        _write(path, [key for key in keys if key.id != key_id])
    return gone[0]


def read_keys(path: Path) -> list[Key]:
    """Return the keys in a file.

    Raises:
        ConfigError: It cannot be read, is not a keys file, names a key twice, or others may write it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror} (server.keys_file)", param="server.keys_file"
        ) from None
    if mode & 0o022:
        raise ConfigError(f"{path} has mode {mode:o}: others may write it (chmod 600 {path})", param="server.keys_file")
    try:
        keys = msgspec.json.decode(text, type=_KeysFile).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a keys file: {error} (chatd keys create)", param="server.keys_file") from None
    ids = [key.id for key in keys]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{path} names a key twice", param="server.keys_file")
    return keys


def local_key(path: Path) -> str:
    """Return this user's random local key, made 0600 at the first call.

    Raises:
        ConfigError: Somebody else owns or may read the file.
        EnvironmentProblem: It is not there and cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        with _told_of_failure(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Written whole under another name and linked: a second daemon that starts now reads all of it or none.
            token, _ = mint(LOCAL_KEY_ID)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            _write_private(temporary, token.encode() + b"\n")
            try:
                os.link(temporary, path)
            except FileExistsError:
                return local_key(path)
            finally:
                temporary.unlink()
        return token
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        text = file.read(512).decode("ascii", "replace").strip()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{path} is readable by others (chmod 600 {path}, or remove it for a new key)")
    if parse(text) is None:
        raise ConfigError(f"{path} does not hold a key (remove it for a new one)")
    return text


# The daemon's side.


class KeyStore:
    """The keys that are good now.

    Args:
        path: A keys file, read again when it changes; None with `local` only.
        local: The local key's text, where there is no keys file.
    """

    def __init__(self, path: Path | None, *, local: str | None = None) -> None:
        self._path = path
        self._keys: dict[str, Key] = {}
        self._stamp: tuple[int, int, int] | None = None
        if local is not None:
            self._keys[LOCAL_KEY_ID] = Key(
                id=LOCAL_KEY_ID, tenant=LOCAL_TENANT, user=LOCAL_USER, sha256=digest(local), is_operator=True
            )
        if path is not None:
            self._stamp = self._stat()
            self._keys |= {key.id: key for key in read_keys(path)}

    @property
    def has_file(self) -> bool:
        """True where tenants are configured by a keys file."""
        return self._path is not None

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that have a key."""
        return frozenset(key.tenant for key in self._keys.values())

    def get(self, key_id: str) -> Key | None:
        """Return a key that is good now."""
        return self._keys.get(key_id)

    def authenticate(self, token: str) -> Key | None:
        """Return whose key this is, None for one that is not known; equal time for a wrong secret and a wrong id."""
        key_id = parse(token)
        key = self._keys.get(key_id) if key_id is not None else None
        matches = hmac.compare_digest(digest(token), key.sha256 if key is not None else _NO_DIGEST)
        return key if matches else None

    def refresh(self) -> list[str]:
        """Read the file again if it changed; return the keys that are gone or are not what they were.

        Raises:
            ConfigError: The file is broken; the keys of before stay good. The next call tries again.
        """
        if self._path is None:
            return []
        stamp = self._stat()
        if stamp == self._stamp:
            return []
        now = {key.id: key for key in read_keys(self._path)}
        before, self._keys, self._stamp = self._keys, now, stamp
        return [key_id for key_id, key in before.items() if now.get(key_id) != key]

    def _stat(self) -> tuple[int, int, int] | None:
        assert self._path is not None, "there is no keys file to watch"
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _check(key_id: str, secret: str) -> str:
    return _base62(zlib.crc32(f"{key_id}_{secret}".encode()), _CHECK_CHARS)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    assert number == 0, "the number does not fit its width"
    return "".join(reversed(digits))


def _write(path: Path, keys: Sequence[Key]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    _write_private(temporary, msgspec.json.format(msgspec.json.encode(_KeysFile(list(keys))), indent=2) + b"\n")
    os.replace(temporary, path)


def _write_private(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside the file, so that two commands at once lose nothing."""
    with _told_of_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def _told_of_failure(path: Path) -> Iterator[None]:
    """Turn what the system refuses into a refusal of ours.

    Raises:
        EnvironmentProblem: Names the file.
    """
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be written: {error.strerror}") from None
