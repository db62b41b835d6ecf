"""Keys that make a line instead of sending, as terminals report them."""

from __future__ import annotations

import enum
from typing import Any, cast

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS

NEWLINE_KEYS = frozenset(
    {"shift+enter", "alt+enter", "ctrl+enter", "ctrl+j", "alt+ctrl+j", "shift+\r", "alt+\r", "ctrl+\r"}
)
"""The last three are what Textual makes of xterm's "modify other keys" reports, which tmux passes on."""


class _Key(str, enum.Enum):  # noqa: UP042
    """Textual's table wants members with a `value`."""

    ALT_ENTER = "alt+enter"


def recognize_alt_enter() -> None:
    """Let Alt+Enter of terminals without the Kitty protocol (ESC, CR) be a key of its own; Textual reads Enter."""
    table = cast(dict[str, Any], ANSI_SEQUENCES_KEYS)
    for sequence in ("\x1b\r", "\x1b\n"):
        table.setdefault(sequence, (_Key.ALT_ENTER,))
