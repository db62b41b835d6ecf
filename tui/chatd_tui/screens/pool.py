"""The pool page: where the memory goes, live."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from chatd.clean import clean_line
from chatd.client import PoolState
from chatd.protocol import PoolTotals, SessionBlocks, TierBlocks
from chatd_tui.views import percent, rate, short_number
from chatd_tui.widgets.key_line import KeyLine
from chatd_tui.widgets.pool_map import PoolMap, cells_for, legend
from chatd_tui.widgets.sparkline import Sparkline

KEYS = (("Esc", "back"), ("↑↓", "scroll the sessions"), ("F1", "help"), ("^Q", "quit"))
HISTORY = 240
WIDE = 100


class PoolHistory:
    """The last totals, and what happened between them."""

    def __init__(self) -> None:
        self.occupancy: deque[float] = deque(maxlen=HISTORY)
        self.tok_s: deque[float] = deque(maxlen=HISTORY)
        self.queue: deque[float] = deque(maxlen=HISTORY)
        self.evictions_s: deque[float] = deque(maxlen=HISTORY)
        self._last: tuple[float, int] | None = None

    def add(self, totals: PoolTotals, now_s: float) -> None:
        """Take the totals at a time; the evictions counter may begin anew with another daemon."""
        self.occupancy.append(totals.active / max(1, totals.blocks))
        self.tok_s.append(totals.tok_s)
        self.queue.append(totals.waiting)
        if self._last is None or totals.evictions < self._last[1]:
            self.evictions_s.append(0.0)
        else:
            seconds = max(1e-3, now_s - self._last[0])
            self.evictions_s.append((totals.evictions - self._last[1]) / seconds)
        self._last = (now_s, totals.evictions)


def totals_line(totals: PoolTotals, tiers: Sequence[TierBlocks] = ()) -> Content:
    """Return the counts of the pool, and what the tiers below it keep of what they can."""
    parts = [
        ("active", f"{short_number(totals.active)} ({percent(totals.active / max(1, totals.blocks))})"),
        ("shared", short_number(totals.shared)),
        ("cached", short_number(totals.cached)),
        ("free", short_number(totals.free)),
        ("evictions", short_number(totals.evictions)),
        ("hit", percent(totals.hit_rate)),
        *((clean_line(row.tier, 8), f"{short_number(row.used)}/{short_number(row.blocks)}") for row in tiers),
    ]
    return Content("  ").join([Content.assemble((f"{name} ", "$muted"), (value, "bold")) for name, value in parts])


def session_table(rows: Sequence[SessionBlocks], width: int) -> Content:
    """Return what each session holds, most first, as aligned text."""
    numbers = 7
    tier = 7
    title = max(8, width - 3 * numbers - tier - 3)
    names = "".join(name.rjust(numbers) for name in ("held", "shared", "tokens"))
    head = f"  {'session'.ljust(title)}{names} {'tier'.ljust(tier)}"
    lines = [Content.styled(head, "$muted")]
    for row in sorted(rows, key=lambda row: (-row.held, -row.tokens, row.session)):
        name = Content(clean_line(row.title, 80) or "untitled").truncate(title - 1, ellipsis=True)
        mark = ("● ", "$success") if row.active else ("  ", "")
        counts = "".join(short_number(number).rjust(numbers) for number in (row.held, row.shared, row.tokens))
        lines.append(
            Content.assemble(
                mark,
                name,
                " " * (title - name.cell_length),
                counts,
                (" " + clean_line(row.tier, tier).ljust(tier), "$muted"),
            )
        )
    if not rows:
        lines.append(Content.styled("  no session holds anything", "$muted"))
    return Content("\n").join(lines)


class PoolScreen(Screen[None]):
    """Draws `PoolState`s.

    Args:
        block_size: Tokens in a block.
        with_map: Whether the daemon offers the map.
        watch: Called with the number of cells that fit, or None without a map.
        keys: What the line of keys says.
    """

    DEFAULT_CSS = """
    PoolScreen {
        & #head { height: 1; padding: 0 1; background: $panel; }
        & #totals { height: auto; padding: 0 2; margin: 1 0 0 0; }
        & #legend { height: auto; padding: 0 2; margin: 0 0 1 0; }
        & #panels { height: 1fr; padding: 0 1; layout: vertical; }
        & #map-panel { height: 1fr; border: round $line; border-title-color: $muted; padding: 0 1; }
        & #side { height: 1fr; width: 1fr; }
        & #sparks { height: 4; padding: 0 1; }
        & #sessions-panel { height: 1fr; min-height: 3; padding: 0 1; scrollbar-size-vertical: 1; }
        & #table { height: auto; }
        &.-wide #panels { layout: horizontal; }
        &.-wide #map-panel { width: 1fr; height: 100%; }
        &.-wide #side { width: 52; height: 100%; padding: 0 0 0 1; }
        &.-wide #sparks { height: 6; padding: 1 1; }
        &.-low #legend, &.-low KeyLine { display: none; }
        &.-nomap #map-panel, &.-nomap #legend { display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f2,q", "close_page", "Back"),
        Binding("up", "scroll_sessions(-1)", "Scroll", show=False),
        Binding("down", "scroll_sessions(1)", "Scroll", show=False),
    ]

    def __init__(
        self,
        block_size: int,
        with_map: bool,
        watch: Callable[[int | None], None],
        keys: Sequence[tuple[str, str]] = KEYS,
    ) -> None:
        super().__init__()
        self._keys = keys
        self._head = ("The pool", "")
        self._connection = ""
        self._block_size = block_size
        self._with_map = with_map
        self._watch = watch
        self._cells_wanted: int | None = None
        self.history = PoolHistory()

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield Static("The pool", id="head", markup=False)
        yield Static(id="totals", markup=False)
        yield Static(legend(), id="legend", markup=False)
        with Horizontal(id="panels"):
            with Vertical(id="map-panel"):
                yield PoolMap(id="map")
            with Vertical(id="side"):
                with Vertical(id="sparks"):
                    yield Sparkline("occupancy", "$success", 1.0, id="occupancy")
                    yield Sparkline("tokens/s", "$primary", id="tok_s")
                    yield Sparkline("queue", "$warning", id="queue")
                    yield Sparkline("evictions", "$error", id="evictions")
                with VerticalScroll(id="sessions-panel"):
                    yield Static(id="table", markup=False)
        yield KeyLine(self._keys)

    def on_mount(self) -> None:
        """Ask for what fits, once that is known."""
        self.set_class(not self._with_map, "-nomap")
        self.query_one("#sessions-panel").can_focus = False
        self.call_after_refresh(self._ask)

    def on_resize(self, event: events.Resize) -> None:
        """Arrange for another size, and ask for as many cells as fit now."""
        self.set_class(event.size.width >= WIDE, "-wide")
        self.set_class(event.size.height < 18, "-low")
        self.call_after_refresh(self._ask)

    def _ask(self) -> None:
        if not self.is_attached:
            return
        if not self._with_map:
            self._watch(None)
            return
        region = self.query_one(PoolMap).size
        cells = cells_for(region.width, region.height)
        if cells != self._cells_wanted:
            self._cells_wanted = cells
            self._watch(cells)

    def show(self, state: PoolState, now_s: float) -> None:
        """Draw the pool at a step, but while the page opens or closes."""
        if not self._is_drawn:
            return
        totals = state.totals
        self.history.add(totals, now_s)
        head = f"The pool   {totals.blocks} blocks of {self._block_size} tokens   step {state.step}"
        self._head = (head, f"   {totals.running} running, {totals.waiting} waiting")
        self._draw_head()
        self.query_one("#totals", Static).update(totals_line(totals, state.tiers))
        self._spark("occupancy", self.history.occupancy, percent(self.history.occupancy[-1]))
        self._spark("tok_s", self.history.tok_s, rate(totals.tok_s))
        self._spark("queue", self.history.queue, str(totals.waiting))
        self._spark("evictions", self.history.evictions_s, f"{rate(self.history.evictions_s[-1])}/s")
        if state.cells is not None:
            self.query_one(PoolMap).show(state.cells)
            per_cell = state.cells.blocks_per_cell
            title = "one cell = one block" if per_cell == 1 else f"one cell = {per_cell} blocks"
            self.query_one("#map-panel").border_title = title
        if state.sessions is not None:
            table = self.query_one("#table", Static)
            table.update(session_table(state.sessions, self.query_one("#sessions-panel").content_size.width))

    def show_connection(self, text: str) -> None:
        """Say that what is drawn is not the pool as it is now, and why; "" where it is."""
        self._connection = text
        if self._is_drawn:
            self._draw_head()

    @property
    def _is_drawn(self) -> bool:
        return bool(self.query("#head"))

    def _draw_head(self) -> None:
        head, running = self._head
        after = (f"   {self._connection}", "$warning") if self._connection else (running, "$muted")
        self.query_one("#head", Static).update(Content.assemble((head, "bold"), after))

    def _spark(self, ident: str, values: Sequence[float] | deque[float], value: str) -> None:
        line = self.query_one(f"#{ident}", Sparkline)
        line.values = tuple(values)
        line.value = value

    def action_close_page(self) -> None:
        """Go back to the conversation."""
        self.dismiss()

    def action_scroll_sessions(self, lines: int) -> None:
        """Scroll the table of sessions."""
        self.query_one("#sessions-panel").scroll_relative(y=lines, animate=False)
