"""The conversation on the screen: what its events change there. It knows the widgets and nothing of the connection."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from chatd.clean import clean, clean_line
from chatd.protocol import (
    AttachRole,
    BranchSelected,
    ClientAttached,
    ClientLeft,
    Event,
    Item,
    ItemAdded,
    OutputTextDelta,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponsePreempted,
    ResponsePrefill,
    ResponseQueued,
    ResponseResumed,
    SessionClosed,
    SessionTier,
    SessionTruncated,
    SessionUsage,
    Snapshot,
    Timings,
    Usage,
)
from chatd_tui import status_text
from chatd_tui.screens.chat import ChatScreen
from chatd_tui.views import ItemView
from chatd_tui.widgets.status import StatusView
from chatd_tui.widgets.transcript import SYSTEM_ID

RATE_WINDOW_S = 3.0
TOLD_S = 4.0
"""For how long what is told in the middle of an answer stays on the line above the input."""


NO_TURN: dict[str, float | None] = {"tok_s": None, "last_tok_s": None, "ttft_ms": None, "turn_hit": None}
"""The meter's fields that are of a turn, before there is one."""


def _turn(usage: Usage, timings: Timings) -> dict[str, float | None]:
    """Return the meter's fields of a turn that ended."""
    hit = usage.cached_tokens / usage.input_tokens if usage.input_tokens else None
    return {
        "tok_s": None,
        "last_tok_s": timings.decode_tok_s or None,
        "ttft_ms": timings.ttft_ms or None,
        "turn_hit": hit,
    }


def _last_turn(items: Sequence[Item]) -> dict[str, float | None]:
    """Return the meter's fields of the last turn that ended."""
    ended = next((item for item in reversed(items) if item.usage is not None and item.timings is not None), None)
    if ended is None or ended.usage is None or ended.timings is None:
        return NO_TURN
    return _turn(ended.usage, ended.timings)


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


