"""A conversation as a file, and the code blocks of a message."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chatd.clean import clean, clean_line
from chatd.protocol import Item, SessionInfo
from chatd_tui.markdown_lines import make_parser

_NAMES = {"user": "You", "assistant": "Assistant", "system": "System"}


def as_markdown(info: SessionInfo, items: Sequence[Item]) -> str:
    """Return a conversation as Markdown, without characters that a terminal would obey."""
    parts = [f"# {clean_line(info.title) or 'Conversation'}"]
    if info.system and not any(item.role == "system" for item in items):
        parts += ["## System", clean(info.system)]
    for item in items:
        parts += [f"## {_NAMES[item.role]}", clean(item.content)]
    return "\n\n".join(parts) + "\n"


def as_json(info: SessionInfo, items: Sequence[Item]) -> str:
    """Return a conversation exactly, as JSON in ASCII: `{"session": …, "items": […]}`."""
    return json.dumps(msgspec.to_builtins({"session": info, "items": list(items)}), indent=2) + "\n"


def write_new(name: str, text: str) -> Path:
    """Write a file that must not exist, for its owner only, and return where it is; `~` is one's home.

    Raises:
        OSError: It exists, or cannot be written.
        RuntimeError: There is no such home.
        ValueError: That is no file's name.
    """
    path = Path(name).expanduser()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    return path


def code_blocks(markdown: str) -> list[str]:
    """Return the code of every fence, in order; one that is still open counts."""
    return [token.content for token in make_parser().parse(markdown) if token.type == "fence"]
