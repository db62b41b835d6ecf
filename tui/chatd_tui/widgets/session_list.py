"""The person's sessions, last used first."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from chatd_tui.messages import SessionChosen
from chatd_tui.views import SessionRow

NEW_ID = "+new"


class SessionList(OptionList):
    """Draws `SessionRow`s; says `SessionChosen`."""

    DEFAULT_CSS = """
    SessionList {
        width: 30; height: 1fr; padding: 0; border: none; background: $surface;
        border-right: tall $panel; scrollbar-size-vertical: 1;
        &:focus { border: none; border-right: tall $primary; background: $surface; background-tint: transparent; }
        & > .option-list--option-highlighted { background: $surface; color: $foreground; text-style: none; }
        &:focus > .option-list--option-highlighted { background: $primary 25%; color: $foreground; text-style: none; }
        & > .option-list--option-hover { background: $panel; }
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(_new_option(), id=id, markup=False)
        self._rows: tuple[SessionRow, ...] = ()

    def show(self, rows: Sequence[SessionRow]) -> None:
        """Draw these rows; the highlighted session stays highlighted."""
        if tuple(rows) == self._rows:
            return
        chosen = self.highlighted_option.id if self.highlighted_option else None
        self._rows = tuple(rows)
        self.clear_options()
        self.add_options([_new_option(), *(_option(row) for row in rows)])
        ids = [NEW_ID, *(row.id for row in rows)]
        current = next((row.id for row in rows if row.current), NEW_ID)
        if not self.has_focus or chosen not in ids:
            chosen = current
        self.highlighted = ids.index(chosen)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Tell which session is wanted."""
        event.stop()
        self.post_message(SessionChosen(None if event.option.id == NEW_ID else event.option.id))


def _new_option() -> Option:
    return Option(Content.styled("+ New conversation", "bold $primary"), id=NEW_ID)


def _option(row: SessionRow) -> Option:
    mark = ("● ", "$success") if row.busy else ("▸ ", "$primary") if row.current else ("  ", "")
    title = Content.assemble(mark, (row.title, "bold" if row.current else ""))
    prompt = Content("\n").join(
        [
            title.truncate(27, ellipsis=True),
            Content.styled("  " + row.detail, "$muted").truncate(27, ellipsis=True),
        ]
    )
    return Option(prompt, id=row.id)
