"""The pool page: where the memory goes, live, and what it was a moment ago."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from chatd.clean import clean_line
from chatd.client import PoolState
from chatd.errors import ChatdError
from chatd.protocol import PoolInspected
from chatd_tui.background import run_beside
from chatd_tui.cell_look import CellLook, Inspect
from chatd_tui.commands import key_name
from chatd_tui.keymap import DEFAULT, Keymap, pool_bindings
from chatd_tui.pool_moments import PoolPlayer
from chatd_tui.screens.page import Page
from chatd_tui.widgets.key_line import KeyLine
from chatd_tui.widgets.pool_cell import ASKING, LIVE_ONLY, NOT_TOLD, CellView, cell_at, cell_text
from chatd_tui.widgets.pool_map import PoolMap, cells_for, legend
from chatd_tui.widgets.pool_sparks import PoolSparks
from chatd_tui.widgets.pool_tables import aged, bill_line, session_table, tenant_table, totals_line

WIDE = 100
LOOK_AGAIN_S = 1.0


class PoolScreen(Page[None]):
    """Draws `PoolState`s.

    Args:
        block_size: Tokens in a block.
        caps: What the daemon offers: "pool.map" and "pool.inspect" matter here.
        watch: Called with the number of cells that fit, or None without a map.
        inspect: Asks what is in a cell.
        keymap: The keys as they are bound.
        leave: What Esc does, in a word.

    Attributes:
        player: What is shown of the last minute.
    """

    DEFAULT_CSS = """
    PoolScreen {
        & #head { height: 1; padding: 0 1; background: $panel; }
        & #totals { height: auto; padding: 0 2; margin: 1 0 0 0; }
        & #legend { height: auto; padding: 0 2; margin: 0 0 1 0; }
        & #panels { height: 1fr; padding: 0 1; layout: vertical; }
        & #map-panel { height: 1fr; border: round $line; border-title-color: $muted; padding: 0 1; }
        & #side { height: 1fr; width: 1fr; }
        & PoolSparks { height: 5; padding: 0 1; }
        & #tables { height: 1fr; min-height: 3; padding: 0 1; scrollbar-size-vertical: 1; }
        & #sessions, & #bills, & #tenants { height: auto; }
        & #tenants { margin: 1 0 0 0; }
        & #cell-panel {
            height: auto; max-height: 9; display: none; margin: 0 1; padding: 0 1;
            border: round $accent; border-title-color: $accent; scrollbar-size-vertical: 1; scrollbar-gutter: stable;
        }
        & #cell { height: auto; }
        &.-cell #cell-panel { display: block; }
        &.-wide #panels { layout: horizontal; }
        &.-wide #map-panel { width: 1fr; height: 100%; }
        &.-wide #side { width: 62; height: 100%; padding: 0 0 0 1; }
        &.-wide PoolSparks { height: 7; }
        &.-narrow PoolSparks #minute { display: none; }
        &.-low #legend, &.-low KeyLine { display: none; }
        &.-cell.-narrow #side, &.-cell.-short #legend { display: none; }
        &.-cell.-short #cell-panel { max-height: 7; }
        &.-nomap #map-panel, &.-nomap #legend { display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        *pool_bindings(),
    ]

    def __init__(
        self,
        block_size: int,
        caps: Sequence[str],
        watch: Callable[[int | None], None],
        inspect: Inspect,
        keymap: Keymap = DEFAULT,
        leave: str = "back",
    ) -> None:
        super().__init__()
        self.player = PoolPlayer()
        self._keymap = keymap
        self._leave = leave
        self._connection = ""
        self._block_size = block_size
        self._with_map = "pool.map" in caps
        self._with_facts = self._with_map and "pool.inspect" in caps
        self._watch = watch
        self._cells_wanted: int | None = None
        self._look = CellLook(inspect, lambda asking: run_beside(self, asking, group="cell"), self._on_answer)
        self._facts: PoolInspected | None = None
        self._note = ""

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield Static("The pool", id="head", markup=False)
        yield Static(id="totals", markup=False)
        yield Static(legend(), id="legend", markup=False)
        with Horizontal(id="panels"):
            with Vertical(id="map-panel"):
                yield PoolMap(id="map")
            with Vertical(id="side"):
                yield PoolSparks(id="sparks")
                with VerticalScroll(id="tables"):
                    yield Static(id="sessions", markup=False)
                    yield Static(id="bills", markup=False)
                    yield Static(id="tenants", markup=False)
        with VerticalScroll(id="cell-panel"):
            yield Static(id="cell", markup=False)
        rows = self._keymap.pool_bottom(self._leave, self._missing_caps())
        keys = [(key, meaning) for key, meaning, _ in rows]
        yield KeyLine(keys, [key for key, _, is_here in rows if not is_here])

    def on_mount(self) -> None:
        """Ask for what fits, once that is known; the minute goes on although nothing comes."""
        self.set_class(not self._with_map, "-nomap")
        for scrolled in ("#tables", "#cell-panel"):
            self.query_one(scrolled).can_focus = False
        self.set_interval(LOOK_AGAIN_S, self._tick)
        self.call_after_refresh(self._ask)

    def on_resize(self, event: events.Resize) -> None:
        """Arrange for another size, and ask for as many cells as fit now."""
        self.set_class(event.size.width >= WIDE, "-wide")
        self.set_class(event.size.width < WIDE, "-narrow")
        self.set_class(event.size.height < 24, "-short")
        self.set_class(event.size.height < 18, "-low")
        self.call_after_refresh(self._ask)

    def _missing_caps(self) -> frozenset[str]:
        """Return what keys need that this daemon does not offer."""
        if not self._with_map:
            return frozenset({"pool.map", "pool.inspect"})
        return frozenset() if self._with_facts else frozenset({"pool.inspect"})

    def _ask(self) -> None:
        if not self.is_attached:
            return
        if not self._with_map:
            self._watch(None)
            return
        if self.has_class("-cell"):
            return  # The map is as large again when the panel is closed.
        region = self.query_one(PoolMap).size
        cells = cells_for(region.width, region.height)
        if cells != self._cells_wanted:
            self._cells_wanted = cells
            self._watch(cells)

    # What is drawn.

    def show(self, state: PoolState, now_s: float | None = None) -> None:
        """Take the pool at a step, and draw it unless the page is paused, or opens or closes."""
        self.player.add(state, self.player.clock() if now_s is None else now_s)
        if not self.player.is_paused:
            self._draw()

    def show_connection(self, text: str) -> None:
        """Say that what is drawn is not the pool as it is now, and why; "" where it is."""
        self._connection = text
        if self._is_drawn:
            self._draw_head()

    @property
    def _is_drawn(self) -> bool:
        return bool(self.query("#head"))

    def _tick(self) -> None:
        """Let the minute go on, and what is known of the cell be of now."""
        if not self._is_drawn or self.player.shown is None:
            return
        self._draw_head()
        if not self.player.is_paused:
            self._draw_sparks()
            self._draw_sessions(self.player.shown.state)
            self._look_inside()

    def _draw(self) -> None:
        moment = self.player.shown
        if not self._is_drawn or moment is None:
            return
        state = moment.state
        self._draw_head()
        self.query_one("#totals", Static).update(totals_line(state.totals, state.tiers))
        self._draw_sparks()
        if state.cells is not None:
            self.query_one(PoolMap).show(state.cells)
            per_cell = state.cells.blocks_per_cell
            title = "one cell = one block" if per_cell == 1 else f"one cell = {per_cell} blocks"
            self.query_one("#map-panel").border_title = title
        self._draw_tables(state)
        self._draw_cell()

    def _draw_head(self) -> None:
        moment = self.player.shown
        if moment is None:
            self.query_one("#head", Static).update(Content.assemble(("The pool", "bold")))
            return
        totals = moment.state.totals
        if self.player.is_paused:
            after = Content.assemble((self.player.words(), "bold reverse"))
        elif self._connection:
            after = Content.assemble((f"step {moment.state.step}", "bold"), (f"   {self._connection}", "$warning"))
        else:
            running = f"   {totals.running} running, {totals.waiting} waiting"
            after = Content.assemble((f"step {moment.state.step}", "bold"), (running, "$muted"))
        room = self.query_one("#head").content_size.width - after.cell_length
        blocks = f"The pool   {totals.blocks} blocks"
        heads = (f"{blocks} of {self._block_size} tokens   ", f"{blocks}   ", "The pool   ")
        head = next((head for head in heads if len(head) <= room), "")
        self.query_one("#head", Static).update(Content.assemble((head, "bold"), after))

    def _draw_sparks(self) -> None:
        moment = self.player.shown
        if moment is not None:
            self.query_one(PoolSparks).show(self.player.past, moment.state.totals)

    def _draw_tables(self, state: PoolState) -> None:
        self._draw_sessions(state)
        width = self.query_one("#tables").content_size.width
        for ident, content in (("#bills", bill_line(state)), ("#tenants", tenant_table(state.tenants, width))):
            part = self.query_one(ident, Static)
            part.display = content is not None
            if content is not None:
                part.update(content)

    def _draw_sessions(self, state: PoolState) -> None:
        if state.sessions is not None:
            rows = aged(state.sessions, self.player.elapsed_s)
            width = self.query_one("#tables").content_size.width
            self.query_one("#sessions", Static).update(session_table(rows, width))

    # The cell.

    def _look_inside(self) -> None:
        """Ask what is in the cell of the cursor, where that is looked at."""
        moment, cell = self.player.shown, self.query_one(PoolMap).cursor
        if not self.has_class("-cell") or moment is None or moment.state.cells is None or cell is None:
            return
        if self.player.is_paused:
            goes_on = next((f": {key_name(key)} goes on" for key in self._keymap.pool_keys["pause"]), "")
            self._facts, self._note = None, LIVE_ONLY + goes_on
        elif not self._with_facts:
            self._facts, self._note = None, NOT_TOLD
        else:
            if self._facts is None or self._facts.cell != cell:
                self._facts, self._note = None, ASKING
            self._look.look(cell, moment.state.cells.blocks_per_cell)
        self._draw_cell()

    def _on_answer(self, answer: PoolInspected | ChatdError) -> None:
        if not self._is_drawn or self.player.is_paused or not self.has_class("-cell"):
            return
        if isinstance(answer, ChatdError):
            self._facts, self._note = None, f"no answer: {clean_line(answer.message, 120)}"
        elif answer.cell == self.query_one(PoolMap).cursor:
            self._facts = answer
        self._draw_cell()

    def _draw_cell(self) -> None:
        moment, cell = self.player.shown, self.query_one(PoolMap).cursor
        if not self.has_class("-cell") or moment is None or moment.state.cells is None or cell is None:
            return
        cells = moment.state.cells
        facts = self._facts
        if facts is not None and (facts.cell, facts.blocks_per_cell) != (cell, cells.blocks_per_cell):
            facts = None
        view = CellView(cell, cells.blocks_per_cell, cell_at(cells.counts, cell), facts, self._note)
        panel = self.query_one("#cell-panel")
        panel.border_title = view.title
        width = max(40, panel.scrollable_content_region.width)
        self.query_one("#cell", Static).update(cell_text(view, self._block_size, width))

    def on_pool_map_pointed(self) -> None:
        """Look into the cell that was clicked."""
        self.action_look()

    # Keys.

    def action_back(self) -> None:
        """Close the cell, or go back to the conversation."""
        if self.has_class("-cell"):
            self._look.leave()
            self.remove_class("-cell")
            self.call_after_refresh(self._ask)
            return
        self.dismiss()

    def action_close_page(self) -> None:
        """Go back to the conversation."""
        self.dismiss()

    def action_point(self, columns: int, rows: int) -> None:
        """Move the cursor over the map; without a map scroll the tables."""
        if not self._with_map:
            self.query_one("#tables").scroll_relative(y=rows, animate=False)
            return
        self.query_one(PoolMap).move(columns, rows)
        self._look_inside()

    def action_look(self) -> None:
        """Look into the cell of the cursor."""
        if not self._with_map:
            return
        if self.query_one(PoolMap).cursor is None:
            self.query_one(PoolMap).move(0, 0)
        self.add_class("-cell")
        self._look_inside()
        # The panel has a width now.
        self.call_after_refresh(self._draw_cell)

    def action_pause(self) -> None:
        """Pause at this moment, or go on."""
        self.player.toggle()
        self._redraw()

    def action_step(self, moments: int) -> None:
        """Go back or on by a moment."""
        self.player.step(moments)
        self._redraw()

    def _redraw(self) -> None:
        self._draw()
        self._look_inside()

    def action_scroll_tables(self, pages: int) -> None:
        """Scroll the cell's blocks where they are open, else the tables."""
        scrolled = self.query_one("#cell-panel" if self.has_class("-cell") else "#tables")
        scrolled.scroll_relative(y=pages * max(1, scrolled.size.height - 1), animate=False)
