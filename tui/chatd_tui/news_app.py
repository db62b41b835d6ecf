"""What the terminal client does with the news of its daemons: it keeps them, and tells the widgets what to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from textual.app import App

from chatd.clean import clean_line
from chatd.client import ConnectionPhase, ConnectionState
from chatd.config import Server
from chatd.errors import AuthenticationError, ChatdError
from chatd.protocol import (
    MAX_FRAME_BYTES,
    Error,
    PrefillState,
    RateLimitsUpdated,
    ResponseCompleted,
    ResponseIncomplete,
    ServerDraining,
    SessionClosed,
    SessionTier,
    SessionUpdated,
)
from chatd_tui import messages, status_text
from chatd_tui.background import run_beside
from chatd_tui.collection import settle
from chatd_tui.conversation import Conversation
from chatd_tui.fault_report import FaultReport
from chatd_tui.keymap import Keymap
from chatd_tui.keys_in_order import KeysInOrder
from chatd_tui.link import DaemonLink
from chatd_tui.screens.chat import ChatScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.servers import Daemons
from chatd_tui.typing_ahead import TypingAhead
from chatd_tui.views import MeterView
from chatd_tui.widgets.composer import ASK, ONLY_WATCHING
from chatd_tui.widgets.status import StatusView, TitleView

LIST_S = 5.0
"""How old the list of conversations may be while one sees it."""


class NewsApp(FaultReport, KeysInOrder, App[None], inherit_bindings=False):
    """Connects to daemons and draws what they say.

    Args:
        servers: All of them by name; the first one is on the screen at first.
        keymap: The keys of the commands.

    Attributes:
        chat: The screen with the conversation.
        daemons: What is known of each.
        conversation: The one on the screen.
        typing_ahead: Tells the daemon on the screen what is typed, where that is wanted.
    """

    def __init__(self, servers: Sequence[Server], keymap: Keymap) -> None:
        super().__init__()
        self.chat = ChatScreen(keymap)
        self.daemons = Daemons(servers, self.post_message)
        self.conversation = Conversation(self.chat, self.draw_meter, keymap.way("stop"))
        self._connect_key = keymap.way("connect")
        self.typing_ahead = TypingAhead(
            lambda text, after_s: self.link.type_ahead(text, after_s), self._show_type_ahead
        )
        self.chat.composer.typed = self.typing_ahead.changed
        self.meter = MeterView()
        self._is_settled = False
        self.wanted_item: str | None = None
        """The message to go to, once its conversation is there."""

    @property
    def link(self) -> DaemonLink:
        """To the daemon on the screen."""
        return self.daemons.shown.link

    def stay_connected(self) -> None:
        """Stay connected to every daemon, and have the list as it is elsewhere too, while one sees it."""
        run_beside(self, self.daemons.run, group="links")
        self.set_interval(LIST_S, self._refresh_sessions)

    async def on_unmount(self) -> None:
        """End what the links still run."""
        await self.daemons.stop()

    # News.

    def on_connection_changed(self, message: messages.ConnectionChanged) -> None:
        """Show where a connection stands."""
        is_new = self.daemons.changed(message)
        if self.daemons.are_several:
            self.draw_sessions()
        if not self.daemons.is_shown(message):
            return
        self.draw_connection(message.state)
        if not self._is_settled and message.state.phase is ConnectionPhase.CONNECTED and not self.is_headless:
            self._is_settled = True
            self.call_after_refresh(settle)
        if is_new:
            self.draw_meter(context_max=self.chat.transcript.welcome.context)

    def on_sessions_listed(self, message: messages.SessionsListed) -> None:
        """Show the sessions."""
        self.daemons[message.server].sessions = message.sessions
        self.draw_sessions()

    async def on_session_opened(self, message: messages.SessionOpened) -> None:
        """Show a session from its snapshot on."""
        snapshot = message.attached.snapshot
        if self._is_on_screen(message, message.attached.session) and snapshot is not None:
            await self.conversation.show(snapshot, self.link.role)
            self.draw_title(None)
            wanted, self.wanted_item = self.wanted_item, None
            if wanted is not None and not self.chat.show_message(wanted):
                self.chat.status = status_text.ELSEWHERE

    async def on_session_news(self, message: messages.SessionNews) -> None:
        """Apply one event of the session on the screen."""
        if not self._is_on_screen(message, message.session):
            return
        event = message.event
        if isinstance(event, PrefillState):
            self.typing_ahead.show(event)
            return
        if isinstance(event, SessionUpdated):
            self.daemons.shown.note(event.info)
            self.draw_sessions()
            return
        if isinstance(event, SessionTier):
            self.daemons.shown.note_tier(event.session, event.tier)
            self.draw_sessions()
        await self.conversation.apply(event)
        if isinstance(event, SessionClosed):
            # Everybody was detached; who looks at it goes on looking.
            await self.link.open(message.session, self.link.role)
        if isinstance(event, ResponseCompleted | ResponseIncomplete):
            run_beside(self, self.link.refresh_sessions, group="list", exclusive=True)

    def on_session_lost(self, message: messages.SessionLost) -> None:
        """Let the next message begin a conversation."""
        if self.daemons.is_shown(message) and self.link.session is None:
            self.typing_ahead.forget()
            self.conversation.lose(is_erased=message.is_erased)

    def on_pool_changed(self, message: messages.PoolChanged) -> None:
        """Show the pool, in the meter and on its page."""
        if not self.daemons.is_shown(message):
            return
        totals = message.state.totals
        self.draw_meter(blocks=totals.blocks, active=totals.active, cached=totals.cached, hit_rate=totals.hit_rate)
        # There is no screen any more while the app closes.
        for page in self.screen_stack:
            if isinstance(page, PoolScreen):
                page.show(message.state)

    def on_noticed(self, message: messages.Noticed) -> None:
        """Show what concerns no session."""
        if not self.daemons.is_shown(message):
            return
        match message.event:
            case ServerDraining(deadline_s=deadline_s):
                self.chat.status = StatusView("warning", f"the daemon stops within {deadline_s:.0f} s")
            case Error(error=body):
                self.chat.status = StatusView("error", clean_line(body.message, 300))
            case RateLimitsUpdated():
                pass

    def on_refused(self, message: messages.Refused) -> None:
        """Show why something was not done, and give the text back."""
        if message.text is None and not self.daemons.is_shown(message):
            return
        self.show_error(message.error)
        if message.text is not None:
            self.chat.composer.take_back(message.text)

    # Drawing.

    def _show_type_ahead(self, text: str) -> None:
        self.chat.composer.border_subtitle = text or None

    def show_error(self, error: ChatdError) -> None:
        """Say why something was not done."""
        hint = error.hint or ""
        if isinstance(error, AuthenticationError) and not hint:
            hint = "give a key with CHATD_KEY_FILE, CHATD_KEY or servers.toml"
        self.chat.status = StatusView("error", clean_line(error.message, 300), clean_line(hint))

    def draw_meter(self, **changes: Any) -> None:
        """Change what the meter shows: fields of its view."""
        self.meter = replace(self.meter, **changes)
        self.chat.meter.view = self.meter

    def _is_on_screen(self, news: messages.DaemonNews, session: str) -> bool:
        return self.daemons.is_shown(news) and session == self.link.session

    def draw_connection(self, state: ConnectionState) -> None:
        """Show where the connection on the screen stands, and what that leaves to be done."""
        was_refused = self.chat.title_bar.view.phase == ConnectionPhase.CLOSED.value
        self.draw_title(state)
        self.chat.transcript.update_welcome(self.daemons.shown.welcome(self._connect_key))
        hello = self.daemons.shown.hello
        self.chat.composer.max_bytes = hello.limits.frame_bytes if hello is not None else MAX_FRAME_BYTES
        if state.phase is ConnectionPhase.CLOSED and state.error is not None:
            self.show_error(state.error)
        elif (was_refused or state.phase is ConnectionPhase.CONNECTED) and self.chat.status.kind in (
            "error",
            "warning",
        ):
            # What was said of a key is untrue as soon as another one is tried.
            self.chat.status = StatusView()
        elif state.phase is not ConnectionPhase.CONNECTED:
            self.conversation.lose_connection()

    def draw_sessions(self) -> None:
        """Show every daemon's conversations."""
        self.chat.sessions.show(self.daemons.rows())
        self.draw_title(None)

    def draw_title(self, state: ConnectionState | None) -> None:
        """Show who answers in which conversation; of the connection what was shown before, where it is not given."""
        bar = self.chat.title_bar
        before = bar.view
        phase, connection = before.phase, before.connection
        if state is not None:
            phase, connection = state.phase.value, status_text.connection_text(state)
        hello = self.daemons.shown.hello
        bar.view = TitleView(
            model=clean_line(hello.model.id, 60) if hello else "",
            who=clean_line(hello.tenant if hello.tenant == hello.user else f"{hello.tenant}/{hello.user}", 60)
            if hello
            else "",
            session=clean_line(self.daemons.shown.title(), 80),
            phase=phase,
            connection=connection,
            server=self.link.name if self.daemons.are_several else "",
        )
        self.chat.composer.placeholder = ASK if self.link.role == "writer" else ONLY_WATCHING

    def _refresh_sessions(self) -> None:
        if self.chat.sessions.display:
            self.daemons.refresh_soon()
