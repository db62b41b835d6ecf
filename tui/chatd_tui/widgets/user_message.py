"""What a person said, or the system prompt."""

from __future__ import annotations

from textual import events

from chatd_tui.messages import BranchChosen
from chatd_tui.plain_lines import plain_lines
from chatd_tui.views import ItemView
from chatd_tui.widgets.lines_view import LinesView
from chatd_tui.widgets.versions import leaf_at, marker


class UserMessage(LinesView):
    """Draws a user's or the system's `ItemView`, as plain text."""

    DEFAULT_CSS = """
    UserMessage {
        height: auto; margin: 0 0 1 0; padding: 0 1; border-left: outer $primary; background: $surface;
    }
    UserMessage.-system { border-left: outer $line; color: $muted; background: transparent; }
    UserMessage.-lost { border-left: outer $error; color: $muted; }
    UserMessage.-selected { border-left: thick $accent; background: $panel; }
    """

    def __init__(self, view: ItemView) -> None:
        super().__init__()
        self.view = view
        self.item_id = view.id
        self.text = view.text
        self.set_class(view.role == "system", "-system")

    def _lay_out_all(self, width: int) -> None:
        self._width = width
        self._lines = plain_lines(self.text, max(1, width))
        if self.view.siblings:
            self._lines.append(marker(self.view.siblings))

    def on_click(self, event: events.Click) -> None:
        """Show another version where the mark is clicked."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y != self.content_size.height - 1:
            return
        leaf = leaf_at(self.view.siblings, offset.x)
        if leaf is not None:
            event.stop()
            self.post_message(BranchChosen(leaf))
