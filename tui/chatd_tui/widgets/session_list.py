"""The person's sessions, last used first, under the names of their daemons where these are several."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from chatd_tui.messages import SessionChosen
from chatd_tui.views import ServerRow, SessionRow

NEW = "+"
"""Stands for a new session where ids of options have a session's."""

PHASES = {"connected": ("", ""), "closed": ("✕ ", "$error")}
"""Marks before a daemon's name; a dot marks an answer in progress."""

WIDTH = 27


class SessionList(OptionList):
    """Draws `ServerRow`s; says `SessionChosen`."""

    DEFAULT_CSS = """
    SessionList {
        width: 30; height: 1fr; padding: 0; border: none; background: $surface;
        border-right: tall $panel; scrollbar-size-vertical: 1;
        &:focus { border: none; border-right: tall $primary; background: $surface; background-tint: transparent; }
        & > .option-list--option-highlighted { background: $surface; color: $foreground; text-style: none; }
        &:focus > .option-list--option-highlighted { background: $primary 25%; color: $foreground; text-style: none; }
        & > .option-list--option-disabled { color: $foreground; }
        & > .option-list--option-hover { background: $panel; }
    }
    """

    highlighted: reactive[int | None] = reactive(None, repaint=False)
    """The option that Enter takes. Another one has its own lines and those of the one before drawn, not the list."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(_new_option(""), id=id, markup=False)
        self._rows: tuple[ServerRow, ...] = ()

    def show(self, rows: Sequence[ServerRow]) -> None:
        """Draw these rows; the highlighted session stays highlighted."""
        if tuple(rows) == self._rows:
            return
        chosen = self.highlighted_option.id if self.highlighted_option else None
        self._rows = tuple(rows)
        options: list[Option] = []
        current = ""
        for server in rows:
            if len(rows) > 1:
                options.append(_server_option(server))
            options.append(_new_option(server.name))
            options += [_option(server.name, row) for row in server.sessions]
            if server.is_shown:
                current = _id(server.name, next((row.id for row in server.sessions if row.current), NEW))
        self.clear_options()
        self.add_options(options)
        ids = [option.id for option in options]
        if not self.has_focus or chosen not in ids:
            chosen = current
        self.highlighted = ids.index(chosen) if chosen in ids else None

    def watch_highlighted(self, before: int | None, highlighted: int | None) -> None:  # type: ignore[override]
        """Draw what is no longer highlighted and what is now, and go there."""
        super().watch_highlighted(highlighted)
        for option in (before, highlighted):
            if option in self._index_to_line:
                self.refresh_lines(self._index_to_line[option], self._heights[option])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Tell which session is wanted."""
        event.stop()
        server, _, session = (event.option.id or "").partition("/")
        self.post_message(SessionChosen(None if session == NEW else session, server))


def _id(server: str, session: str) -> str:
    return f"{server}/{session}"


def _server_option(row: ServerRow) -> Option:
    mark = PHASES.get(row.phase, ("◌ ", "$warning"))
    state = "" if row.phase == "connected" else f"  {row.connection}"
    name = Content.assemble(mark, (row.name, "bold $accent" if row.is_shown else "$accent"), (state, "$muted"))
    return Option(name.truncate(WIDTH, ellipsis=True), disabled=True)


def _new_option(server: str) -> Option:
    return Option(Content.styled("+ New conversation", "bold $primary"), id=_id(server, NEW))


def _option(server: str, row: SessionRow) -> Option:
    mark = ("● ", "$success") if row.busy else ("▸ ", "$primary") if row.current else ("  ", "")
    title = Content.assemble(mark, (row.title, "bold" if row.current else ""))
    prompt = Content("\n").join(
        [
            title.truncate(WIDTH, ellipsis=True),
            Content.styled("  " + row.detail, "$muted").truncate(WIDTH, ellipsis=True),
        ]
    )
    return Option(prompt, id=_id(server, row.id))
