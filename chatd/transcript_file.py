"""A conversation as a file to read: Markdown and HTML. Knows neither a journal nor a screen.

Nothing that was said can look like the file's own words. In Markdown each message is a quote, whose every line begins
with ">", below a heading that never does; and what would reach out of a quote is written so that it does not: raw HTML
and definitions of links, outside of code. HTML escapes all of it. Both are clean of characters that a terminal obeys.

Nor does a file that is shown fetch or run anything that was said: in Markdown an image is its own text, and a block of
code names no language that a reader of Markdown draws, runs or passes on as HTML.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Literal, get_args

from chatd.clean import clean, clean_line

NAMES = {"user": "You", "assistant": "Assistant", "system": "System"}
UNTITLED = "Conversation"
# Fences at the very beginning of a line alone: nothing but their own end, or the quote's, ends those.
_FENCE = re.compile(r"(`{3,})(?=[^`]*\Z)|(~{3,})")
# Any other may be one or not, by what it is in: a list, a quote, a definition.
_DOUBTFUL_FENCE = re.compile(r"((?:[ \t>:+*#()\d.-]|[A-Za-z](?=[.)]))+)((`{3,})(?=[^`]*\Z)|(~{3,}))")
_INDENTED_MARKS = re.compile(r"\A[ \t]+(?=```|~~~)")
_BLANKS = " \t"
"""All that a line without anything has; to Markdown other white space is text."""
_RUN = re.compile(r"`+")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_NAMED_FENCE = re.compile(r"((?:[ \t>:+*#()\d.-]|[A-Za-z](?=[.)]))*(?:`{3,}+(?=[^`]*\Z)|~{3,}+))\s*(\S.*)", re.DOTALL)
_LANGUAGE = re.compile(r"[\w+#.-]{1,32}")
_RAW_SPAN = re.compile(r"\A\{(?==)")
_DRAWN = re.compile(
    "abc|asciinema|blockdiag|bpmn|bytefield|chart|csv-table|d2|dataview|dataviewjs|ditaa|dot|embed|excalidraw|flow"
    "|geojson|gnuplot|graphviz|html-preview|iframe|include|infographic|kroki|markmap|math|mermaid|mindmap|nomnoml"
    "|pikchr|plantuml|puml|query|sequence|stl|svg|svgbob|symbolator|tabs|topojson|uml|vega|vega-lite|vegalite|viz"
    "|wavedrom|wireviz|zenuml",
    re.IGNORECASE,
)
"""Languages of code that some readers draw, from addresses in it or by a service, in place of showing the code."""
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
    "h2{font-size:1rem;margin:1.5rem 0 .25rem;color:#666}"
    "pre{font:inherit;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}"
    ".user pre{background:#f2f2f2;padding:.5rem .75rem;border-radius:.5rem}"
)

Said = tuple[str, str]
"""A role and what it said."""


Format = Literal["md", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)


def format_of(name: str) -> Format:
    """Return what a file's name asks for: JSON for .json, HTML for .html or .htm, else Markdown."""
    endings: dict[str, Format] = {".json": "json", ".html": "html", ".htm": "html"}
    return endings.get(PurePath(name).suffix.lower(), "md")


def as_markdown(title: str, said: Sequence[Said]) -> str:
    """Return a conversation as Markdown: a heading and a quote for each message."""
    parts = [f"# {_outside_code(clean_line(title)) or UNTITLED}"]
    for role, text in said:
        quote = "\n".join(f"> {line}" if line else ">" for line in _contained(clean(text)))
        parts += [f"## {NAMES[role]}", quote]
    return "\n\n".join(parts) + "\n"


def as_html(title: str, said: Sequence[Said]) -> str:
    """Return a conversation as a page that loads and runs nothing."""
    heading = html.escape(clean_line(title) or UNTITLED)
    body = "\n".join(
        f'<section class="{role}"><h2>{NAMES[role]}</h2><pre>{html.escape(clean(text))}</pre></section>'
        for role, text in said
    )
    return (
        '<!doctype html>\n<html><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{heading}</title><style>{_STYLE}</style></head>\n<body><h1>{heading}</h1>\n{body}\n</body></html>\n"
    )


