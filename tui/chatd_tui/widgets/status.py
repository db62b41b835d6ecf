"""The title line and the line above the input: who answers, and what is going on."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

KINDS = {
    "idle": ("", "$muted"),
    "busy": ("◐ ", "$primary"),
    "notice": ("• ", "$muted"),
    "warning": ("! ", "$warning"),
    "error": ("✕ ", "$error"),
}


BEFORE_HINT = " · "
MIN_WORDS = 2
"""Of a list that is cut: fewer tell nothing."""


@dataclass(frozen=True)
class StatusView:
    """One line.

    Attributes:
        kind: A key of `KINDS`.
        text: What is said.
        hint: What goes with it, where there is room: parts with "; " between them, the most important first, or words
            with ", " between them.
    """

    kind: str = "idle"
    text: str = ""
    hint: str = ""


@dataclass(frozen=True)
class TitleView:
    """The title line: the daemon where there are several, the model, who one is, the session, the connection."""

    model: str = ""
    who: str = ""
    session: str = ""
    phase: str = "connecting"
    connection: str = "connecting"
    server: str = ""


class StatusLine(Widget):
    """Draws a `StatusView`."""

    DEFAULT_CSS = """
    StatusLine { height: 1; padding: 0 2; }
    """

    view: reactive[StatusView] = reactive(StatusView())

    def render(self) -> Content:
        """Draw."""
        mark, style = KINDS[self.view.kind]
        width = max(1, self.content_size.width)
        line = Content.assemble((mark, style), (self.view.text, style))
        hint = fitting(self.view.hint, width - line.cell_length - cell_len(BEFORE_HINT))
        if hint:
            line = Content.assemble(line, (BEFORE_HINT + hint, "$muted"))
        return line.truncate(width, ellipsis=True)


def fitting(hint: str, room: int) -> str:
    """Return what of a hint fits in `room` columns: whole parts, or the first of many words; "" where none does."""
    if cell_len(hint) <= room:
        return hint
    for between, end in (("; ", ""), (", ", ", …")):
        parts = hint.split(between)
        for number in range(len(parts) - 1, 0, -1):
            shorter = between.join(parts[:number]) + end
            if cell_len(shorter) <= room and (not end or number >= MIN_WORDS):
                return shorter
    return ""


class TitleBar(Widget):
    """Draws a `TitleView`: the left part gives way to the connection."""

    DEFAULT_CSS = """
    TitleBar { height: 1; padding: 0 1; background: $panel; }
    """

    view: reactive[TitleView] = reactive(TitleView())

    def render(self) -> Content:
        """Draw."""
        view = self.view
        width = self.content_size.width
        mark, style = {"connected": ("●", "$success"), "closed": ("✕", "$error")}.get(view.phase, ("◌", "$warning"))
        right = Content.assemble((f"{mark} ", style), (view.connection, "$muted"))
        parts = [Content.styled("chatd", "bold $primary")]
        if view.server:
            parts.append(Content.styled(view.server, "bold"))
        if view.model:
            parts.append(Content.styled(view.model, ""))
        if view.who:
            parts.append(Content.styled(view.who, "$muted"))
        if view.session:
            parts.append(Content.styled(view.session, "$muted"))
        left = Content("  ").join(parts)
        room = width - right.cell_length - 2
        if room < 5:
            return right.truncate(max(1, width), ellipsis=True)
        left = left.truncate(room, ellipsis=True)
        return Content.assemble(left, " " * (width - left.cell_length - right.cell_length), right)
