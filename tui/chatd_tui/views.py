"""Frozen snapshots that the widgets draw, and how their numbers and paths are written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chatd.clean import clean, clean_line
from chatd.client import FoundSession
from chatd.protocol import Item, SessionInfo, Siblings, Timings, Usage

WAIT_REASONS = {
    "fair_share": "others' turn",
    "slots": "all slots are busy",
    "no_blocks": "no memory is free",
    "join": "another is computing the same prompt",
    "swap_in": "being brought back into memory",
    "restore": "being restored",
}
TIERS = {"device": "in memory", "host": "in host memory", "disk": "on disk", "tokens": "text only"}
"""Where a conversation's KV is, as the screen says it; of "tokens" nothing is left but the ids."""
END_REASONS = {
    "max_output_tokens": "reached the token limit",
    "context": "the context is full",
    "cancelled": "cancelled",
    "kv_exhausted": "out of memory blocks",
    "draining": "the daemon stopped",
}


@dataclass(frozen=True)
class MeterView:
    """What the one-line meter shows; None is not known, or not now.

    Attributes:
        blocks: Of the pool.
        active: Of these, held by somebody.
        cached: Of these, held by nobody and not free.
        hit_rate: Part of all prompt tokens that was found in the cache.
        tok_s: Of the answer in progress, over the last seconds.
        last_tok_s: Of the last answer that ended.
        ttft_ms: From the last message to its answer's first token.
        turn_hit: Part of the last turn's prompt that was found in the cache.
        context_used: Tokens of the conversation.
        context_max: Tokens that fit.
        tier: Where the conversation's KV is.
    """

    blocks: int = 0
    active: int = 0
    cached: int = 0
    hit_rate: float | None = None
    tok_s: float | None = None
    last_tok_s: float | None = None
    ttft_ms: float | None = None
    turn_hit: float | None = None
    context_used: int | None = None
    context_max: int | None = None
    tier: str = ""


@dataclass(frozen=True)
class ItemView:
    """One message, cleaned.

    Attributes:
        id: Of the item.
        role: "user", "assistant" or "system".
        text: Its text so far.
        done: Whether more can come.
        note: A dim line under it: how it ended and what it took.
        trouble: Whether the note tells of one.
        siblings: Which version of how many it is, where there are several.
        context_from: Of an answer: the first message that was in its context, where older ones were left out.
    """

    id: str
    role: str
    text: str
    done: bool = True
    note: str = ""
    trouble: bool = False
    siblings: Siblings | None = None
    context_from: str | None = None

    @classmethod
    def of(cls, item: Item, usage: Usage | None = None, timings: Timings | None = None) -> ItemView:
        """Build from the protocol's item; `usage` and `timings` where an event brings them beside it."""
        note, trouble = "", False
        if item.role == "assistant" and item.status != "in_progress":
            note, trouble = ending(item, usage or item.usage, timings or item.timings)
        siblings = item.siblings if item.siblings is not None and item.siblings.count > 1 else None
        done = item.status != "in_progress"
        return cls(item.id, item.role, clean(item.content), done, note, trouble, siblings, item.context_from)


@dataclass(frozen=True)
class SessionRow:
    """One session of the list, cleaned."""

    id: str
    title: str
    detail: str
    busy: bool
    current: bool

    @classmethod
    def of(cls, info: SessionInfo, current: str | None) -> SessionRow:
        """Build from the protocol's description; `current` is the session that is attached here."""
        place = "" if info.tier == "device" else f" · {tier_word(info.tier)}"
        flags = f"{'pinned · ' if info.pinned else ''}{'archived · ' if info.archived else ''}"
        num_attached = info.writers + info.observers - (info.id == current)
        elsewhere = f"{others(num_attached)} · " if num_attached > 0 else ""
        detail = f"{elsewhere}{flags}{info.num_items} msg · {short_number(info.context_used)} tok{place}"
        return cls(info.id, clean_line(info.title, 80) or "untitled", detail, info.busy, info.id == current)