class Conversation:
    """Draws one conversation at a time on the chat screen.

    Args:
        chat: The screen.
        draw_meter: Takes the meter's fields that changed.
        stop_key: The name of the key that stops an answer.

    Attributes:
        busy: Whether an answer is in progress.
    """

    def __init__(self, chat: ChatScreen, draw_meter: Callable[..., None], stop_key: str = "Esc") -> None:
        self._chat = chat
        self._draw_meter = draw_meter
        self._stop_hint = f"{stop_key} stops it"
        self._rate = Rate()
        self._told: StatusView | None = None
        self._told_at = 0.0
        self.busy = False

    async def clear(self, *, empty: bool) -> None:
        """Forget what is shown; its messages go at once where nothing comes in their place."""
        self.busy = False
        self._chat.status = StatusView()
        self._chat.composer.leave_edit()
        self._draw_meter(context_used=0 if empty else None, tier="", **NO_TURN)
        if empty:
            await self._chat.transcript.show([])

    async def show(self, snapshot: Snapshot, role: AttachRole = "writer") -> None:
        """Draw a conversation, in which one has this role, from its snapshot on."""
        items = [ItemView.of(item) for item in snapshot.items]
        if snapshot.session.system and not any(item.role == "system" for item in items):
            items.insert(0, ItemView(SYSTEM_ID, "system", clean(snapshot.session.system)))
        await self._chat.transcript.show(items)
        self.busy = snapshot.response is not None
        # What was said of the way here, or why a first message was refused, stays until something happens.
        if self.busy:
            self._chat.status = self._stoppable(status_text.progress(snapshot))
        elif self._chat.status.kind not in ("notice", "warning", "error"):
            self._chat.status = status_text.attached(snapshot.session, role)
        usage = snapshot.state.usage or {}
        tier = snapshot.state.tier or snapshot.session.tier
        used = usage.get("context_used", snapshot.session.context_used)
        self._draw_meter(context_used=used, tier=tier, **_last_turn(snapshot.items))

    def last_answer(self) -> str:
        """Return the text of the last answer, so far where it is in progress."""
        answers = [view.text for view in self._chat.transcript.views() if view.role == "assistant" and view.text]
        return answers[-1] if answers else ""

    async def apply(self, event: Event) -> None:
        """Draw what an event changes."""
        chat, transcript = self._chat, self._chat.transcript
        match event:
            case OutputTextDelta():
                transcript.extend(event.item_id, clean(event.delta))
                self._draw_meter(tok_s=self._rate.add(time.monotonic(), event.n_tokens))
                self._answering()
            case ItemAdded():
                await transcript.branch(event.item.parent, [ItemView.of(event.item)])
            case BranchSelected():
                await transcript.branch(event.parent, [ItemView.of(item) for item in event.items])
            case ResponseCreated():
                self.busy = True
                self._halt()
                await transcript.branch(event.item.parent, [ItemView.of(event.item)])
                if chat.status.kind != "busy" or chat.status.text == "sending":
                    chat.status = self._stoppable(status_text.THINKING)
            case ResponseCompleted() | ResponseIncomplete():
                self._finish(event)
            case ResponseFailed():
                self._fail(event)
            case ResponseQueued():
                self.busy = True
                self._halt()
                chat.status = status_text.queued(event.position, event.why)
            case ResponsePrefill():
                chat.status = status_text.prefill(event.done, event.total, event.cached)
                if event.total:
                    self._draw_meter(turn_hit=event.cached / event.total)
            case ResponsePreempted():
                self._halt()
                chat.status = status_text.SET_ASIDE
            case ResponseResumed():
                chat.status = self._stoppable(status_text.ANSWERING)
            case SessionUsage():
                self._draw_meter(context_used=event.context_used, context_max=event.context_max)
            case SessionTier():
                self._draw_meter(tier=event.tier)
                told = status_text.moved(event)
                if told is not None and chat.status.kind == "idle":
                    chat.status = told
            case ClientAttached() | ClientLeft():
                if chat.status.kind in ("idle", "notice"):
                    chat.status = status_text.joined(event)
            case SessionTruncated():
                chat.status = status_text.truncated(event)
            case SessionClosed():
                chat.status = status_text.closed(event)
            case _:
                pass

    def lose(self, *, is_erased: bool) -> None:
        """Draw what there is of a conversation that the daemon no longer has; no answer of it goes on."""
        if is_erased and self._chat.transcript.views():
            # Who erased it here sees nothing of it any more, and is told what that was.
            self._chat.status = StatusView("notice", "this conversation was erased", "a message begins a new one")
        self.busy = False
        self._chat.composer.leave_edit()
        self._draw_meter(context_used=0, tier="", **NO_TURN)
        answer = self._chat.transcript.answer_in_progress()
        if answer is not None:
            self._chat.transcript.finish(ItemView(answer.id, "assistant", answer.text, True, "cut off", True))

    def lose_connection(self) -> None:
        """Say of an answer in progress that it is not heard of, and cannot be stopped, for now."""
        if self.busy:
            self._halt()
            if self._chat.status.kind == "busy":
                self._chat.status = status_text.UNHEARD

    def _halt(self) -> None:
        """Have no speed of an answer until more of it comes."""
        self._rate = Rate()
        self._draw_meter(tok_s=None)

    def _stoppable(self, status: StatusView) -> StatusView:
        """Name the key that stops an answer, where that is what is said."""
        return replace(status, hint=self._stop_hint) if status in status_text.STOPPABLE else status

    def _answering(self) -> None:
        """Say that the answer comes, once what was told beside it could be read."""
        status = self._chat.status
        if status.kind in ("notice", "warning", "error"):
            now = time.monotonic()
            if status is not self._told:
                self._told, self._told_at = status, now
            if now - self._told_at < TOLD_S:
                return
        answering = self._stoppable(status_text.ANSWERING)
        if status != answering:
            self._chat.status = answering

    def _finish(self, event: ResponseCompleted | ResponseIncomplete) -> None:
        self.busy = False
        self._chat.transcript.finish(ItemView.of(event.item, event.usage, event.timings))
        if self._chat.status.kind != "notice":
            # A notice tells what a command did, and may have come just now.
            self._chat.status = StatusView()
        used = event.usage.input_tokens + event.usage.output_tokens
        self._draw_meter(context_used=used, **_turn(event.usage, event.timings))

    def _fail(self, event: ResponseFailed) -> None:
        self.busy = False
        self._draw_meter(tok_s=None)
        transcript = self._chat.transcript
        answer = transcript.answer_in_progress()
        text = answer.text if answer is not None and answer.id == event.item_id else ""
        note = clean_line(event.error.message, 300)
        transcript.finish(ItemView(event.item_id, "assistant", text, True, f"failed: {note}", True))
        said = next((view for view in reversed(transcript.views()) if view.role == "user"), None)
        if said is not None and said.id != event.parent:
            # The daemon rolled the turn back, so what was said is not in the conversation.
            transcript.lose(said.id)
            self._chat.composer.take_back(said.text)
        self._chat.status = StatusView("error", note, clean_line(event.error.hint or ""))
