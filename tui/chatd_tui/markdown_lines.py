"""Markdown laid out as lines of a given width.

One widget draws a whole answer from such lines. A widget for each paragraph and list item, as Textual's Markdown has,
is laid out anew with every piece of an answer that streams, which takes longer the more of them are on the screen.

The text is remote: HTML is text, nothing is parsed as console markup, and a link is a click that the widget is told of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from textual.content import Content
from textual.style import Style

Highlight = Callable[[str, str], Content]
"""Colors code of a language; returns the same text."""

MIN_WIDTH = 8
HEADINGS = {"h1": "bold underline $primary", "h2": "bold $primary", "h3": "bold $secondary"}
BULLETS = "•◦▪"
COLUMN_GAP = 2
# A block of more characters is laid out in stretches; reading one this long takes a few milliseconds.
LONG_BLOCK = 3000
MIN_COLUMN = 4


def make_parser() -> MarkdownIt:
    """Return the Markdown parser for remote text: HTML is text."""
    return MarkdownIt("gfm-like", {"html": False})


_PARSER = make_parser()
_BLOCK_PARSER = make_parser().disable(["inline", "linkify", "text_join"])
"""Tells where blocks begin, and reads nothing of what is in them, which is more than half of the time."""


def split_growing(source: str) -> list[tuple[str, bool]]:
    """Cut a document that grows at its end, so that only its last stretch has to be laid out anew.

    Returns:
        Stretches that make up the source, each with whether it follows the one before it without a blank line. All
        but the last can grow no more: they are whole blocks, or the beginning of a block that became very long.
    """
    tokens = _BLOCK_PARSER.parse(source)
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
    cuts = dict.fromkeys((line for line in starts if line > 0), False)
    last = max(starts, default=0)
    lines = source.split("\n")
    rest = "\n".join(lines[last:])
    if len(rest) > LONG_BLOCK:
        items = [token.map[0] for token in tokens if token.type == "list_item_open" and token.level == 1 and token.map]
        if items and items[-1] > last:
            cuts[items[-1]] = True
            rest = "\n".join(lines[items[-1] :])
    edges = [0, *sorted(cuts)]
    stretches = [
        ("\n".join(lines[begin:end]) + "\n", cuts.get(begin, False)) for begin, end in itertools.pairwise(edges)
    ]
    flows = cuts.get(edges[-1], False)
    if len(rest) > LONG_BLOCK and not any(token.type in ("fence", "code_block", "table_open") for token in tokens):
        cut = rest.rfind(" ", len(rest) // 2) + 1 or len(rest)
        return [*stretches, (rest[:cut], flows), (rest[cut:], True)]
    return [*stretches, (rest, flows)]


def render(source: str, width: int, highlight: Highlight) -> list[Content]:
    """Return the lines of a document, none wider than `width`; a blank line parts its blocks."""
    root = SyntaxTreeNode(_parse(source))
    return _Renderer(highlight).blocks(root.children, max(MIN_WIDTH, width))


def code_lines(content: Content, width: int) -> list[Content]:
    """Return code on a panel of its own, folded at the edge, with a margin of a cell."""
    inner = max(2, width - 4)
    lines = [Content("")]
    for line in content.split(allow_blank=True):
        lines += line.expand_tabs(4).fold(inner)
    lines.append(Content(""))
    return [_panel(line, width) for line in lines]


def _parse(source: str) -> list[Token]:
    return _PARSER.parse(source)


def _panel(line: Content, width: int) -> Content:
    room = max(0, width - 2 - line.cell_length)
    return line.pad(2, room).stylize_before("$foreground on $surface").truncate(width)


class _Renderer:
    """Lays out one document."""

    def __init__(self, highlight: Highlight) -> None:
        self._highlight = highlight

    def blocks(
        self, nodes: Sequence[SyntaxTreeNode], width: int, *, depth: int = 0, tight: bool = False
    ) -> list[Content]:
        lines: list[Content] = []
        for node in nodes:
            block = self._block(node, width, depth)
            if lines and block and not tight:
                lines.append(Content(""))
            lines += block
        return lines

    def _block(self, node: SyntaxTreeNode, width: int, depth: int) -> list[Content]:
        match node.type:
            case "paragraph":
                return self._inline(node, width)
            case "heading":
                return [line.stylize_before(HEADINGS.get(node.tag, "bold")) for line in self._inline(node, width)]
            case "bullet_list" | "ordered_list":
                return self._list(node, width, depth)
            case "blockquote":
                inner = self.blocks(node.children, max(MIN_WIDTH, width - 2), depth=depth)
                return [Content.assemble(("▌ ", "$line"), line.stylize_before("$muted")) for line in inner]
            case "fence" | "code_block":
                language = node.info.split()[0] if node.info.split() else ""
                return code_lines(self._highlight(node.content.rstrip("\n"), language), width)
            case "hr":
                return [Content.styled("─" * width, "$line")]
            case "table":
                return self._table(node, width)
            case _:
                return Content(node.content).wrap(width) if node.content else self.blocks(node.children, width)

    def _list(self, node: SyntaxTreeNode, width: int, depth: int) -> list[Content]:
        # An item whose paragraphs are hidden belongs to a tight list, whose items stand close together.
        tight = all(child.hidden for item in node.children for child in item.children if child.type == "paragraph")
        start = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else 0
        lines: list[Content] = []
        for number, item in enumerate(node.children, start):
            marker = f"{number}. " if node.type == "ordered_list" else f"{BULLETS[depth % len(BULLETS)]} "
            inner = self.blocks(item.children, max(MIN_WIDTH, width - len(marker)), depth=depth + 1, tight=tight)
            if lines and not tight:
                lines.append(Content(""))
            for index, line in enumerate(inner or [Content("")]):
                lines.append(Content.assemble((marker, "$primary") if index == 0 else " " * len(marker), line))
        return lines

    def _table(self, node: SyntaxTreeNode, width: int) -> list[Content]:
        rows = [[self._content(cell) for cell in row.children] for part in node.children for row in part.children]
        columns = [max(MIN_COLUMN, *(cell.cell_length for cell in column)) for column in zip(*rows, strict=False)]
        if not columns:
            return []
        columns = _fit(columns, width - COLUMN_GAP * (len(columns) - 1))
        lines: list[Content] = []
        for number, row in enumerate(rows):
            cells = [cell.wrap(columns[index]) for index, cell in enumerate(row[: len(columns)])]
            for parts in itertools.zip_longest(*cells, fillvalue=Content("")):
                padded = [part.pad_right(max(0, columns[i] - part.cell_length)) for i, part in enumerate(parts)]
                line = Content(" " * COLUMN_GAP).join(padded).truncate(width)
                lines.append(line.stylize_before("bold $primary") if number == 0 else line)
            if number == 0:
                rule = (" " * COLUMN_GAP).join("─" * column for column in columns)
                lines.append(Content.styled(rule, "$line").truncate(width))
        return lines

    def _inline(self, node: SyntaxTreeNode, width: int) -> list[Content]:
        content = self._content(node)
        return [line for part in content.split(allow_blank=True) for line in part.wrap(width)]

    def _content(self, node: SyntaxTreeNode) -> Content:
        """Return the text of a block's inline children, a newline where it breaks for certain."""
        inline = node.children[0] if node.children else None
        return _text(inline.children) if inline is not None else Content("")


