"""Code in answers: a fence that is still open as plain lines, and a closed one, colored off the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from rich.segment import Segment
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets._markdown import MarkdownBlock, MarkdownFence

# Coloring takes about half a millisecond a line; more lines than these are colored in a thread.
MAX_LINES_AT_ONCE = 24
_CACHED_FENCES = 32
_colored: OrderedDict[tuple[str, str, bool, bool], Content] = OrderedDict()


class OpenFence(Widget):
    """Draws the lines of a fence while it grows; a line costs the same however many there are."""

    DEFAULT_CSS = """
    OpenFence { height: auto; margin: 0 0 1 0; background: $surface; display: none; }
    OpenFence.-open { display: block; }
    """
    PADDING_Y = 1
    PADDING_X = 2

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._lines: list[str] = []

    def show(self, text: str) -> None:
        """Draw this code; what was drawn before is usually its beginning."""
        if text == self._text:
            return
        before = len(self._lines)
        if before and text.startswith(self._text):
            last = self._lines.pop()
            self._lines += (last + text[len(self._text) :]).split("\n")
        else:
            self._lines = text.split("\n")
        self._text = text
        if len(self._lines) != before:
            self.refresh(layout=True)
        else:
            self.refresh(Region(0, before - 1 + self.PADDING_Y, self.size.width, 1))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the height: lines are not wrapped."""
        return len(self._lines) + 2 * self.PADDING_Y

    def render_line(self, y: int) -> Strip:
        """Draw one line, cut at the edge."""
        width = self.size.width
        row = y - self.PADDING_Y
        text = self._lines[row].expandtabs(4) if 0 <= row < len(self._lines) else ""
        # A line may be as long as an answer; no more of it than can be seen is measured.
        strip = Strip([Segment(" " * self.PADDING_X + text[: 2 * width], self.rich_style)])
        return strip.adjust_cell_length(width, self.rich_style)


class ColoredFence(MarkdownFence):
    """A closed fence; a long one is drawn plain first and colored when a thread has done it."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Return the colored code where it is known or short, else plain text."""
        key = (code, language, ansi, dark)
        known = _colored.get(key)
        if known is not None:
            return known
        if code.count("\n") > MAX_LINES_AT_ONCE:
            return Content(code)
        return _remember(key, super().highlight(code, language, ansi, dark))

    def on_mount(self) -> None:
        """Begin to color."""
        self._color()

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        await super()._update_from_block(block)
        self._color()

    def _color(self) -> None:
        key = (self.code, self.lexer, self.app.native_ansi_color, self.app.current_theme.dark)
        if key not in _colored:
            self.run_worker(self._color_in_thread(key), group="color", exclusive=True)

    async def _color_in_thread(self, key: tuple[str, str, bool, bool]) -> None:
        content = _remember(key, await asyncio.to_thread(MarkdownFence.highlight, *key))
        if self.code == key[0]:
            self._highlighted_code = content
            self.set_content(content)


def _remember(key: tuple[str, str, bool, bool], content: Content) -> Content:
    _colored[key] = content
    while len(_colored) > _CACHED_FENCES:
        _colored.popitem(last=False)
    return content
