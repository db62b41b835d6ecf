"""What a person sent before, for the input to bring back: in memory, and in a file where that is wanted."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from chatd.clean import clean

MAX_ENTRIES = 500
MAX_ENTRY_CHARS = 16_384
MAX_FILE_BYTES = 8 * 1024 * 1024


class InputHistory:
    """Sent texts, oldest first, and where in them the input is.

    A recalled text that is changed is a new draft: going back from there begins at the newest again, and comes back to
    it, so that nothing that was typed is lost. Texts longer than `MAX_ENTRY_CHARS` and those that begin with a blank
    are not remembered.

    Args:
        path: The file, one JSON string a line, readable by its owner only; None keeps nothing when the client ends.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: list[str] = []
        self._at: int | None = None
        self._draft = ""

    def load(self) -> None:
        """Read the file, as far as it can be read; the oldest of too many are dropped from it."""
        if self._path is None:
            return
        data = b""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_FILE_BYTES))
            data = file.read(MAX_FILE_BYTES)
        lines = data.decode(errors="replace").splitlines()
        self._entries = [*_entries(lines), *self._entries][-MAX_ENTRIES:]
        if len(lines) > 2 * MAX_ENTRIES or len(data) == MAX_FILE_BYTES:
            self._write("".join(map(_line, self._entries)), os.O_TRUNC)

    def add(self, text: str) -> bool:
        """Remember what was sent and go to the end; False where it is not to be remembered."""
        self._at, self._draft = None, ""
        if not text.strip() or text[0].isspace() or len(text) > MAX_ENTRY_CHARS or text in self._entries[-1:]:
            return False
        self._entries = [*self._entries, text][-MAX_ENTRIES:]
        return True

    def save(self, text: str) -> None:
        """Append a text to the file; one that cannot be written is remembered until the client ends."""
        self._write(_line(text), os.O_APPEND)

    def back(self, shown: str) -> str | None:
        """Return the text before the one that is shown, None where there is none."""
        if not self.shows(shown):
            self._at, self._draft = len(self._entries), shown
        assert self._at is not None, "the place is known"
        if self._at == 0:
            return None
        self._at -= 1
        return self._entries[self._at]

    def forward(self, shown: str) -> str | None:
        """Return the text after the one that is shown, at last what was begun; None where nothing was recalled."""
        if not self.shows(shown):
            return None
        assert self._at is not None, "the place is known"
        self._at += 1
        if self._at < len(self._entries):
            return self._entries[self._at]
        draft, self._at, self._draft = self._draft, None, ""
        return draft

    def shows(self, text: str) -> bool:
        """Return whether this text stands in the input because it was recalled."""
        return self._at is not None and self._at < len(self._entries) and self._entries[self._at] == text

    def _write(self, text: str, flag: int) -> None:
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flag, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, 0o600)
                file.write(text)


def _line(text: str) -> str:
    return json.dumps(text) + "\n"


def _entries(lines: list[str]) -> list[str]:
    """Return what the lines hold; what is no text is passed over, and what a terminal would obey is made visible."""
    found: list[str] = []
    for line in lines:
        with suppress(ValueError):
            text = json.loads(line)
            if isinstance(text, str) and text.strip() and len(text) <= MAX_ENTRY_CHARS:
                found.append(clean(text))
    return found
