"""The file of one block: a header that says whose KV it is, then the KV itself. Knows no directory and no order.

```
0    magic, and with it the version       8 bytes
8    length of the namespace              4, little endian like all numbers here
12   length of the parent's digest        4
16   length of the tokens                 4
20   zeros                                4
24   length of the payload                8
32   checksum of everything else          16, xxh3_128
48   namespace, parent, tokens, zeros     up to 4096
4096 payload
```
The header is compared as a whole with the one that the asked-for content would have, so that no field can be taken for
another. The checksum is for damage: what a file must not be able to claim is in its name, which is a keyed digest of
the same origin.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from chatd.errors import InvalidRequest

DIGEST_BYTES = 32
"""Of what a block is called below the pool."""

HEADER_BYTES = 4096
"""Of every file, so that payloads begin on a page and all files of one block size have one size."""

_MAGIC = b"chatdkv\x01"
_LENGTHS = struct.Struct("<8sIIIIQ")
_CHECKSUM = slice(_LENGTHS.size, _LENGTHS.size + 16)
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class Origin(NamedTuple):
    """Which tokens, after which prefix, in which namespace a block's KV was computed from.

    Attributes:
        namespace: `Namespace.frame()`: typed and length-framed, with tenant and weights in it.
        parent: The digest of the block before, or what stands for the namespace's beginning.
        tokens: Four bytes each.
    """

    namespace: bytes
    parent: bytes
    tokens: bytes


class RefusedBlock(Exception):
    """A file that is not the block that was asked for; the text says in a few words why."""


def file_bytes(block_bytes: int) -> int:
    """Return the size of the file of a block."""
    return HEADER_BYTES + block_bytes


def write_block(path: Path, origin: Origin, payload: memoryview) -> None:
    """Write a file that only this user can read; what was there is overwritten.

    Raises:
        OSError: The system's; part of the file may be there.
        InvalidRequest: The origin does not fit into the header.
    """
    header = _header(origin, len(payload))
    header[_CHECKSUM] = _checksum(header, payload)
    descriptor = os.open(path, _WRITE_FLAGS, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's file is in its place")
        for part in (memoryview(header), payload):
            while part:
                part = part[os.write(descriptor, part) :]
    finally:
        os.close(descriptor)


def read_origin(path: Path) -> Origin | None:
    """Return what a file's header says that it was computed from, unchecked; None where it is no file of a block.

    Raises:
        OSError: The system's.
    """
    descriptor = os.open(path, _READ_FLAGS)
    try:
        header = bytearray(HEADER_BYTES)
        is_whole = _fill(descriptor, memoryview(header))
    finally:
        os.close(descriptor)
    if not is_whole or not header.startswith(_MAGIC):
        return None
    parts, start = [], _CHECKSUM.stop
    for length in _LENGTHS.unpack_from(header)[1:4]:
        parts.append(bytes(header[start : start + length]))
        start += length
    return Origin(*parts)


def read_block(path: Path, origin: Origin, payload: memoryview) -> None:
    """Fill `payload` from a file, and note on the file that it was used.

    Nothing of a refused file stays in `payload`.

    Raises:
        RefusedBlock: The file is damaged, or of another content.
        OSError: The system's; `FileNotFoundError` where there is no file.
    """
    descriptor = os.open(path, _READ_FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file_bytes(len(payload)):
            raise RefusedBlock("size")
        if status.st_uid != os.geteuid():
            raise RefusedBlock("owner")
        found = bytearray(HEADER_BYTES)
        expected = _header(origin, len(payload))
        if _fill(descriptor, memoryview(found)):
            expected[_CHECKSUM] = found[_CHECKSUM]
        if found != expected:
            raise RefusedBlock("other content" if found.startswith(_MAGIC) else "not a block")
        is_whole = _fill(descriptor, payload)
        if not is_whole or found[_CHECKSUM] != _checksum(found, payload):
            payload[:] = bytes(len(payload))
            raise RefusedBlock("checksum")
        _note_use(descriptor)
    finally:
        os.close(descriptor)


def _header(origin: Origin, payload_bytes: int) -> bytearray:
    """Return the header without its checksum."""
    body = b"".join(origin)
    room = HEADER_BYTES - _CHECKSUM.stop
    if len(body) > room:
        raise InvalidRequest(f"{len(body)} bytes say what a block was computed from, the limit is {room}")
    lengths = _LENGTHS.pack(_MAGIC, len(origin.namespace), len(origin.parent), len(origin.tokens), 0, payload_bytes)
    header = bytearray(HEADER_BYTES)
    header[: len(lengths)] = lengths
    header[_CHECKSUM.stop : _CHECKSUM.stop + len(body)] = body
    return header


def _checksum(header: bytearray, payload: memoryview) -> bytes:
    checksum = xxhash.xxh3_128(header[: _CHECKSUM.start])
    checksum.update(header[_CHECKSUM.stop :])
    checksum.update(payload)
    return checksum.digest()


def _fill(descriptor: int, target: memoryview) -> bool:
    """Read until `target` is full; False where the file ends before."""
    while target:
        count = os.readv(descriptor, [target])
        if not count:
            return False
        target = target[count:]
    return True


def _note_use(descriptor: int) -> None:
    try:
        os.utime(descriptor)
    except OSError:
        return  # It will be thought older than it is.
