"""Text files that a message names as `@path`: finding them, completing their names, and putting them into the message.

A word `@path`, or `@"path with blanks"`, names a file that exists; other words with an @ are words. A path that says it
is one (`@/…`, `@./…`, `@../…`, `@~…` or in quotes) must be there. In what is sent the names have no @, and each file
follows as a fenced block.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chatd.clean import clean_line
from chatd.errors import InvalidRequest
from chatd_tui.commands import Suggestion

MAX_SCANNED = 2000
MAX_OFFERED = 50
FRAME_OVERHEAD_BYTES = 1024
_NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|([^\s@"]\S*))')
_BEGUN = re.compile(r'(?<!\S)@(?:"([^"\n]*)|([^\s"]*))\Z')
_EXPLICIT = ("/", "./", "../", "~")
_TRAILING = ".,;:!?)"


@dataclass(frozen=True)
class Attachment:
    """A file, how long it is, and how it was named: cleaned, and as it was typed after the @."""

    name: str
    typed: str
    path: Path
    size_bytes: int


def attachments(text: str, folder: Path) -> list[Attachment]:
    """Return the files that a message names, each once; relative paths are from `folder`.

    Raises:
        InvalidRequest: One that says that it is a path is no file.
    """
    found: dict[Path, Attachment] = {}
    for match in _NAMED.finditer(text):
        quoted, bare = match.groups()
        name = quoted or bare
        # A sentence may end behind a name.
        for candidate in dict.fromkeys((name, name if quoted else name.rstrip(_TRAILING))):
            path = folder / Path(os.path.expanduser(candidate))
            size = _file_size(path)
            if size is not None:
                typed = f'"{candidate}"' if quoted else candidate
                found.setdefault(path, Attachment(clean_line(candidate), typed, path, size))
                break
        else:
            if quoted or name.startswith(_EXPLICIT):
                raise InvalidRequest(
                    f"{clean_line(name, 80)} is no file that can be attached",
                    param="@",
                    hint="a blank after the @ makes it a word",
                )
    return list(found.values())


def with_attachments(text: str, files: list[Attachment], limit_bytes: int) -> str:
    """Return the message with the files' texts.

    Args:
        text: As it was typed.
        files: What it names.
        limit_bytes: What a message may have (`limits.frame_bytes`).

    Raises:
        InvalidRequest: A file is no text or cannot be read, or all of it is too much.
    """
    sizes = ", ".join(f"{file.name} has {file.size_bytes}" for file in files)
    blocks = [_block(file, limit_bytes) for file in files]
    typed = {file.typed for file in files}

    def plain(match: re.Match[str]) -> str:
        name = match.group()[1:]
        return name if name in typed or name.rstrip(_TRAILING) in typed else match.group()

    # Names alone: `ann@a.txt` and `@a.txt.old` are words, also where `@a.txt` is a file.
    message = "\n\n".join([_NAMED.sub(plain, text), *blocks])
    size = len(msgspec.json.encode(message)) + FRAME_OVERHEAD_BYTES
    if size > limit_bytes:
        raise InvalidRequest(
            f"the message makes a frame of {size} bytes, the limit is {limit_bytes} (limits.frame_bytes): {sizes}",
            code="frame_too_large",
        )
    return message


def completions(text: str, folder: Path) -> list[Suggestion]:
    """Return what a begun `@path` at the end of a text can become; a folder can be gone into."""
    begun = _BEGUN.search(text)
    if begun is None:
        return []
    quoted, bare = begun.groups()
    typed = bare if quoted is None else quoted
    head, name = os.path.split(typed)
    place = folder / Path(os.path.expanduser(head))
    rows: list[tuple[str, bool, int]] = []
    try:
        with os.scandir(place) as entries:
            for _, entry in zip(range(MAX_SCANNED), entries, strict=False):
                hidden = entry.name.startswith(".") and not name.startswith(".")
                if entry.name.startswith(name) and not hidden and '"' not in entry.name and entry.name.isprintable():
                    rows.append((entry.name, entry.is_dir(), entry.stat(follow_symlinks=False).st_size))
    except OSError:
        return []
    before = text[: begun.start()]
    offered = []
    for found, is_folder, size in sorted(rows)[:MAX_OFFERED]:
        path = os.path.join(head, found) + ("/" if is_folder else "")
        open_quote = '"' if quoted is not None or re.search(r"\s", path) else ""
        close_quote = "" if is_folder else open_quote
        label = clean_line(found + ("/" if is_folder else ""), 60)
        offered.append(
            Suggestion(f"{before}@{open_quote}{path}{close_quote}", label, "" if is_folder else f"{size} bytes")
        )
    return [] if len(offered) == 1 and offered[0].text == text else offered


def _file_size(path: Path) -> int | None:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _block(file: Attachment, limit_bytes: int) -> str:
    try:
        with file.path.open("rb") as source:
            data = source.read(limit_bytes + 1)
    except OSError as error:
        raise InvalidRequest(f"{file.name} cannot be read: {error.strerror}", param="@") from None
    if len(data) > limit_bytes:
        raise InvalidRequest(
            f"{file.name} has {max(file.size_bytes, len(data))} bytes, the limit is {limit_bytes} (limits.frame_bytes)",
            code="frame_too_large",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file.name} is no UTF-8 text (at byte {error.start})", param="@") from None
    if "\0" in text:
        raise InvalidRequest(f"{file.name} is no text (it has a NUL at {text.index(chr(0))})", param="@")
    # Longer than any that is in it, so that the block ends where the file does.
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    language = re.sub(r"[^0-9A-Za-z+-]", "", file.path.suffix)
    return f"{file.name}:\n{fence}{language}\n{text.rstrip(chr(10))}\n{fence}"
