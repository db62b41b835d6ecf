"""Plain text laid out as lines of a given width."""

from __future__ import annotations

from textual.content import Content

LONG_TEXT = 20_000
"""More characters are cut at the edge and not between words, which is ten times faster."""


def plain_lines(text: str, width: int) -> list[Content]:
    """Return the lines of a text, none wider than `width`."""
    is_long = len(text) > LONG_TEXT
    lines: list[Content] = []
    for line in text.split("\n"):
        if len(line) <= width and line.isascii() and "\t" not in line:
            lines.append(Content(line))
        elif is_long and line.isascii():
            row = line.expandtabs(4)
            lines += [Content(row[start : start + width]) for start in range(0, len(row), width)]
        elif is_long:
            lines += Content(line).expand_tabs(4).fold(width)
        else:
            lines += Content(line).wrap(width)
    return lines