@dataclass(frozen=True)
class ServerRow:
    """One daemon of the list and the person's sessions there.

    Attributes:
        name: "" where it is the only one.
        phase: Of the connection.
        connection: The same in a word or two.
        sessions: In the order in which they are listed.
        is_shown: Whether it is the one on the screen.
    """

    name: str
    phase: str
    connection: str
    sessions: tuple[SessionRow, ...]
    is_shown: bool = True


@dataclass(frozen=True)
class ServerPlace:
    """One daemon to go to, cleaned.

    Attributes:
        name: "" where it is the only one.
        url: Where it listens.
        phase: Of the connection.
        state: The same in a word or two.
        detail: Where it is, its model, and how many conversations are listed.
        is_shown: Whether it is the one on the screen.
    """

    name: str
    url: str
    phase: str
    state: str
    detail: str
    is_shown: bool


@dataclass(frozen=True)
class FoundRow:
    """One session that a search found, cleaned.

    Attributes:
        server: The name of its daemon.
        session: What the list says of it.
        item: The message to go to, None where only the title has what was looked for.
        passage: Where it is in that message.
    """

    server: str
    session: SessionRow
    item: str | None = None
    passage: str = ""

    @classmethod
    def of(cls, found: FoundSession, server: str) -> FoundRow:
        """Build from what the client says."""
        row = SessionRow.of(found.info, None)
        if found.passage is None:
            return cls(server, row)
        return cls(server, row, found.passage.item, clean_line(found.passage.text, 200))


def others(number: int) -> str:
    """Say how many other screens have a conversation open."""
    return "open elsewhere" if number == 1 else f"open {number}× elsewhere"


def tier_word(tier: str) -> str:
    """Say where a conversation's KV is."""
    return TIERS.get(tier, clean_line(tier, 12))


def ending(item: Item, usage: Usage | None, timings: Timings | None) -> tuple[str, bool]:
    """Return the line under a finished answer and whether it tells of trouble."""
    parts: list[str] = []
    trouble = item.status != "completed"
    if trouble:
        parts.append(END_REASONS.get(item.reason or "", clean_line(item.reason or "failed", 40)))
    if usage is not None:
        parts.append(f"{short_number(usage.output_tokens)} tokens")
    if timings is not None and timings.decode_tok_s > 0:
        parts.append(f"{rate(timings.decode_tok_s)} tok/s")
    if timings is not None and timings.ttft_ms > 0:
        parts.append(f"first after {duration_ms(timings.ttft_ms)}")
    if usage is not None and usage.cached_tokens > 0 and usage.input_tokens > 0:
        parts.append(f"{percent(usage.cached_tokens / usage.input_tokens)} of the prompt cached")
    if timings is not None and timings.preemptions > 0:
        parts.append(f"set aside {'once' if timings.preemptions == 1 else f'{timings.preemptions} times'}")
    return " · ".join(parts), trouble


def short_number(value: float) -> str:
    """Write a count in at most five characters: 980, 1.2k, 65k, 1.1M."""
    for limit, divisor, unit in ((1000, 1, ""), (999_500, 1000, "k"), (999_500_000, 1_000_000, "M")):
        if value < limit:
            scaled = value / divisor
            text = f"{scaled:.1f}" if divisor > 1 and scaled < 9.95 else f"{scaled:.0f}"
            return text.removesuffix(".0") + unit
    return f"{value / 1e9:.1f}G"


def short_path(path: Path) -> str:
    """Write a path as people do, from their home on where it is there."""
    home = Path.home()
    return clean_line(f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path))


def percent(fraction: float) -> str:
    """Write a share; neither 0% nor 100% is said of what is not quite that."""
    value = round(100 * fraction)
    if value == 0 and fraction > 0:
        return "<1%"
    if value == 100 and fraction < 1:
        return ">99%"
    return f"{value}%"


def rate(value: float) -> str:
    """Write a rate: one decimal below ten."""
    return f"{value:.1f}" if value < 9.95 else short_number(value)


def duration_ms(value: float) -> str:
    """Write a duration given in milliseconds."""
    return f"{value:.0f} ms" if value < 999.5 else f"{value / 1000:.1f} s"
