"""The last minute of the pool in five lines: occupancy, throughput, queue, evictions, and those of them regretted."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from chatd.protocol import PoolTotals
from chatd_tui.pool_moments import PoolPast
from chatd_tui.views import percent, rate, short_number
from chatd_tui.widgets.pool_tables import UNKNOWN
from chatd_tui.widgets.sparkline import Sparkline


class PoolSparks(Vertical):
    """Draws a `PoolPast` beside the values of now."""

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield Static(Content.styled("the last 60 seconds", "$muted"), id="minute", markup=False)
        yield Sparkline("occupancy", "$success", 1.0, id="occupancy")
        yield Sparkline("tokens/s", "$primary", id="tok_s")
        yield Sparkline("queue", "$warning", id="queue")
        yield Sparkline("evictions", "$error", id="evictions")
        yield Sparkline("wanted back", "$error", id="wanted")

    def show(self, past: PoolPast, totals: PoolTotals) -> None:
        """Draw the minute that ends with these totals."""
        self._draw("occupancy", past.occupancy, percent(totals.active / max(1, totals.blocks)))
        self._draw("tok_s", past.tok_s, rate(totals.tok_s))
        self._draw("queue", past.queue, str(totals.waiting))
        self._draw("evictions", past.evictions, _per_minute(past.evictions))
        self._draw("wanted", past.wanted_again, _per_minute(past.wanted_again) if past.wanted_again else UNKNOWN)

    def _draw(self, ident: str, values: Sequence[float], value: str) -> None:
        line = self.query_one(f"#{ident}", Sparkline)
        line.values = tuple(values)
        line.value = value


def _per_minute(counted: Sequence[float]) -> str:
    return f"{short_number(sum(counted))}/min"
