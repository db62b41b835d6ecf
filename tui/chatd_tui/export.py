"""A conversation as a file, and the code blocks of a message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chatd import transcript_file
from chatd.protocol import Item, SessionInfo
from chatd_tui.markdown_lines import make_parser


def rendered(name: str, info: SessionInfo, items: Sequence[Item]) -> str:
    """Return a conversation as the file's name asks for: JSON for .json, HTML for .html or .htm, else Markdown."""
    ending = Path(name).suffix.lower()
    if ending == ".json":
        return as_json(info, items)
    render = transcript_file.as_html if ending in (".html", ".htm") else transcript_file.as_markdown
    said = [(item.role, item.content) for item in items]
    if info.system and not any(role == "system" for role, _ in said):
        said.insert(0, ("system", info.system))
    return render(info.title, said)


def as_json(info: SessionInfo, items: Sequence[Item]) -> str:
    """Return a conversation exactly, as JSON in ASCII: `{"session": …, "items": […]}`."""
    text = json.dumps(msgspec.to_builtins({"session": info, "items": list(items)}), indent=2)
    # The one control character that JSON lets stand in ASCII.
    return text.replace("\x7f", "\\u007f") + "\n"


def write_new(name: str, text: str) -> Path:
    """Write a file that must not exist, for its owner only, and return where it is; `~` is one's home.

    Raises:
        OSError: It exists, or cannot be written.
        RuntimeError: There is no such home.
        ValueError: That is no file's name.
    """
    path = Path(name).expanduser()
    transcript_file.write_new(path, text)
    return path


def code_blocks(markdown: str) -> list[str]:
    """Return the code of every fence, in order; one that is still open counts."""
    return [token.content for token in make_parser().parse(markdown) if token.type == "fence"]
