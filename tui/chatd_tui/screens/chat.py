"""The conversation screen: transcript, input, sessions at the side, and the two lines that are always on."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from chatd_tui.keymap import DEFAULT, Keymap
from chatd_tui.widgets.composer import Composer
from chatd_tui.widgets.key_line import KeyLine
from chatd_tui.widgets.meter import Meter
from chatd_tui.widgets.session_list import SessionList
from chatd_tui.widgets.status import StatusLine, StatusView, TitleBar
from chatd_tui.widgets.suggestion_list import SuggestionList
from chatd_tui.widgets.transcript import Transcript
from chatd_tui.widgets.welcome import KEYS

WIDE = 100
LOW = 14


class ChatScreen(Screen[None]):
    """Lays the widgets out; on a narrow terminal the sessions lie over the transcript.

    Args:
        keymap: What the bottom line says, and what keys do to a selected message.
    """

    DEFAULT_CSS = """
    ChatScreen {
        & #sessions { display: none; }
        &.-sessions #sessions { display: block; }
        &.-narrow #sessions { layer: above; dock: left; height: 100%; }
        &.-low TitleBar, &.-low KeyLine { display: none; }
        & #conversation { width: 1fr; }
        & #body { height: 1fr; }
        layers: base above;
    }
    """

    def __init__(self, keymap: Keymap = DEFAULT) -> None:
        super().__init__()
        self._keymap = keymap
        self._sessions_wanted: bool | None = None
        self.title_bar = TitleBar()
        self.sessions = SessionList(id="sessions")
        self.transcript = Transcript(keymap.message_keys, self.write, keymap.named(KEYS), id="transcript")
        self.status_line = StatusLine()
        self.suggestions = SuggestionList()
        self.composer = Composer(self.suggestions, self.select_message, id="composer")
        self.meter = Meter()
        self.key_line = KeyLine(keymap.bottom())

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield self.title_bar
        with Horizontal(id="body"):
            yield self.sessions
            with Vertical(id="conversation"):
                yield self.transcript
                yield self.status_line
                yield self.suggestions
                yield self.composer
        yield self.meter
        yield self.key_line

    def on_mount(self) -> None:
        """Begin at the input."""
        self.composer.focus()
        self._arrange(self.size.width, self.size.height)

    def on_resize(self, event: events.Resize) -> None:
        """Arrange for another size."""
        if event.size.width < WIDE and self._sessions_wanted and not self.sessions.has_focus:
            # Beside the transcript it was welcome; over it, it would hide what is read and typed.
            self._sessions_wanted = None
        self._arrange(event.size.width, event.size.height)

    def _arrange(self, width: int, height: int) -> None:
        narrow = width < WIDE
        shown = self._sessions_wanted if self._sessions_wanted is not None else not narrow
        self.set_class(narrow, "-narrow")
        self.set_class(height < LOW, "-low")
        self.set_class(shown, "-sessions")

    def toggle_sessions(self) -> None:
        """Show the sessions and give them the keyboard; hide them when they have it."""
        if self.has_class("-sessions") and self.sessions.has_focus:
            self._sessions_wanted = False
            self._arrange(self.size.width, self.size.height)
            self.composer.focus()
            return
        self._sessions_wanted = True
        self._arrange(self.size.width, self.size.height)
        # At once, so that keys that are typed right after go there.
        self.set_focus(self.sessions)

    @property
    def status(self) -> StatusView:
        """The line above the input."""
        return self.status_line.view

    @status.setter
    def status(self, view: StatusView) -> None:
        self.status_line.view = view

    def write(self, text: str = "") -> None:
        """Give the keyboard to the input, with what was typed elsewhere."""
        self.set_focus(self.composer)
        if text:
            self.composer.insert(text)

    def select_message(self) -> None:
        """Give the keyboard to the messages: the selected one, else the last."""
        views = self.transcript.views()
        if not views:
            return
        self.set_focus(self.transcript)
        if self.transcript.selected is None:
            self.transcript.select(views[-1].id)

    def on_descendant_focus(self) -> None:
        """Name the keys that work where the keyboard is."""
        self.key_line.keys = self._keymap.message_bottom() if self.transcript.has_focus else self._keymap.bottom()

    def action_scroll_transcript(self, pages: int) -> None:
        """Scroll the transcript from the input."""
        transcript = self.transcript
        if pages < 0:
            transcript.scroll_page_up(animate=False)
        else:
            transcript.scroll_page_down(animate=False)

    def show_first_messages(self) -> None:
        """Go to the first message."""
        self.transcript.action_to_end(-1)

    def show_message(self, item_id: str) -> bool:
        """Select a message and go to it; False where it is not in the conversation."""
        if not self.transcript.reveal(item_id):
            return False
        # What was typed meanwhile is to go on where it was begun.
        if not self.composer.text:
            self.set_focus(self.transcript)
        return True

    def leave(self) -> bool:
        """Leave the innermost thing that is open and go to the input; False if nothing was."""
        composer, transcript = self.composer, self.transcript
        if self.suggestions.view.rows and composer.has_focus:
            composer.clear()
        elif transcript.has_focus or (transcript.selected is not None and not composer.text):
            transcript.select(None)
            composer.focus()
        elif not composer.leave_edit():
            return self.close_overlay()
        return True

    def close_overlay(self) -> bool:
        """Hide the sessions where they lie over the transcript; False if there was nothing to hide."""
        sessions = self.sessions
        if self.has_class("-narrow") and self.has_class("-sessions"):
            self._sessions_wanted = None
            self._arrange(self.size.width, self.size.height)
        elif not sessions.has_focus:
            return False
        self.composer.focus()
        return True
