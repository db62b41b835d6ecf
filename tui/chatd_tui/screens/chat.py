"""The conversation screen: transcript, input, sessions at the side, and the two lines that are always on."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from chatd_tui.widgets.composer import Composer
from chatd_tui.widgets.key_line import KeyLine
from chatd_tui.widgets.meter import Meter
from chatd_tui.widgets.session_list import SessionList
from chatd_tui.widgets.status import StatusLine, TitleBar
from chatd_tui.widgets.transcript import Transcript

KEYS = (
    ("F1", "help"),
    ("F2", "pool"),
    ("F3", "conversations"),
    ("Esc", "stop"),
    ("^N", "new"),
    ("^Y", "copy"),
    ("^Q", "quit"),
)
WIDE = 100
LOW = 14


class ChatScreen(Screen[None]):
    """Lays the widgets out; on a narrow terminal the sessions lie over the transcript."""

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
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f3,ctrl+l", "toggle_sessions", "Sessions"),
        Binding("ctrl+home", "first_messages", "First messages", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._sessions_wanted: bool | None = None
        self.title_bar = TitleBar()
        self.sessions = SessionList(id="sessions")
        self.transcript = Transcript(id="transcript")
        self.status_line = StatusLine()
        self.composer = Composer(id="composer")
        self.meter = Meter()

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield self.title_bar
        with Horizontal(id="body"):
            yield self.sessions
            with Vertical(id="conversation"):
                yield self.transcript
                yield self.status_line
                yield self.composer
        yield self.meter
        yield KeyLine(KEYS)

    def on_mount(self) -> None:
        """Begin at the input."""
        self.composer.focus()
        self._arrange(self.size.width, self.size.height)

    def on_resize(self, event: events.Resize) -> None:
        """Arrange for another size."""
        self._arrange(event.size.width, event.size.height)

    def _arrange(self, width: int, height: int) -> None:
        narrow = width < WIDE
        shown = self._sessions_wanted if self._sessions_wanted is not None else not narrow
        self.set_class(narrow, "-narrow")
        self.set_class(height < LOW, "-low")
        self.set_class(shown, "-sessions")

    def action_toggle_sessions(self) -> None:
        """Show the sessions and give them the keyboard; hide them when they have it."""
        if self.has_class("-sessions") and self.sessions.has_focus:
            self._sessions_wanted = False
            self._arrange(self.size.width, self.size.height)
            self.composer.focus()
            return
        self._sessions_wanted = True
        self._arrange(self.size.width, self.size.height)
        self.sessions.focus()

    def action_scroll_transcript(self, pages: int) -> None:
        """Scroll the transcript from the input."""
        transcript = self.transcript
        if pages < 0:
            transcript.scroll_page_up(animate=False)
        else:
            transcript.scroll_page_down(animate=False)

    def action_first_messages(self) -> None:
        """Draw the messages above and go to the first one."""
        transcript = self.transcript
        transcript.show_earlier()
        transcript.scroll_home(animate=False)

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
