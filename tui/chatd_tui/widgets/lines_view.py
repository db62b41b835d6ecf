"""A widget that draws lines which were laid out for its width; only those that are seen are drawn."""

from __future__ import annotations

from abc import abstractmethod

from textual.content import Content
from textual.geometry import Size
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual
from textual.widget import Widget


class LinesView(Widget):
    """Draws `_lines`, which `_lay_out_all` makes for a width."""

    DEFAULT_CSS = """
    LinesView { height: auto; }
    """

    auto_links = False

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Content] = []
        self._strips: dict[int, Strip] = {}
        self._width = 0

    @abstractmethod
    def _lay_out_all(self, width: int) -> None:
        """Make all lines anew for a width."""

    @property
    def lines(self) -> list[Content]:
        """The lines as they are drawn."""
        return self._lines

    def height_at(self, width: int) -> int:
        """Lay out for a width, and return the number of lines."""
        if width != self._width:
            self._strips.clear()
            self._lay_out_all(width)
        return len(self._lines)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of lines at this width."""
        return self.height_at(width)

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        if y >= len(self._lines):
            return Strip.blank(self.size.width, self.rich_style)
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            line = self._lines[y]
            style = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            return self._strip(line.stylize(style, start, len(line) if end == -1 else end), y)
        strip = self._strips.get(y)
        if strip is None:
            strip = self._strips[y] = self._strip(self._lines[y], y)
        return strip

    def _strip(self, line: Content, y: int) -> Strip:
        width = self.size.width
        strips = Visual.to_strips(self, line, max(1, width), 1, self.visual_style, apply_selection=False)
        strip = strips[0] if strips else Strip.blank(width, self.rich_style)
        return strip.adjust_cell_length(width, self.rich_style).apply_offsets(0, y)

    def notify_style_update(self) -> None:
        """Draw anew in other colors."""
        super().notify_style_update()
        self._strips.clear()

    def on_unmount(self) -> None:
        """Forget the lines as they were drawn."""
        # Textual keeps the cache of a widget that is gone as the key of another cache, with a hundred objects a line.
        self._styles_cache.clear()
        self._strips.clear()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text."""
        return selection.extract("\n".join(line.plain for line in self._lines)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Draw the selection."""
        self.refresh()
