"""Copies text: by the terminal (OSC 52), and into a file for terminals that do not let it."""

from __future__ import annotations

import os
from pathlib import Path

# Longer OSC 52 payloads are cut or dropped by common terminals.
MAX_OSC52_BYTES = 74_994 * 3 // 4


def save_copy(text: str, folder: Path) -> Path | None:
    """Write `text` to `folder`/copied.txt for its owner only; None where that cannot be."""
    path = folder / "copied.txt"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError:
        return None
    return path
