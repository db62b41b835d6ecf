"""What a begun slash command can become, above the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from chatd_tui.commands import Suggestion

MAX_ROWS = 7
GAP = 2


@dataclass(frozen=True)
class SuggestionsView:
    """The rows, and which one is marked."""

    rows: tuple[Suggestion, ...] = ()
    marked: int = 0


class SuggestionList(Widget):
    """Draws a `SuggestionsView`; without rows it takes no room."""

    DEFAULT_CSS = """
    SuggestionList { height: auto; max-height: 7; padding: 0 2; display: none; background: $panel; }
    SuggestionList.-shown { display: block; }
    """

    view: reactive[SuggestionsView] = reactive(SuggestionsView(), layout=True)

    def __init__(self) -> None:
        super().__init__()
        self.moved = False
        """Whether the person went to the marked row."""

    def show(self, rows: Sequence[Suggestion]) -> None:
        """Offer these."""
        if tuple(rows) != self.view.rows:
            self.moved = False
            self.view = SuggestionsView(tuple(rows))
            self.set_class(bool(rows), "-shown")

    def move(self, step: int) -> None:
        """Mark another row, round about."""
        rows = self.view.rows
        if rows:
            self.moved = True
            self.view = SuggestionsView(rows, (self.view.marked + step) % len(rows))

    @property
    def marked(self) -> Suggestion | None:
        """The row that Tab takes."""
        return self.view.rows[self.view.marked] if self.view.rows else None

    def render(self) -> Content:
        """Draw."""
        rows, marked = self.view.rows, self.view.marked
        width = max(1, self.content_size.width)
        first = max(0, min(marked - MAX_ROWS // 2, len(rows) - MAX_ROWS))
        room = max((len(row.label) for row in rows), default=0) + GAP
        lines = []
        for place, row in enumerate(rows[first : first + MAX_ROWS], first):
            sign = "▸ " if place == marked else "  "
            style = "bold $primary" if row.enabled else "$faint"
            label = Content.assemble((sign, "$primary"), (row.label, style))
            said = _fitting(row.help, width - label.cell_length - GAP)
            # Nearer than the others' where it does not fit below them.
            beside = max(GAP, min(room - len(row.label), width - label.cell_length - cell_len(said)))
            line = label.append(" " * beside).append(Content.styled(said, "$muted")) if said else label
            lines.append(line.truncate(width, ellipsis=True))
        return Content("\n").join(lines)


def _fitting(said: str, room: int) -> str:
    """Return what of a command's help fits: all of it, or its first parts; "" where not even one does."""
    while said and cell_len(said) > room:
        said = said[: max(said.rfind(", "), said.rfind("; "), 0)]
    return said
