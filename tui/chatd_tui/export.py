"""A conversation as a file, and the code blocks of a message."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chatd import transcript_file
from chatd.clean import clean_line
from chatd.errors import InvalidRequest
from chatd.protocol import Item, SessionInfo
from chatd.transcript_file import FORMATS, Format, format_of
from chatd_tui.markdown_lines import make_parser

_FORMAT = re.compile(r"(?:^|\s)--format(?:=|\s+)(\S+)(?=\s|$)")
_OUTPUT = re.compile(r"\A(?:-o|--output)(?:=|\s+|$)")


def wished(typed: str) -> tuple[str, Format]:
    """Return the file and the format that are asked for: `FILE`, with `--format NAME` before or after it.

    A file's name may have blanks in it, and `-o` or `--output` before it, as `chatd sessions export` takes it.

    Raises:
        InvalidRequest: There is no file, or no such format.
    """
    formats = [match.group(1) for match in _FORMAT.finditer(typed)]
    name = _OUTPUT.sub("", _FORMAT.sub(" ", typed).strip())
    wrong = next((each for each in formats if each not in FORMATS), None)
    if wrong is not None:
        raise InvalidRequest(f"there is no format {clean_line(wrong, 20)!r}", hint=f"there are {', '.join(FORMATS)}")
    if not name:
        raise InvalidRequest("no file is named", hint="/export FILE, such as talk.md")
    return name, next((each for each in FORMATS if each in formats[-1:]), format_of(name))


def rendered(file_format: Format, info: SessionInfo, items: Sequence[Item]) -> str:
    """Return a conversation in a format."""
    if file_format == "json":
        return as_json(info, items)
    render = transcript_file.as_html if file_format == "html" else transcript_file.as_markdown
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
