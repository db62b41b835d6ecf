"""The identity of a model's weights: what it is computed from, and the notes that make it fast the second time.

Two folders with one digest give the same keys and values for the same tokens. So it covers all weights and config.json,
and not the tokenizer, whose ids are given.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from chatd.errors import ModelError
from chatd.models.model_config import CONFIG_FILE

Progress = Callable[[str, float], None]

_CHUNK_BYTES = 1 << 22
_NOTE_VERSION = 1


def sha256_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hex.

    Args:
        path: The file.
        progress: Called with the number of bytes of each chunk that was read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def weights_digest(folder: Path, weights: Sequence[Path], notes_folder: Path, progress: Progress | None = None) -> str:
    """Return the digest of a folder's weights and config.json, in hex.

    A file that was hashed before and has the same size, inode and time of change is not read again.

    Args:
        folder: The model folder.
        weights: Its weight files.
        notes_folder: Where hashes are noted; made if it does not exist, and not needed for the answer.
        progress: Called with ("hashing weights", 0 to 1) while files are read.

    Raises:
        ModelError: `model_corrupt` for a file that cannot be read.
    """
    note_path = notes_folder / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]}.json"
    known = _read_note(note_path)
    files = [folder / CONFIG_FILE, *weights]
    hashes: dict[str, str] = {}
    try:
        stamps = {path.name: _stamp(path) for path in files}
        total = sum(path.stat().st_size for path in files if f"{path.name} {stamps[path.name]}" not in known) or 1
        done = 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress("hashing weights", min(done / total, 1.0))

        for path in files:
            key = f"{path.name} {stamps[path.name]}"
            hashes[key] = known.get(key) or sha256_file(path, count)
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}", code="model_corrupt") from error
    if hashes != known:
        _write_note(note_path, hashes)
    listing = "".join(f"{key.split(' ')[0]}\0{value}\n" for key, value in sorted(hashes.items()))
    return hashlib.sha256(listing.encode()).hexdigest()


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _read_note(path: Path) -> dict[str, str]:
    try:
        note = json.loads(path.read_text())
        if note["version"] != _NOTE_VERSION:
            return {}
        return {str(key): str(value) for key, value in note["hashes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_note(path: Path, hashes: dict[str, str]) -> None:
    # A note only saves time, so a cache folder that cannot be written is no error.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"version": _NOTE_VERSION, "hashes": hashes}, indent=1).encode())
    except OSError:
        return


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a power cut, finds the old content or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
