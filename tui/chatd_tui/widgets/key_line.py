"""The bottom line: the keys that matter here, most wanted first."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

Keys = Sequence[tuple[str, str]]
GAP = "  "


def key_line(keys: Keys, width: int) -> Content:
    """Return as many whole keys as fit in `width` columns."""
    line = Content("")
    for key, meaning in keys:
        part = Content.assemble((key, "bold $primary"), " ", (meaning, "$muted"))
        longer = Content.assemble(line, GAP, part) if line else part
        if longer.cell_length > width:
            break
        line = longer
    return line


class KeyLine(Widget):
    """Draws key names and what they do."""

    DEFAULT_CSS = """
    KeyLine { height: 1; padding: 0 1; background: $surface; }
    """

    keys: reactive[tuple[tuple[str, str], ...]] = reactive(())

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self.set_reactive(KeyLine.keys, tuple(keys))

    def render(self) -> Content:
        """Draw."""
        return key_line(self.keys, self.content_size.width)