def _text(nodes: Sequence[SyntaxTreeNode]) -> Content:
    return Content.assemble(*[_span(node) for node in nodes])


def _span(node: SyntaxTreeNode) -> Content:
    match node.type:
        case "softbreak":
            return Content(" ")
        case "hardbreak":
            return Content("\n")
        case "code_inline":
            return Content.styled(node.content, "$accent on $panel")
        case "strong":
            return _text(node.children).stylize("bold")
        case "em":
            return _text(node.children).stylize("italic")
        case "s":
            return _text(node.children).stylize("strike")
        case "link":
            return _link(_text(node.children), str(node.attrs.get("href", "")))
        case "image":
            return _link(Content.assemble("[image: ", _text(node.children), "]"), str(node.attrs.get("src", "")))
        case _:
            return Content(node.content) if node.content else _text(node.children)


def _link(text: Content, href: str) -> Content:
    return text.stylize("underline $primary").stylize(Style.from_meta({"@click": f"link({href!r})"}))


def _fit(columns: Sequence[int], width: int) -> list[int]:
    """Return the columns' widths so that they fit in `width` where they can: the widest give most."""
    fitted = list(columns)
    while sum(fitted) > width and max(fitted) > MIN_COLUMN:
        widest = fitted.index(max(fitted))
        rest = sum(fitted) - fitted[widest]
        others = max((column for index, column in enumerate(fitted) if index != widest), default=MIN_COLUMN)
        fitted[widest] = max(MIN_COLUMN, min(fitted[widest] - 1, max(width - rest, others)))
    return fitted
