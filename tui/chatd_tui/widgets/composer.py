"""The input: Enter sends; Shift+Enter, Alt+Enter, Ctrl+J or a backslash at the end make a line.

A slash at the beginning offers commands and an @ at the end files; Tab takes one. Up at the first line and Down at the
last one bring back what was sent before. A message that is edited stands here until it is sent or left. A long text
that is pasted stands here as a mark, and is refused where no message can be so long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import TextArea

from chatd.clean import clean
from chatd.errors import InvalidRequest
from chatd.protocol import MAX_FRAME_BYTES
from chatd_tui.commands import Suggestion, as_typed
from chatd_tui.input_history import InputHistory
from chatd_tui.keys import NEWLINE_KEYS
from chatd_tui.messages import Refused, Submitted
from chatd_tui.pasted import SHOWN_CHARS, Pasted
from chatd_tui.widgets.suggestion_list import SuggestionList

MAX_LINES = 8
ASK = "Ask something, or / for commands"
ONLY_WATCHING = "You only watch; /watch to take part"


def too_long(what: str, size_bytes: int, limit_bytes: int) -> InvalidRequest:
    """Return the refusal of a text that no message can hold."""
    return InvalidRequest(
        f"{what} has {size_bytes} bytes, the limit is {limit_bytes} (limits.frame_bytes)", code="frame_too_large"
    )


class Composer(TextArea):
    """A text area that says `Submitted` and is as high as its text, up to `MAX_LINES`.

    Args:
        offered: Where commands are offered.
        select: Gives the keyboard to the messages.

    Attributes:
        suggest: What a begun command can become.
        typed: Takes the text with each change, unless another message is edited here.
        editing: The message that is edited here.
        sent: What was sent before.
        max_bytes: What the daemon takes at most.
    """

    DEFAULT_CSS = """
    Composer {
        height: 3; padding: 0 1; scrollbar-size-vertical: 1;
        background: $surface; border: round $line;
        &:focus { border: round $primary; }
        &.-editing { border: round $accent; border-title-color: $accent; }
        & .text-area--cursor-line { background: transparent; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "screen.scroll_transcript(-1)", show=False),
        Binding("pagedown", "screen.scroll_transcript(1)", show=False),
    ]

    def __init__(self, offered: SuggestionList, select: Callable[[], None], *, id: str | None = None) -> None:
        super().__init__(
            id=id,
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            placeholder=ASK,
        )
        self._num_lines = 1
        self._offered = offered
        self._select = select
        self._draft = ""
        self.suggest: Callable[[str], Sequence[Suggestion]] = lambda _: ()
        self.typed: Callable[[str], None] = lambda _: None
        self.editing: str | None = None
        self.sent = InputHistory()
        self.max_bytes = MAX_FRAME_BYTES
        self._pasted = Pasted()

    @property
    def message(self) -> str:
        """What is sent: the text, with what its marks stand for."""
        return self._pasted.whole(self.text)

    def on_text_area_changed(self) -> None:
        """Be as high as the text, and offer commands."""
        self._fit()
        self._offer()
        if self.editing is None:
            self.typed(self.message)

    def _offer(self) -> None:
        begun = self.document.line_count == 1 and self.document.get_line(0).startswith("/")
        names_file = "@" in self.document.get_line(self.document.line_count - 1)
        begun = begun or (names_file and self.cursor_location == self.document.end)
        # A command that was recalled is whole, and the arrows go on through what was sent.
        begun = begun and not self.sent.shows(self.text)
        self._offered.show(self.suggest(self.text) if begun else ())

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
        focused = self.screen.focused
        if focused is not None and focused is not self:
            # Typed before the keyboard went elsewhere, and meant for that.
            focused._forward_event(events.Key(event.key, event.character))
        elif event.key == "enter":
            self._enter()
        elif event.key in NEWLINE_KEYS:
            self.insert("\n")
        elif event.key in ("tab", "shift+tab"):
            if event.key == "tab" and self._offered.view.rows:
                self._complete()
            else:
                self._select()
        elif event.key in ("up", "down") and self._offered.view.rows:
            self._offered.move(-1 if event.key == "up" else 1)
        elif (event.key in ("up", "down") and self._recall(event.key)) or await self._run_own_binding(event):
            pass
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    async def _run_own_binding(self, event: events.Key) -> bool:
        """Do at once what a key does to the text; the app would do it after keys that came later."""
        if event.is_printable:
            return False
        active = self.screen.active_bindings.get(event.key)
        if active is None or active.node is not self:
            return False
        return await self.app.run_action(active.binding.action, default_namespace=self)

    def _recall(self, key: str) -> bool:
        """Show what was sent before or after; False inside of a text, and where there is nothing more."""
        if self.editing is not None or not self.selection.is_empty:
            return False
        if key == "up":
            is_edge = self.navigator.is_first_wrapped_line(self.cursor_location)
        else:
            is_edge = self.navigator.is_last_wrapped_line(self.cursor_location)
        if not is_edge:
            return False
        text = self.sent.back(self.text) if key == "up" else self.sent.forward(self.text)
        if text is None:
            return False
        self._write(text)
        self._offer()
        return True

    def _complete(self) -> None:
        # Keys come faster than what they change is told, so what is offered is made anew.
        self._offer()
        marked = self._offered.marked
        if marked is not None and marked.text != self.text:
            self._write(marked.text)
            self._offer()

    def _write(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    async def _on_paste(self, event: events.Paste) -> None:
        # What is pasted may come from anywhere, and is drawn like remote text. The text area's own handler is called
        # after this one and inserts it.
        text = clean(event.text)
        size_bytes = len(text.encode())
        if size_bytes > self.max_bytes:
            event.prevent_default()
            self.post_message(Refused(too_long("what is pasted", size_bytes, self.max_bytes)))
            return
        event.text = text if len(text) <= SHOWN_CHARS else self._pasted.mark(text)

    def _enter(self) -> None:
        row, column = self.cursor_location
        if self.selection.is_empty and column and self.document.get_line(row)[:column].endswith("\\"):
            self.replace("\n", (row, column - 1), (row, column))
            return
        if self._offered.moved and self._offered.view.rows:
            self._complete()
        elif self.text.strip():
            said = Submitted(self.message.strip("\n"), self.editing)
            if self.editing is None:
                # At once: keys that come right after are of what follows. What is refused is given back.
                self.clear()
            self.post_message(said)

    def take_back(self, message: str) -> None:
        """Put a message that was refused back, unless something else was begun."""
        if not self.text.strip():
            self._write(self._pasted.shown(as_typed(message)))

    def take_command_back(self, text: str) -> None:
        """Put a command that was refused back, unless something else was begun."""
        if not self.text.strip():
            self.begin_command(text)

    def begin_command(self, text: str) -> None:
        """Let a command be finished here."""
        self._write(self._pasted.shown(text))
        self._offer()

    def begin_edit(self, item_id: str, message: str) -> None:
        """Edit a message here; what was begun comes back when it is left."""
        if self.editing is None:
            self._draft = self.text
        self.editing = item_id
        self.border_title = "another version of this message · Esc leaves it"
        self.add_class("-editing")
        self._write(self._pasted.shown(as_typed(message)))

    def leave_edit(self) -> bool:
        """Go back to what was begun before; False where nothing is edited."""
        if self.editing is None:
            return False
        self.end_edit()
        return True

    def end_edit(self) -> None:
        """Show what was begun before the edit."""
        self.editing = None
        self.border_title = None
        self.remove_class("-editing")
        self._write(self._draft)
        self._draft = ""
