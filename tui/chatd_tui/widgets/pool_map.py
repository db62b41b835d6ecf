"""The block pool as cells in four states that can be told apart without color."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Size
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
    """Draws the daemon's cells in order; computes nothing but the layout."""

    DEFAULT_CSS = """
    PoolMap { height: 1fr; width: 1fr; scrollbar-size-vertical: 1; }
    """
    can_focus = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._states: list[str] = []
        self._layout = MapLayout(8, 0)

    @property
    def states(self) -> list[str]:
        """The state of each cell drawn."""
        return self._states

    def show(self, cells: CellMap) -> None:
        """Draw these cells."""
        self._states = [cell_state(counts) for counts in cells.counts]
        self._arrange()
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
        segments = [
            Segment(GLYPHS[state] * (len(list(run)) * self._layout.cell_width), styles[state])
            for state, run in groupby(self._states[start : start + columns])
        ]
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)

    def _styles(self) -> dict[str, Style]:
        variables = self.app.theme_variables
        background = self.rich_style.bgcolor
        return {
            state: Style(color=_hex(variables.get(name, "")) or "white", bgcolor=background)
            for state, name in VARIABLES.items()
        }


def _hex(value: str) -> str | None:
    return value[:7] if value.startswith("#") else None
