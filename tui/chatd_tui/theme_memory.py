"""The theme that was chosen last, for the next start."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from chatd.config import theme_name, theme_path
from chatd_tui.theme import CHATD, THEMES, check_theme

MAX_BYTES = 256


class ThemeMemory:
    """Keeps the name of a theme in a file.

    Args:
        path: The file, which its owner alone can read; None keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def recall(self) -> str | None:
        """Return the theme that was kept; None where there is none, or none that is known here."""
        if self._path is None:
            return None
        with suppress(OSError), self._path.open("rb") as file:
            name = file.read(MAX_BYTES).decode(errors="replace").strip()
            return name if name in THEMES else None
        return None

    def keep(self, name: str) -> None:
        """Write a theme's name in one step; where that cannot be done, it holds until the client ends."""
        if self._path is None:
            return
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(name + "\n")
                new.replace(self._path)
            finally:
                new.unlink(missing_ok=True)


def usual_memory() -> ThemeMemory:
    """Return that of this user."""
    return ThemeMemory(theme_path())


def first_theme(named: str | None = None) -> str:
    """Return the theme to begin with: the one that is named, else `CHATD_THEME`'s, else the last chosen, else our own.

    Raises:
        ConfigError: There is no theme of the name that was given.
    """
    return check_theme(named or theme_name() or usual_memory().recall() or CHATD.name)
