"""The line that is always on: memory, reuse, speed, latency, context."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from chatd_tui.views import TIERS, MeterView, duration_ms, percent, rate, short_number, tier_word

BAR_CELLS = 8
SEPARATOR = " · "


def bar(view: MeterView, cells: int = BAR_CELLS) -> Content:
    """Return the pool as cells: "▓" held, "▒" cached, "░" free; what exists shows at least one cell."""
    blocks = max(1, view.blocks)
    active = min(cells, max(round(cells * view.active / blocks), 1 if view.active else 0))
    cached = min(cells - active, max(round(cells * view.cached / blocks), 1 if view.cached else 0))
    return Content.assemble(
        ("▓" * active, "$success"), ("▒" * cached, "$primary"), ("░" * (cells - active - cached), "$faint")
    )


def meter_line(view: MeterView, width: int) -> Content:
    """Return the meter in at most `width` columns; what matters least goes first where there is no room."""
    fields: list[tuple[int, Content]] = []
    if view.blocks:
        share = Content.styled(percent(view.active / view.blocks), "bold")
        label = Content.styled("KV ", "$muted")
        fields.append((0, Content.assemble(label, bar(view), " ", share)))
    if view.hit_rate is not None:
        fields.append((2, _field("hit", percent(view.hit_rate))))
    if view.tok_s is not None:
        fields.append((1, Content.assemble(Content.styled(rate(view.tok_s), "bold"), (" tok/s", "$muted"))))
    if view.ttft_ms is not None:
        fields.append((4, _field("TTFT", duration_ms(view.ttft_ms))))
    if view.context_used is not None and view.context_max:
        fields.append((3, _context(view.context_used, view.context_max)))
    if view.tier:
        # That it is in memory is what one expects, and the first thing to leave out.
        at_home = view.tier == "device"
        style = "$muted" if at_home or view.tier not in TIERS else "$warning"
        fields.append((5 if at_home else 2, Content.styled(tier_word(view.tier), style)))
    while len(fields) > 1 and _width(fields) > width:
        fields.remove(max(fields, key=lambda field: field[0]))
    if view.blocks and _width(fields) > width:
        fields = [(0, _field("KV", percent(view.active / view.blocks)))]
    return Content(SEPARATOR).stylize("$faint").join([content for _, content in fields])


def _field(name: str, value: str) -> Content:
    return Content.assemble((f"{name} ", "$muted"), (value, "bold"))


def _context(used: int, maximum: int) -> Content:
    style = "bold $error" if used > 0.9 * maximum else "bold $warning" if used > 0.7 * maximum else "bold"
    return Content.assemble(("ctx ", "$muted"), (short_number(used), style), (f"/{short_number(maximum)}", "$muted"))


def _width(fields: list[tuple[int, Content]]) -> int:
    return sum(content.cell_length for _, content in fields) + len(SEPARATOR) * max(0, len(fields) - 1)


class Meter(Widget):
    """Draws a `MeterView`."""

    DEFAULT_CSS = """
    Meter { height: 1; padding: 0 1; background: $panel; color: $foreground; }
    """

    view: reactive[MeterView] = reactive(MeterView())

    def render(self) -> Content:
        """Draw."""
        return meter_line(self.view, self.content_size.width)
