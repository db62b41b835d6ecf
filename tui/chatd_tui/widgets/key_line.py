"""The bottom line: the keys that matter here, most wanted first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

Keys = Sequence[tuple[str, str]]
GAP = "  "


NOT_HERE = " (not here)"


def key_line(keys: Keys, width: int, missing: Collection[str] = ()) -> Content:
    """Return as many whole keys as fit in `width` columns; those in `missing` are faint, and said to do nothing."""
    line = Content("")
    for key, meaning in keys:
        if key in missing:
            part = Content.assemble((f"{key} {meaning}{NOT_HERE}", "$faint"))
        else:
            part = Content.assemble((key, "bold $primary"), " ", (meaning, "$muted"))
        longer = Content.assemble(line, GAP, part) if line else part
        if longer.cell_length > width:
            break
        line = longer
    return line


class KeyLine(Widget):
    """Draws key names and what they do; those in `missing` do nothing with this daemon."""

    DEFAULT_CSS = """
    KeyLine { height: 1; padding: 0 1; background: $surface; }
    """

    keys: reactive[tuple[tuple[str, str], ...]] = reactive(())

    def __init__(self, keys: Keys, missing: Collection[str] = ()) -> None:
        super().__init__()
        self.set_reactive(KeyLine.keys, tuple(keys))
        self._missing = frozenset(missing)

    def render(self) -> Content:
        """Draw."""
        return key_line(self.keys, self.content_size.width, self._missing)
