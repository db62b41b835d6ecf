"""Splits an answer that streams into Markdown that can be drawn and a code fence that is still open.

A fence that grows as Markdown is parsed and colored anew with each piece, which stalls the screen for hundreds of
milliseconds; as plain text it costs little. So a fence is held back from its opening line until its closing line, and
then goes to Markdown whole: what is drawn as Markdown is always a prefix of the answer, and at the end it is the
answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINES = re.compile(r"[^\n]*\n|[^\n]+")
# A line that may still become a fence's first, and one that is.
_MAYBE_FENCE = re.compile(r"[ \t]*(?:`{0,2}|~{0,2}|`{3,}[^`\n]*|~{3,}[^\n]*)\Z")
_OPENING = re.compile(r"[ \t]*(`{3,})[^`\n]*\n\Z|[ \t]*(~{3,})[^\n]*\n\Z")
# An info string is a word or two; something longer is text that began with backticks.
_MAX_OPENING = 200


@dataclass(frozen=True)
class Pieces:
    """What to draw after a piece of text arrived.

    Attributes:
        markdown: Text to append to the Markdown.
        open_fence: The whole text of the fence that is open, or "" for none.
    """

    markdown: str
    open_fence: str


class FenceSplitter:
    """Takes an answer in pieces of any size; the result does not depend on where it was cut."""

    def __init__(self) -> None:
        self._line = ""
        self._inside_line = False
        self._fence = ""
        self._marker = ""

    def feed(self, text: str) -> Pieces:
        """Take more of the answer."""
        ready: list[str] = []
        for part in _LINES.findall(text):
            self._line += part
            if self._marker:
                self._in_fence(ready)
            else:
                self._in_prose(ready)
        return Pieces("".join(ready), self._fence + self._line if self._marker else "")

    def end(self) -> Pieces:
        """Return what was held back; the answer has ended."""
        rest = self._fence + self._line
        self._line = self._fence = self._marker = ""
        self._inside_line = False
        return Pieces(rest, "")

    def _in_prose(self, ready: list[str]) -> None:
        line = self._line
        ended = line.endswith("\n")
        opening = None if self._inside_line else _OPENING.match(line)
        if opening is not None:
            self._marker = opening.group(1) or opening.group(2)
            self._fence, self._line = line, ""
        elif ended or self._inside_line or len(line) > _MAX_OPENING or not _MAYBE_FENCE.match(line):
            # Only the beginning of a line decides, so the rest of this one is prose as well.
            ready.append(line)
            self._line = ""
            self._inside_line = not ended

    def _in_fence(self, ready: list[str]) -> None:
        if not self._line.endswith("\n"):
            return
        self._fence += self._line
        closing = self._line.strip()
        self._line = ""
        if len(closing) >= len(self._marker) and set(closing) == {self._marker[0]}:
            ready.append(self._fence)
            self._fence = self._marker = ""
