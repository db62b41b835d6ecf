"""The conversations that a search found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from chatd_tui.views import SessionRow


class FoundScreen(ModalScreen[str | None]):
    """Lists conversations; Enter gives the chosen one's id, Escape none.

    Args:
        query: What was looked for, cleaned.
        rows: What was found.
    """

    DEFAULT_CSS = """
    FoundScreen {
        align: center middle;
        & > Vertical {
            width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 1 2;
            border: round $primary; background: $surface;
        }
        & Static { height: auto; margin: 0 0 1 0; }
        & OptionList {
            height: auto; max-height: 16; border: none; background: $surface; padding: 0;
            &:focus { border: none; background-tint: transparent; }
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", "Back")]

    def __init__(self, query: str, rows: Sequence[SessionRow]) -> None:
        super().__init__()
        self._query = query
        self._rows = tuple(rows)

    def compose(self) -> ComposeResult:
        """Lay out."""
        count = len(self._rows)
        number = "No conversation has" if not count else f"{count} conversation{'' if count == 1 else 's'} with"
        with Vertical():
            yield Static(Content.assemble((f"{number} ", "$muted"), (self._query, "bold")), markup=False)
            if self._rows:
                yield OptionList(*map(_option, self._rows), markup=False)
            yield Static(Content.styled("Enter opens it, Esc goes back" if count else "Esc goes back", "$faint"))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Give the chosen one."""
        self.dismiss(event.option.id)

    def action_leave(self) -> None:
        """Give none."""
        self.dismiss(None)


def _option(row: SessionRow) -> Option:
    lines = [Content.styled(row.title, "bold"), Content.styled(f"  {row.detail}", "$muted")]
    return Option(Content("\n").join([line.truncate(68, ellipsis=True) for line in lines]), id=row.id)
