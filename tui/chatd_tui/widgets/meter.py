"""The line that is always on: memory, reuse, speed, latency, context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from chatd_tui.views import TIERS, MeterView, duration_ms, percent, rate, short_number, tier_word

BAR_CELLS = 8
CONTEXT_CELLS = 5
FILLING, FULL = 0.7, 0.9
"""Parts of the context above which it is marked, and marked again."""
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
    """Return the meter in at most `width` columns; what matters least gets shorter, or goes, where there is no room."""
    fields = list(_fields(view))
    while _width(fields) > width:
        least = max(fields, key=lambda field: field.rank)
        if len(fields) == 1 and least.short is None:
            break
        place = fields.index(least)
        fields[place : place + 1] = [least.short] if least.short is not None else []
    return Content(SEPARATOR).stylize("$faint").join([field.content for field in fields])


@dataclass(frozen=True)
class _Field:
    """A part of the line.

    Attributes:
        rank: The greatest gives way first.
        content: What it says.
        short: What it gives way to; nothing makes it go.
    """

    rank: int
    content: Content
    short: _Field | None = None


def _fields(view: MeterView) -> Iterator[_Field]:
    if view.blocks:
        share = percent(view.active / view.blocks)
        whole = Content.assemble(("KV ", "$muted"), bar(view), " ", (share, "bold"))
        yield _Field(2, whole, _Field(0, _named("KV", share)))
    if view.hit_rate is not None:
        hit = _named("hit", percent(view.hit_rate))
        both = hit if view.turn_hit is None else Content.assemble(hit, " ", _named("turn", percent(view.turn_hit)))
        yield _Field(8, both, _Field(5, hit))
    elif view.turn_hit is not None:
        yield _Field(8, _named("turn hit", percent(view.turn_hit)))
    if view.tok_s is not None:
        live = Content.assemble((rate(view.tok_s), "bold"), (" tok/s", "$muted"))
        last = "" if view.last_tok_s is None else f", last {rate(view.last_tok_s)}"
        yield _Field(9, Content.assemble(live, (last, "$muted")), _Field(1, live))
    elif view.last_tok_s is not None:
        yield _Field(4, Content.assemble(("last ", "$muted"), (rate(view.last_tok_s), "bold"), (" tok/s", "$muted")))
    if view.ttft_ms is not None:
        yield _Field(7, _named("TTFT", duration_ms(view.ttft_ms)))
    if view.context_used is not None and view.context_max:
        yield _context(view.context_used, view.context_max)
    if view.tier:
        # That it is in memory is what one expects, and the first thing to leave out.
        at_home = view.tier == "device"
        style = "$muted" if at_home or view.tier not in TIERS else "$warning"
        yield _Field(10 if at_home else 5, Content.styled(tier_word(view.tier), style))


def _named(name: str, value: str) -> Content:
    return Content.assemble((f"{name} ", "$muted"), (value, "bold"))


def _context(used: int, maximum: int) -> _Field:
    """Show how full the context is; marks say what the colors do."""
    share = used / maximum
    style, mark = ("$error", " !!") if share > FULL else ("$warning", " !") if share > FILLING else ("$success", "")
    cells = min(CONTEXT_CELLS, max(round(CONTEXT_CELLS * share), 1 if used else 0))
    full = (f"/{short_number(maximum)}", "$muted")
    number = Content.assemble((short_number(used), "bold"), full, (mark, f"bold {style}"))
    filled = Content.assemble(("█" * cells, style), ("░" * (CONTEXT_CELLS - cells), "$faint"), " ")
    label = Content.styled("ctx ", "$muted")
    # A full context ends the conversation, and is not left out before the speed is.
    rank = 1 if mark else 3
    return _Field(6, Content.assemble(label, filled, number), _Field(rank, Content.assemble(label, number)))


def _width(fields: list[_Field]) -> int:
    return sum(field.content.cell_length for field in fields) + len(SEPARATOR) * max(0, len(fields) - 1)


class Meter(Widget):
    """Draws a `MeterView`."""

    DEFAULT_CSS = """
    Meter { height: 1; padding: 0 1; background: $panel; color: $foreground; }
    """

    view: reactive[MeterView] = reactive(MeterView())

    def render(self) -> Content:
        """Draw."""
        return meter_line(self.view, self.content_size.width)
