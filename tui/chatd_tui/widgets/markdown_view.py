"""A widget that draws Markdown which grows at its end; growing costs the same however much there is."""

from __future__ import annotations

from dataclasses import dataclass, field

from textual import work
from textual.content import Content

from chatd_tui.highlighting import Highlighter
from chatd_tui.markdown_lines import LONG_BLOCK, code_lines, render, split_growing
from chatd_tui.messages import LinkChosen
from chatd_tui.widgets.lines_view import LinesView

_BLANK = Content("")


@dataclass
class _Part:
    """A stretch of the source, whether no blank line is before it, and its lines once it is laid out."""

    source: str
    flows: bool = False
    lines: list[Content] = field(default_factory=list)


class MarkdownView(LinesView):
    """Draws Markdown, then the lines of a code fence that is still open.

    Args:
        source: Cleaned text.
        highlight: Shared by the views of an app.
    """

    def __init__(self, source: str = "", highlight: Highlighter | None = None) -> None:
        super().__init__()
        self._highlight = highlight or Highlighter()
        self._settled: list[_Part] = []
        self._tail = _Part("")
        self._fence: str | None = None
        self._fence_lines: list[Content] = []
        self._drawn_lines: list[Content] = []
        self._num_settled_lines = 0
        self._take(source)

    @property
    def source(self) -> str:
        """The Markdown that is drawn, without the open fence."""
        return "".join(part.source for part in self._settled) + self._tail.source

    def replace(self, source: str) -> None:
        """Draw another text."""
        self._settled, self._tail, self._fence = [], _Part(""), None
        self._take(source)
        self._lay_out_all(self._width)
        self.refresh(layout=True)

    def append(self, source: str, open_fence: str | None = None) -> None:
        """Draw more Markdown, and the code of a fence that is open (None for none)."""
        before = len(self._lines)
        num_settled = len(self._settled)
        if source:
            self._take(source)
        if self._width:
            for part in self._settled[num_settled:]:
                self._add_settled(part)
            if source:
                self._lay_out(self._tail)
        self._show_fence(open_fence)
        self._assemble()
        self.refresh(layout=len(self._lines) != before)

    def _take(self, source: str) -> None:
        """Add text to the last stretch; where it became several, all but the last can grow no more."""
        # Some text takes a time to parse that grows with its square, so much of it is taken in pieces.
        for start in range(0, len(source), LONG_BLOCK):
            flows = self._tail.flows
            piece = source[start : start + LONG_BLOCK]
            for number, (text, follows) in enumerate(split_growing(self._tail.source + piece)):
                if number:
                    self._settled.append(self._tail)
                self._tail = _Part(text, flows if number == 0 else follows)

    # Layout.

    def _lay_out_all(self, width: int) -> None:
        if width != self._width:
            for part in self._settled:
                part.lines = []
        self._width = width
        if not width:
            return
        del self._lines[:]
        self._num_settled_lines = 0
        for part in self._settled:
            self._add_settled(part)
        self._lay_out(self._tail)
        fence, self._fence = self._fence, None
        self._show_fence(fence)
        self._assemble()

    def _add_settled(self, part: _Part) -> None:
        if not part.lines:
            self._lay_out(part)
        del self._lines[self._num_settled_lines :]
        self._add(part.lines, flows=part.flows)
        self._num_settled_lines = len(self._lines)

    def _assemble(self) -> None:
        before = self._drawn_lines
        del self._lines[self._num_settled_lines :]
        self._add(self._tail.lines, flows=self._tail.flows)
        self._add(self._fence_lines)
        self._add(self._under())
        self._drawn_lines = list(self._lines)
        # Lines are drawn again only from the first one that is another.
        pairs = enumerate(zip(before, self._lines, strict=False))
        kept = next((y for y, (old, new) in pairs if old is not new), min(len(before), len(self._lines)))
        self._strips = {y: strip for y, strip in self._strips.items() if y < kept}

    def _under(self) -> list[Content]:
        """Return the lines below the Markdown, for the width that it has."""
        return []

    def _add(self, lines: list[Content], *, flows: bool = False) -> None:
        if lines and self._lines and not flows:
            self._lines.append(_BLANK)
        self._lines += lines

    def _lay_out(self, part: _Part) -> None:
        part.lines = render(part.source, self._width, self._highlight)
        if self._highlight.wants and self.is_attached:
            self._color()

    def _show_fence(self, code: str | None) -> None:
        """Lay out the open fence; only its last line and what follows are laid out anew."""
        before, self._fence = self._fence, code
        if code is None or not self._width:
            self._fence_lines = []
        elif before is not None and self._fence_lines and code.startswith(before) and "\n" in before:
            kept = before.rpartition("\n")[0]
            folded = len(code_lines(Content(before[len(kept) + 1 :]), self._width)) - 2
            rest = code_lines(Content(code[len(kept) + 1 :]), self._width)
            self._fence_lines = self._fence_lines[: -1 - folded] + rest[1:]
        else:
            self._fence_lines = code_lines(Content(code), self._width)

    @work(group="color", exclusive=True)
    async def _color(self) -> None:
        """Draw code again once its colors are known."""
        if await self._highlight.color_wanted():
            for part in (*self._settled, self._tail):
                if "```" in part.source or "~~~" in part.source:
                    part.lines = []
            self._strips.clear()
            self._lay_out_all(self._width)
            self.refresh()

    async def on_mount(self) -> None:
        """Color what was laid out before there was anybody to do it."""
        if self._highlight.wants:
            self._color()

    def action_link(self, href: str) -> None:
        """Tell which link was clicked; nothing opens by itself."""
        self.post_message(LinkChosen(href))
