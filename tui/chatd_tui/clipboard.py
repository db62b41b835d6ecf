"""Copies text: by the terminal (OSC 52), and into a file for terminals that do not let it.

A terminal does not answer whether it took a text, so nothing here says that it did. What is known to stand in the way
is said: a terminal without clipboards, a multiplexer that keeps the text, a machine that is not the person's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from chatd_tui.views import short_path

# Longer OSC 52 payloads are cut or dropped by common terminals.
MAX_OSC52_BYTES = 74_994 * 3 // 4
TMUX_TIMEOUT_S = 1.0


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


def obstacle(environment: Mapping[str, str]) -> str:
    """Return what keeps a text from the person's clipboard, as far as that is known; "" where nothing is known to.

    Asks tmux for its setting, and waits for that: not for the event loop.
    """
    if environment.get("TMUX"):
        setting = _tmux_setting(environment)
        return "" if setting in ("on", "") else f"tmux keeps it, its set-clipboard is {setting}"
    if environment.get("STY"):
        return "screen does not pass it on"
    if environment.get("TERM") == "linux":
        return "the console has no clipboard"
    if environment.get("TERM_PROGRAM") == "Apple_Terminal":
        return "Terminal.app does not take it"
    return ""


def _tmux_setting(environment: Mapping[str, str]) -> str:
    """Return tmux' `set-clipboard`: only with "on" it takes what programs copy; "" where it does not tell."""
    program = shutil.which("tmux", path=environment.get("PATH"))
    if program is None:
        return ""
    try:
        asked = subprocess.run(  # noqa: S603
            [program, "show-options", "-gsv", "set-clipboard"],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=TMUX_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    setting = asked.stdout.strip()
    return setting if setting in ("on", "external", "off") else ""


def told(what: str, path: Path | None, reason: str, *, is_remote: bool) -> tuple[str, str, str]:
    """Return how to say what became of a copy: the kind of the line, its text and its hint.

    Args:
        what: Was copied.
        path: Of the file that has it; None where it could not be written.
        reason: Why it is not in the clipboard; "" where nothing is known to keep it from there.
        is_remote: The file is on another machine than the person.
    """
    where = f"in {short_path(path)}{' over there' if is_remote else ''}" if path is not None else ""
    if not reason:
        hint = "it does not say if it took it" + (f"; also {where}" if where else "; no file could be written")
        return "notice", f"sent {what} to the terminal's clipboard", hint
    if where:
        return "notice", f"{what} is {where}", f"not in the clipboard: {reason}"
    return "warning", f"{what} is not copied: {reason}", "and no file could be written"
