"""A number's recent past in one line of eighth-high bars."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

BARS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], width: int, top: float | None = None) -> str:
    """Return the last `width` values, right-aligned, as bars.

    Args:
        values: Oldest first.
        width: Columns.
        top: The value of a full bar; the largest one shown where None. Zero is a blank, anything above at least "▁".
    """
    shown = list(values)[-width:] if width > 0 else []
    full = max(shown, default=0.0) if top is None else top
    bars = []
    for value in shown:
        if value <= 0 or full <= 0:
            bars.append(" ")
        else:
            bars.append(BARS[min(len(BARS) - 1, int(len(BARS) * min(1.0, value / full) - 1e-9))])
    return "".join(bars).rjust(max(0, width))


def fitted(values: Sequence[float], width: int) -> list[float]:
    """Return all of a past in at most `width` values: of those that share a column the greatest."""
    if width <= 0:
        return []
    number = len(values)
    if number <= width:
        return list(values)
    return [max(values[number * column // width : number * (column + 1) // width]) for column in range(width)]


class Sparkline(Widget):
    """Draws a name, the bars of a whole past and a value.

    Args:
        label: The name.
        color: A color or theme variable of the bars.
        top: As for `spark`.
    """

    DEFAULT_CSS = """
    Sparkline { height: 1; }
    """
    LABEL_WIDTH = 11
    VALUE_WIDTH = 11

    values: reactive[tuple[float, ...]] = reactive(())
    value: reactive[str] = reactive("")

    def __init__(self, label: str, color: str, top: float | None = None, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._label = label
        self._color = color
        self._top = top

    def render(self) -> Content:
        """Draw."""
        width = max(4, self.content_size.width - self.LABEL_WIDTH - self.VALUE_WIDTH)
        return Content.assemble(
            (self._label.ljust(self.LABEL_WIDTH), "$muted"),
            (spark(fitted(self.values, width), width, self._top), self._color),
            (self.value.rjust(self.VALUE_WIDTH), "bold"),
        )
