"""The Textual client: takes the daemon's news and the person's wishes and tells the widgets what to draw."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from chatd.client import ConnectionPhase, ConnectionState
from chatd.config import state_dir
from chatd.errors import AuthenticationError, ChatdError
from chatd.protocol import (
    BranchSelected,
    Error,
    Event,
    Hello,
    ItemAdded,
    OutputTextDelta,
    RateLimitsUpdated,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponsePreempted,
    ResponsePrefill,
    ResponseQueued,
    ResponseResumed,
    ServerDraining,
    SessionClosed,
    SessionInfo,
    SessionUpdated,
    SessionUsage,
    Snapshot,
)
from chatd_tui import messages
from chatd_tui.clean import clean, clean_line
from chatd_tui.clipboard import MAX_OSC52_BYTES, save_copy
from chatd_tui.keys import recognize_alt_enter
from chatd_tui.link import DaemonLink
from chatd_tui.screens.chat import ChatScreen
from chatd_tui.screens.help import HelpScreen, LinkScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.theme import CHATD
from chatd_tui.views import WAIT_REASONS, ItemView, MeterView, SessionRow, short_number
from chatd_tui.widgets.status import StatusView, TitleView
from chatd_tui.widgets.transcript import SYSTEM_ID, UserMessage
from chatd_tui.widgets.welcome import WelcomeView

QUIT_WINDOW_S = 2.0
RATE_WINDOW_S = 3.0
ANSWERING = StatusView("busy", "answering", "Esc stops it")


class Rate:
    """Tokens per second over the last seconds of one answer."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, num_tokens: int) -> float | None:
        """Count tokens; None until there is a stretch of time to divide by."""
        self._arrivals.append((now_s, num_tokens))
        while now_s - self._arrivals[0][0] > RATE_WINDOW_S:
            self._arrivals.popleft()
        seconds = now_s - self._arrivals[0][0]
        counted = sum(count for _, count in self._arrivals) - self._arrivals[0][1]
        return counted / seconds if seconds > 0.5 else None


