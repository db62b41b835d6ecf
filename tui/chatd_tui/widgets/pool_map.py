"""The block pool as cells in four states that can be told apart without color."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from chatd.client import CellMap
from chatd.protocol import CELL_STATES

Counts = tuple[int, int, int, int]
GLYPHS = {"free": "·", "cached": "░", "active": "▒", "shared": "█"}
VARIABLES = {"free": "faint", "cached": "primary", "active": "success", "shared": "warning"}
MAX_CELL_WIDTH = 3


def cell_state(counts: Counts) -> str:
    """Return the state that most of a cell's blocks are in; of equals, the one that is more in use."""
    best = max(range(len(CELL_STATES)), key=lambda index: (counts[index], index))
    return CELL_STATES[best] if counts[best] else "free"


@dataclass(frozen=True)
class MapLayout:
    """How many cells a line holds, how many lines there are, and how many columns a cell has."""

    columns: int
    rows: int
    cell_width: int = 1


def map_layout(num_cells: int, width: int, height: int) -> MapLayout:
    """Return the layout of `num_cells` in an area: lines of eights, cells as wide as lets all of them be seen."""
    for cell_width in range(MAX_CELL_WIDTH, 0, -1):
        fitting = width // cell_width
        columns = fitting // 8 * 8
        if columns and -(-num_cells // columns) <= height:
            return MapLayout(columns, -(-num_cells // columns), cell_width)
    columns = max(1, width // 8 * 8 or width)
    return MapLayout(columns, -(-num_cells // columns))


def cells_for(width: int, height: int) -> int:
    """Return how many cells to ask the daemon for, to fill an area."""
    return min(4096, max(64, max(1, width // 8 * 8 or width) * max(1, height)))


def map_rows(states: Sequence[str], layout: MapLayout) -> list[str]:
    """Return the lines of glyphs, as the widget draws them."""
    return [
        "".join(GLYPHS[state] * layout.cell_width for state in states[start : start + layout.columns])
        for start in range(0, len(states), layout.columns)
    ]


def legend() -> Content:
    """Return what the glyphs mean."""
    parts = [Content.assemble((GLYPHS[s], f"${VARIABLES[s]}"), " ", (s, "$muted")) for s in CELL_STATES]
    return Content("   ").join(parts)


class PoolMap(ScrollView):
    """Draws the daemon's cells in order, and one of them in reverse video once a person points at it."""

    class Pointed(Message):
        """A cell was pointed at with the mouse."""

    DEFAULT_CSS = """
    PoolMap { height: 1fr; width: 1fr; scrollbar-size-vertical: 1; }
    """
    can_focus = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._states: list[str] = []
        self._layout = MapLayout(8, 0)
        self._cursor: int | None = None

    @property
    def states(self) -> list[str]:
        """The state of each cell drawn."""
        return self._states

    @property
    def cursor(self) -> int | None:
        """The cell that is pointed at; None before the first key or click."""
        return self._cursor

    def show(self, cells: CellMap) -> None:
        """Draw these cells."""
        self._states = [cell_state(counts) for counts in cells.counts]
        if self._cursor is not None:
            self._cursor = min(self._cursor, len(self._states) - 1) if self._states else None
        self._arrange()
        self.refresh()

    def move(self, columns: int, rows: int) -> None:
        """Move the cursor, not beyond the first and the last cell; the first move only shows it."""
        if not self._states:
            return
        if self._cursor is None:
            first = self.scroll_offset.y * self._layout.columns
            self._point(min(first, len(self._states) - 1))
            return
        target = self._cursor + columns + rows * self._layout.columns
        if 0 <= target < len(self._states) or not rows:
            self._point(max(0, min(len(self._states) - 1, target)))

    def on_click(self, event: events.Click) -> None:
        """Point at the cell under the mouse."""
        column = (event.x + self.scroll_offset.x) // self._layout.cell_width
        cell = (event.y + self.scroll_offset.y) * self._layout.columns + column
        if 0 <= column < self._layout.columns and 0 <= cell < len(self._states):
            self._point(cell)
            self.post_message(self.Pointed())

    def _point(self, cell: int) -> None:
        self._cursor = cell
        row, column = divmod(cell, self._layout.columns)
        width = self._layout.cell_width
        self.scroll_to_region(Region(column * width, row, width, 1), animate=False, force=True)
        self.refresh()

    def on_resize(self) -> None:
        """Lay the cells out anew."""
        self._arrange()

    def _arrange(self) -> None:
        area = self.size
        if area.width > 0:
            self._layout = map_layout(len(self._states), area.width, area.height)
            self.virtual_size = Size(self._layout.columns * self._layout.cell_width, self._layout.rows)

    def render_line(self, y: int) -> Strip:
        """Draw one line of cells."""
        columns = self._layout.columns
        start = (y + self.scroll_offset.y) * columns
        styles = self._styles()
        cells = enumerate(self._states[start : start + columns], start=start)
        segments = [
            Segment(
                GLYPHS[state] * (len(list(run)) * self._layout.cell_width),
                styles[state] + Style(reverse=True) if is_pointed_at else styles[state],
            )
            for (state, is_pointed_at), run in groupby((state, cell == self._cursor) for cell, state in cells)
        ]
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)

    def _styles(self) -> dict[str, Style]:
        variables = self.app.theme_variables
        background = self.rich_style.bgcolor
        return {
            state: Style(color=_rich_color(variables.get(name, "")), bgcolor=background)
            for state, name in VARIABLES.items()
        }


def _rich_color(value: str) -> str:
    """Return a theme's color as Rich names it: `#5fcf9a`, or one of the terminal's own."""
    if value.startswith("#"):
        return value[:7]
    return value.removeprefix("ansi_") if value.startswith("ansi_") else "white"
