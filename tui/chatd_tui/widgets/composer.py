"""The input: Enter sends; Shift+Enter, Alt+Enter, Ctrl+J or a backslash at the end make a line."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import TextArea

from chatd_tui.clean import clean
from chatd_tui.keys import NEWLINE_KEYS
from chatd_tui.messages import Submitted

MAX_LINES = 8


class Composer(TextArea):
    """A text area that says `Submitted` and is as high as its text, up to `MAX_LINES`."""

    DEFAULT_CSS = """
    Composer {
        height: 3; padding: 0 1; scrollbar-size-vertical: 1;
        background: $surface; border: round $line;
        &:focus { border: round $primary; }
        & .text-area--cursor-line { background: transparent; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "screen.scroll_transcript(-1)", show=False),
        Binding("pagedown", "screen.scroll_transcript(1)", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(
            id=id,
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            placeholder="Ask something…",
        )
        self._num_lines = 1

    def on_text_area_changed(self) -> None:
        """Be as high as the text."""
        self._fit()

    def on_resize(self) -> None:
        """Be as high as the text is at another width."""
        self._fit()

    def _fit(self) -> None:
        # Setting a height lays the whole screen out anew, so it is set only when it changes.
        lines = min(MAX_LINES, max(1, self.wrapped_document.height))
        if lines != self._num_lines:
            self._num_lines = lines
            self.styles.height = lines + 2

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self._enter()
        elif event.key in NEWLINE_KEYS:
            event.stop()
            event.prevent_default()
            self.insert("\n")
        else:
            await super()._on_key(event)

    async def _on_paste(self, event: events.Paste) -> None:
        # What is pasted may come from anywhere, and is drawn like remote text.
        event.text = clean(event.text)
        await super()._on_paste(event)

    def _enter(self) -> None:
        row, column = self.cursor_location
        if self.selection.is_empty and column and self.document.get_line(row)[:column].endswith("\\"):
            self.replace("\n", (row, column - 1), (row, column))
            return
        if self.text.strip():
            self.post_message(Submitted(self.text.strip("\n")))

    def take_back(self, text: str) -> None:
        """Put a message that was refused back, unless something else was begun."""
        if not self.text.strip():
            self.load_text(text)
            self.move_cursor(self.document.end)
