"""A widget that draws lines which were laid out for its width; only those that are seen are drawn."""

from __future__ import annotations

from abc import abstractmethod

from rich.segment import Segment
from textual.content import Content
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
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
        self._is_drawing = False

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

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw the lines that are seen."""
        self._is_drawing = True
        try:
            return super().render_lines(crop)
        finally:
            self._is_drawing = False

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        if y >= len(self._lines):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        line = self._lines[y]
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            style = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            return self._strip(line.stylize(style, start, len(line) if end == -1 else end), y)
        if not self._is_drawing:
            return self._strip(line, y)
        strip = self._strips.get(y)
        if strip is None:
            strip = self._strips[y] = self._strip(line, y)
        return strip

    def _strip(self, line: Content, y: int) -> Strip:
        """Draw a line as wide as the widget; it was laid out for that, so it is not wrapped once more."""
        base, width = self.visual_style, self.size.width
        segments: list[Segment] = []
        x = 0
        for text, added in line.render(base, end="", parse_style=self._get_style):
            style = base + added
            # Where each character is, is asked for when the mouse selects text: a line that is drawn does without.
            segments.append(Segment(text, style.rich_style if self._is_drawing else style.rich_style_with_offset(x, y)))
            x += len(text)
        return Strip(segments, line.cell_length).adjust_cell_length(width, base.rich_style)

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