class ChatApp(App[None]):
    """The terminal client of one daemon.

    Args:
        url: Of the daemon.
        key: Sent as a bearer token.
        copies: The folder that keeps the last copied answer.
    """

    TITLE = "chatd"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "Help"),
        Binding("f2,ctrl+p", "pool", "Pool"),
        Binding("ctrl+n", "new_session", "New", priority=True),
        Binding("escape", "cancel", "Stop"),
        Binding("ctrl+y", "copy_answer", "Copy", priority=True),
        Binding("ctrl+r", "retry", "Connect", show=False),
        Binding("ctrl+q", "quit", "Quit", priority=True),
        Binding("ctrl+c", "interrupt", "Quit", show=False, priority=True),
    ]

    def __init__(self, url: str, key: str | None = None, *, copies: Path | None = None) -> None:
        super().__init__()
        recognize_alt_enter()
        self.register_theme(CHATD)
        self.theme = CHATD.name
        self.chat = ChatScreen()
        self.link = DaemonLink(url, key, self.post_message)
        self._copies = copies or state_dir()
        self._hello: Hello | None = None
        self._sessions: list[SessionInfo] = []
        self._busy = False
        self._last_answer = ""
        self._rate = Rate()
        self._meter = MeterView()
        self._interrupted_at = float("-inf")

    def on_mount(self) -> None:
        """Show the conversation and connect."""
        self.push_screen(self.chat)
        self.run_worker(self.link.run(), name="link", exit_on_error=True)

    async def on_unmount(self) -> None:
        """End what the link still runs."""
        await self.link.stop()

    # News of the daemon.

    def on_connection_changed(self, message: messages.ConnectionChanged) -> None:
        """Show where the connection stands."""
        state, hello = message.state, message.hello
        if hello is not None and hello is not self._hello:
            self._hello = hello
            model = hello.model
            view = WelcomeView(clean_line(model.id, 60), model.context, model.blocks, model.block_size)
            self.chat.transcript.update_welcome(view)
            self._draw_meter(context_max=model.context)
        self._draw_title(state)
        if state.phase is ConnectionPhase.CLOSED and state.error is not None:
            self._show_error(state.error)
        elif state.phase is ConnectionPhase.CONNECTED and self._status().kind in ("error", "warning"):
            self._set_status(StatusView())

    def on_sessions_listed(self, message: messages.SessionsListed) -> None:
        """Show the sessions."""
        self._sessions = message.sessions
        self._draw_sessions()

    async def on_session_opened(self, message: messages.SessionOpened) -> None:
        """Show a session from its snapshot on."""
        snapshot = message.attached.snapshot
        if message.attached.session != self.link.session or snapshot is None:
            return
        await self._show_items(snapshot)
        self._busy = snapshot.response is not None
        self._set_status(_progress(snapshot) if self._busy else StatusView())
        usage = snapshot.state.usage or {}
        self._draw_meter(context_used=usage.get("context_used", snapshot.session.context_used))
        self._draw_title(None)

    async def _show_items(self, snapshot: Snapshot) -> None:
        items = [ItemView.of(item) for item in snapshot.items]
        if snapshot.session.system and not any(item.role == "system" for item in items):
            items.insert(0, ItemView(SYSTEM_ID, "system", clean(snapshot.session.system)))
        answers = [item.text for item in items if item.role == "assistant" and item.done]
        self._last_answer = answers[-1] if answers else ""
        await self.chat.transcript.show(items)

    async def on_session_news(self, message: messages.SessionNews) -> None:
        """Apply one event of the session on the screen."""
        if message.session == self.link.session:
            await self._apply(message.event)

    async def _apply(self, event: Event) -> None:
        transcript = self.chat.transcript
        match event:
            case OutputTextDelta():
                transcript.extend(event.item_id, clean(event.delta))
                self._draw_meter(tok_s=self._rate.add(time.monotonic(), event.n_tokens))
                if self._status() != ANSWERING:
                    self._set_status(ANSWERING)
            case ItemAdded():
                await transcript.branch(event.item.parent, [ItemView.of(event.item)])
            case BranchSelected():
                items = [ItemView.of(item) for item in event.items]
                self._last_answer = next((item.text for item in reversed(items) if item.role == "assistant"), "")
                await transcript.branch(event.parent, items)
            case ResponseCreated():
                self._busy = True
                self._rate = Rate()
                await transcript.branch(event.item.parent, [ItemView.of(event.item)])
                if self._status().kind != "busy":
                    self._set_status(StatusView("busy", "thinking", "Esc stops it"))
            case ResponseCompleted() | ResponseIncomplete():
                self._finish(event)
            case ResponseFailed():
                self._fail(event)
            case ResponseQueued():
                self._busy = True
                self._set_status(_queued_view(event.position, event.why))
            case ResponsePrefill():
                self._set_status(_prefill_view(event.done, event.total, event.cached))
            case ResponsePreempted():
                self._set_status(StatusView("busy", "set aside for want of memory", "it goes on by itself"))
            case ResponseResumed():
                self._set_status(ANSWERING)
            case SessionUsage():
                self._draw_meter(context_used=event.context_used, context_max=event.context_max)
            case SessionUpdated():
                self._sessions = [event.info if info.id == event.info.id else info for info in self._sessions]
                self._draw_sessions()
            case SessionClosed():
                self._set_status(StatusView("notice", "this conversation's memory was released", "its text stays"))
            case _:
                pass

    def _finish(self, event: ResponseCompleted | ResponseIncomplete) -> None:
        self._busy = False
        view = ItemView.of(event.item, event.usage, event.timings)
        self._last_answer = view.text
        self.chat.transcript.finish(view)
        self._set_status(StatusView())
        used = event.usage.input_tokens + event.usage.output_tokens
        self._draw_meter(ttft_ms=event.timings.ttft_ms, tok_s=event.timings.decode_tok_s or None, context_used=used)
        self.run_worker(self.link.refresh_sessions(), group="list", exclusive=True)

    def _fail(self, event: ResponseFailed) -> None:
        self._busy = False
        transcript = self.chat.transcript
        answer = transcript.answer_in_progress()
        text = answer.text if answer is not None and answer.item_id == event.item_id else ""
        note = clean_line(event.error.message, 300)
        transcript.finish(ItemView(event.item_id, "assistant", text, True, f"failed: {note}", True))
        said = list(transcript.query(UserMessage))
        if said and said[-1].item_id != event.parent:
            # The daemon rolled the turn back, so what was said is not in the conversation.
            said[-1].add_class("-lost")
            self.chat.composer.take_back(said[-1].text)
        self._set_status(StatusView("error", note, clean_line(event.error.hint or "")))

    def on_pool_changed(self, message: messages.PoolChanged) -> None:
        """Show the pool, in the meter and on its page."""
        totals = message.state.totals
        self._draw_meter(blocks=totals.blocks, active=totals.active, cached=totals.cached, hit_rate=totals.hit_rate)
        if isinstance(self.screen, PoolScreen):
            self.screen.show(message.state, time.monotonic())

    def on_noticed(self, message: messages.Noticed) -> None:
        """Show what concerns no session."""
        match message.event:
            case ServerDraining(deadline_s=deadline_s):
                self._set_status(StatusView("warning", f"the daemon stops within {deadline_s:.0f} s"))
            case Error(error=body):
                self._set_status(StatusView("error", clean_line(body.message, 300)))
            case RateLimitsUpdated():
                pass

    def on_refused(self, message: messages.Refused) -> None:
        """Show why something was not done, and give the text back."""
        self._show_error(message.error)
        if message.text is not None:
            self.chat.composer.take_back(message.text)

    # Wishes of the person.

    def on_submitted(self, message: messages.Submitted) -> None:
        """Send a message."""
        if self._busy:
            self._set_status(StatusView("warning", "an answer is in progress", "Esc stops it, then send"))
            return
        composer = self.chat.composer
        composer.clear()
        self._set_status(StatusView("busy", "sending"))
        self.link.send(message.text)

    async def on_session_chosen(self, message: messages.SessionChosen) -> None:
        """Show another session, or a new one."""
        await self._open(message.session)

    async def _open(self, session: str | None) -> None:
        self._busy = False
        self._last_answer = ""
        self._set_status(StatusView())
        self._draw_meter(context_used=0 if session is None else None)
        if session is None:
            await self.chat.transcript.show([])
        self.chat.close_overlay()
        self.chat.composer.focus()
        await self.link.open(session)
        self._draw_sessions()
        self._draw_title(None)

    def on_link_chosen(self, message: messages.LinkChosen) -> None:
        """Ask before a link is opened, and open nothing but web pages."""
        href = message.href
        is_plain = href == clean(href) and not any(character.isspace() for character in href)
        if not is_plain or not href.lower().startswith(("http://", "https://")):
            self._set_status(
                StatusView("warning", f"not opened: {clean_line(href, 80)}", "only http and https links are")
            )
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.open_url(href)

        self.push_screen(LinkScreen(href), answered)

    async def action_new_session(self) -> None:
        """Begin a conversation."""
        if isinstance(self.screen, ChatScreen):
            await self._open(None)

    def action_cancel(self) -> None:
        """Stop the answer, or close what lies over the transcript."""
        if self.screen is self.chat and self.chat.close_overlay():
            return
        if self._busy:
            self._set_status(StatusView("busy", "stopping"))
            self.link.cancel()

    def action_copy_answer(self) -> None:
        """Copy the last answer to the clipboard and to a file."""
        answer = self.chat.transcript.answer_in_progress()
        text = answer.text if answer is not None and answer.text else self._last_answer
        if not text:
            self._set_status(StatusView("notice", "there is no answer to copy yet"))
            return
        fits = len(text.encode("utf-8", "replace")) <= MAX_OSC52_BYTES
        if fits:
            self.copy_to_clipboard(text)
        path = save_copy(text, self._copies)
        done = "copied" if fits else "too long for the terminal's clipboard"
        self._set_status(StatusView("notice", done, f"also in {path}" if path else ""))

    def action_pool(self) -> None:
        """Open the pool page."""
        if self.screen is not self.chat or self._hello is None:
            return

        async def closed(_: None) -> None:
            await self.link.unwatch_page()

        has_map = "pool.map" in self._hello.caps
        self.push_screen(PoolScreen(self._hello.model.block_size, has_map, self.link.watch_page), closed)

    def action_help(self) -> None:
        """List the keys."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_retry(self) -> None:
        """Connect at once."""
        self.link.retry_now()

    def action_interrupt(self) -> None:
        """Copy the selection, if there is one; pressed twice, quit."""
        composer = self.chat.composer
        selected = composer.selected_text or self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self._set_status(StatusView("notice", "copied the selection"))
            return
        now = time.monotonic()
        if now - self._interrupted_at < QUIT_WINDOW_S:
            self.exit()
            return
        self._interrupted_at = now
        self._set_status(StatusView("notice", "press Ctrl+C once more to quit", "answers in progress go on"))

    # Drawing.

    def _status(self) -> StatusView:
        return self.chat.status_line.view

    def _set_status(self, view: StatusView) -> None:
        self.chat.status_line.view = view

    def _show_error(self, error: ChatdError) -> None:
        hint = error.hint or ""
        if isinstance(error, AuthenticationError) and not hint:
            hint = "give a key with --key or CHATD_KEY"
        self._set_status(StatusView("error", clean_line(error.message, 300), clean_line(hint)))

    def _draw_meter(self, **changes: float | int | None) -> None:
        fields = {name: getattr(self._meter, name) for name in MeterView.__dataclass_fields__}
        known = {name: value for name, value in changes.items() if value is not None or name == "context_used"}
        self._meter = MeterView(**{**fields, **known})
        self.chat.meter.view = self._meter

    def _draw_sessions(self) -> None:
        rows = [SessionRow.of(info, self.link.session) for info in self._sessions]
        self.chat.sessions.show(rows)
        self._draw_title(None)

    def _draw_title(self, state: ConnectionState | None) -> None:
        bar = self.chat.title_bar
        before = bar.view
        phase, connection = before.phase, before.connection
        if state is not None:
            phase, connection = state.phase.value, _connection_text(state)
        hello = self._hello
        title = next((info.title for info in self._sessions if info.id == self.link.session), "")
        bar.view = TitleView(
            model=clean_line(hello.model.id, 60) if hello else "",
            who=clean_line(hello.tenant if hello.tenant == hello.user else f"{hello.tenant}/{hello.user}", 60)
            if hello
            else "",
            session=clean_line(title, 80),
            phase=phase,
            connection=connection,
        )


def _connection_text(state: ConnectionState) -> str:
    match state.phase:
        case ConnectionPhase.CONNECTED:
            return "connected"
        case ConnectionPhase.CONNECTING:
            return "connecting" if state.attempt <= 1 else f"connecting, try {state.attempt}"
        case ConnectionPhase.WAITING:
            reason = "the daemon loads" if state.error and state.error.error_code == "loading" else "no connection"
            return f"{reason}, again in {state.retry_in_s:.0f} s" if state.retry_in_s >= 1 else reason
        case ConnectionPhase.CLOSED:
            return "not connected"


def _queued_view(position: int, why: str) -> StatusView:
    place = "next in line" if position <= 1 else f"number {position} in line"
    return StatusView("busy", f"waiting, {place}", WAIT_REASONS.get(why, clean_line(why, 40)))


def _prefill_view(done: int, total: int, cached: int) -> StatusView:
    progress = f"{short_number(done)} of {short_number(total)} tokens"
    return StatusView(
        "busy", f"reading the prompt, {progress}", f"{short_number(cached)} from the cache" if cached else ""
    )


def _progress(snapshot: Snapshot) -> StatusView:
    """Return the status of an answer that was in progress when its session was opened."""
    state = snapshot.state
    answer = snapshot.items[-1] if snapshot.items else None
    if answer is not None and answer.role == "assistant" and answer.content:
        return ANSWERING
    if state.prefill is not None:
        return _prefill_view(*(int(state.prefill.get(name, 0)) for name in ("done", "total", "cached")))
    if state.queued is not None:
        return _queued_view(int(state.queued.get("position", 1)), str(state.queued.get("why", "")))
    return StatusView("busy", "thinking", "Esc stops it")


def run_app(url: str, key: str | None = None, *, on_exit: Callable[[], None] | None = None) -> None:
    """Run the client in this terminal until the person quits, then call `on_exit`."""
    try:
        ChatApp(url, key).run()
    finally:
        if on_exit is not None:
            on_exit()
