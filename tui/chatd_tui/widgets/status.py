"""The title line and the line above the input: who answers, and what is going on."""

from __future__ import annotations

from dataclasses import dataclass

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


# A hint that would be cut shorter than this is left out.
MIN_HINT = 16


@dataclass(frozen=True)
class StatusView:
    """One line; `kind` is a key of `KINDS`."""

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
        hint = f" · {self.view.hint}" if self.view.hint else ""
        width = max(1, self.content_size.width)
        line = Content.assemble((mark, style), (self.view.text, style))
        longer = Content.assemble(line, (hint, "$muted"))
        if longer.cell_length <= width or line.cell_length < width - MIN_HINT:
            line = longer
        return line.truncate(width, ellipsis=True)


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
