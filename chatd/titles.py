"""The title that a conversation gets from its first message."""

from __future__ import annotations

import re

MAX_AUTO_TITLE = 60
_LOOKED_AT = 8192
_BREAK = re.compile(r"\n[ \t]*\n|\n(?=[ \t]*(?:`{3}|~{3}))")
"""What a paragraph ends at: a blank line, or a fence, as of an attached file."""
_FENCE = re.compile(r"[ \t]*(?:`{3,}|~{3,})[^\n]*(?:\n|\Z)")


def title_of(content: str) -> str:
    """Return the first words of a message's first paragraph on one line, without characters that are not printable.

    The text of an attached file is in a fence further down, and is not in the title; a message that begins with a
    fence is called by what is in it.
    """
    for paragraph in _BREAK.split(content[:_LOOKED_AT].replace("\r", "")):
        text = _FENCE.sub("", paragraph, count=1) if _FENCE.match(paragraph) else paragraph
        line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * MAX_AUTO_TITLE]).split())
        if line:
            break
    else:
        return ""
    if len(line) <= MAX_AUTO_TITLE:
        return line
    cut = line[:MAX_AUTO_TITLE].rsplit(" ", 1)[0]
    return cut + "…"
