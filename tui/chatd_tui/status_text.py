"""What goes on, in plain words for the line above the input."""

from __future__ import annotations

from chatd.clean import clean_line
from chatd.client import ConnectionPhase, ConnectionState
from chatd.errors import AuthenticationError
from chatd.protocol import (
    AttachRole,
    ClientAttached,
    ClientLeft,
    ContextPolicy,
    EraseReceipt,
    SessionClosed,
    SessionCreated,
    SessionInfo,
    SessionTier,
    SessionTruncated,
    Snapshot,
)
from chatd_tui.views import WAIT_REASONS, short_number
from chatd_tui.widgets.status import StatusView

ANSWERING = StatusView("busy", "answering", "Esc stops it")
THINKING = StatusView("busy", "thinking", "Esc stops it")
STOPPABLE = (ANSWERING, THINKING)
SET_ASIDE = StatusView("busy", "set aside for want of memory", "it goes on by itself")
UNHEARD = StatusView("busy", "waiting for the connection", "the answer goes on by itself")
WATCHING = StatusView("notice", "you watch this conversation", "/watch to take part")
ELSEWHERE = StatusView("notice", "what was found is in another version of this conversation", "/branch shows others")
CONTEXT_POLICIES: dict[ContextPolicy, str] = {
    "refuse": "where the context is full, a message is refused",
    "drop_oldest": "where the context is full, the oldest messages are left out of it",
}
_TIER_WHYS = {"pressure": "for want of memory", "policy": "to make room", "restart": "as the daemon restarted"}
_TIER_MOVES = {
    "host": ("moved to host memory", "the next turn brings it back"),
    "disk": ("moved to disk", "the next turn loads it"),
    "tokens": ("its memory was given up", "the next turn reads the text again"),
}


def connection_text(state: ConnectionState) -> str:
    """Say where the connection stands."""
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


def connection_word(state: ConnectionState) -> str:
    """Say where the connection stands in a word or two, beside a daemon's name."""
    match state.phase:
        case ConnectionPhase.CONNECTED:
            return "connected"
        case ConnectionPhase.CLOSED:
            return "wrong key" if isinstance(state.error, AuthenticationError) else "refused"
        case _:
            if state.error is None:
                return "connecting"
            return "loading" if state.error.error_code == "loading" else "no connection"


def joined(event: ClientAttached | ClientLeft) -> StatusView:
    """Say that another screen opened the conversation, or left it."""
    if isinstance(event, ClientLeft):
        return StatusView("notice", "another screen left this conversation")
    what = "only watches" if event.role == "observer" else "can write here too"
    return StatusView("notice", "another screen opened this conversation", f"it {what}")


def attached(info: SessionInfo, role: AttachRole) -> StatusView:
    """Say who else has a conversation open; nothing where nobody has."""
    writers = info.writers - (role == "writer")
    observers = info.observers - (role == "observer")
    parts = [f"{number} {verb}" for number, verb in ((writers, "can write"), (observers, "only watch")) if number > 0]
    return StatusView("notice", f"open elsewhere: {', '.join(parts)}") if parts else StatusView()


def queued(position: int, why: str) -> StatusView:
    """Say how long the line is, and what it waits for."""
    place = "next in line" if position <= 1 else f"number {position} in line"
    return StatusView("busy", f"waiting, {place}", WAIT_REASONS.get(why, clean_line(why, 40)))


def prefill(done: int, total: int, cached: int) -> StatusView:
    """Say how much of the prompt is read, and how much of it did not have to be."""
    progress = f"{short_number(done)} of {short_number(total)} tokens"
    return StatusView(
        "busy", f"reading the prompt, {progress}", f"{short_number(cached)} from the cache" if cached else ""
    )


def moved(event: SessionTier) -> StatusView | None:
    """Say where a conversation's memory went; None where it is where one expects it."""
    move = _TIER_MOVES.get(event.tier)
    if move is None or event.why not in _TIER_WHYS:
        return None
    return StatusView("notice", f"{move[0]} {_TIER_WHYS[event.why]}", move[1])


def forked(created: SessionCreated) -> StatusView:
    """Say what a fork shares with the conversation that it is from."""
    if not created.shared_blocks:
        return StatusView("notice", "forked", "nothing of it is in memory; its first turn reads the text again")
    tokens = f"{short_number(created.shared_tokens)} token{'' if created.shared_tokens == 1 else 's'}"
    blocks = f"{short_number(created.shared_blocks)} block{'' if created.shared_blocks == 1 else 's'}"
    copied = "the last one is copied by who goes on first" if created.copies_on_write else "nothing is copied"
    return StatusView("notice", f"forked: {tokens} in {blocks} are shared", copied)


def truncated(event: SessionTruncated) -> StatusView:
    """Say that older messages are out of the context."""
    number = f"{short_number(event.dropped_items)} older message{'' if event.dropped_items == 1 else 's'}"
    return StatusView("busy", f"the context was full: {number} left out of it", "they stay in the conversation")


def closed(event: SessionClosed) -> StatusView:
    """Say what was released of a conversation that somebody closed."""
    number = f"{short_number(event.blocks)} block{'' if event.blocks == 1 else 's'}"
    shared = f"{short_number(event.shared_blocks)} stay, which others have too; " if event.shared_blocks else ""
    what = f"closed: {number} of memory given up" if event.blocks else "closed: it had nothing in memory"
    return StatusView("notice", what, f"{shared}the text stays, and the next message reads it again")


def erased(receipt: EraseReceipt) -> StatusView:
    """Say what was erased."""
    number = f"{short_number(receipt.messages)} message{'' if receipt.messages == 1 else 's'}"
    num_blocks = receipt.blocks + receipt.host_blocks + receipt.disk_blocks
    blocks = f"{short_number(num_blocks)} block{'' if num_blocks == 1 else 's'} of memory"
    shared = f"{receipt.shared_messages} stay, which forks have too" if receipt.shared_messages else ""
    return StatusView("notice", f"erased: {number}, {blocks}", shared)


def progress(snapshot: Snapshot) -> StatusView:
    """Return the status of an answer that was in progress when its session was opened."""
    state = snapshot.state
    answer = snapshot.items[-1] if snapshot.items else None
    if answer is not None and answer.role == "assistant" and answer.content:
        return ANSWERING
    if state.prefill is not None:
        return prefill(*(int(state.prefill.get(name, 0)) for name in ("done", "total", "cached")))
    if state.queued is not None:
        return queued(int(state.queued.get("position", 1)), str(state.queued.get("why", "")))
    return THINKING