def write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet, for its owner only.

    Raises:
        OSError: It exists, or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _contained(text: str) -> Iterator[str]:
    """Give the lines of a text, in which nothing but code has HTML or defines a link.

    Code is taken for such only where every reader of Markdown does: fences at the beginning of a line, and spans whose
    marks are all on one line, none of them open before it. Anything else is escaped, and in code that is seen.
    """
    fence, doubtful, is_certain, is_begun = "", _Doubtful(), True, False
    for unaligned in text.split("\n"):
        # The quote's own mark moves what a tab before a fence comes to.
        line = _INDENTED_MARKS.sub(lambda indent: indent.group().expandtabs(4), unaligned, count=1)
        if not fence:
            line = _shown_as_code(line)
        if fence:
            if re.fullmatch(rf" {{0,3}}{fence[0]}{{{len(fence)},}}[ \t]*", line):
                fence, is_certain, is_begun = "", True, False
            yield line
        elif doubtful.may_have(line):
            is_certain = False
            yield _outside_code(line)
        elif opening := _FENCE.match(line):
            fence = opening.group()
            yield line
        elif not line.strip(_BLANKS):
            is_certain, is_begun = True, False
            yield line
        else:
            parts = _spans(line) if is_certain else None
            if parts is not None:
                # A link's address, and the name that a definition begins with, are read before spans are.
                is_begun = is_begun or any("[" in text for text in parts[::2])
                is_address = any("](" in text for text in parts[::2])
                if is_address or (is_begun and any("]:" in code for code in parts[1::2])):
                    parts = None
            is_certain = parts is not None
            parts = [line] if parts is None else parts
            yield "".join(
                part if number % 2 else _outside_code(_RAW_SPAN.sub(r"\{", part) if number else part)
                for number, part in enumerate(parts)
            )


class _Doubtful:
    """Where a fence may be open, or not, by what it is in; it is sure to be over where its indentation ends it."""

    def __init__(self) -> None:
        self._indent = self._marks = ""
        self._is_lost = False

    def may_have(self, line: str) -> bool:
        """Take the next line outside of fences that are certain; return whether it may be in one, or at its ends."""
        if self._is_lost:
            return True
        if not self._marks:
            opening = _DOUBTFUL_FENCE.match(line)
            if opening is not None:
                self._indent, self._marks = opening.group(1), opening.group(2)
                # What is in a list's or a quote's first line may end with that.
                self._is_lost = bool(self._indent.strip(" "))
            return opening is not None
        end = rf"{self._marks[0]}{{{len(self._marks)},}}[ \t]*"
        if re.fullmatch(self._indent + end, line):
            self._marks = ""
        elif line.strip(_BLANKS):
            # Other readers may see its end here: then what follows is no code to them, and what looks like it is not.
            self._is_lost = not line.startswith(self._indent) or bool(re.fullmatch(rf"[ \t]*{end}", line))
        return True


def _spans(line: str) -> list[str] | None:
    """Return a line cut into text and code spans by turns; None where its backticks can be read in several ways."""
    runs = [(run.start(), run.end()) for run in _RUN.finditer(line)]
    # A table's cells are cut first.
    if runs and ("|" in line or "\\" in line):
        return None
    parts, end = [], 0
    while runs:
        start, stop = runs.pop(0)
        closing = next((n for n, (a, b) in enumerate(runs) if b - a == stop - start), None)
        if closing is None:
            return None
        parts += [line[end:start], line[start : runs[closing][1]]]
        end = runs[closing][1]
        del runs[: closing + 1]
    return [*parts, line[end:]]


def _outside_code(text: str) -> str:
    # An escaped bracket begins neither an image nor a link, whatever stands before the mark.
    return _TAG.sub("&lt;", text).replace("]:", "]\\:").replace("![", "!\\[").replace("`{=", "`\\{=")


def _shown_as_code(line: str) -> str:
    """Return a line that may begin a block of code so that readers show its code, as what it is said to be.

    A word takes the place of what it is not to be: without any it could be the end of another block.
    """
    found = _NAMED_FENCE.fullmatch(line)
    if found is None:
        return line
    opening, info = found.groups()
    language = info.split()[0]
    if not _LANGUAGE.fullmatch(language) or _DRAWN.fullmatch(language):
        return f"{opening}text"
    # What follows the name are orders to some readers.
    return line if info.strip() == language else f"{opening}{language}"
