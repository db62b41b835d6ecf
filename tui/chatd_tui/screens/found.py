"""The conversations that a search found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from chatd_tui.screens.choice import ChoiceDialog, prompt
from chatd_tui.views import FoundRow


class FoundScreen(ChoiceDialog[FoundRow | None]):
    """Lists conversations and where the text is in them; Enter gives the chosen one, Escape none.

    Args:
        query: What was looked for, cleaned.
        rows: What was found.
    """

    def __init__(self, query: str, rows: Sequence[FoundRow]) -> None:
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
                yield OptionList(*(_option(row, self._query) for row in self._rows), markup=False)
            yield Static(Content.styled("Enter opens it there, Esc goes back" if count else "Esc goes back", "$faint"))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Give the chosen one."""
        self.dismiss(self._rows[event.option_index])


def _option(row: FoundRow, query: str) -> Option:
    where = f"{row.server} · " if row.server else ""
    lines = [Content.styled(row.session.title, "bold"), Content.styled(f"  {where}{row.session.detail}", "$muted")]
    if row.passage:
        lines.append(Content("  ").append(_marked(row.passage, query)))
    return Option(prompt(lines))


def _marked(passage: str, query: str) -> Content:
    """Return a passage in which the words of a query stand out."""
    marked = Content(passage)
    for word in query.split():
        for match in re.finditer(re.escape(word), passage, re.IGNORECASE):
            marked = marked.stylize("bold $accent", match.start(), match.end())
    return marked
