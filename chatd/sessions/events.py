"""The ring of a session's latest transcript events, and those who listen. Knows sequence numbers; sends nothing itself.

Every event that makes the transcript gets the session's next `seq` and goes into the ring before anybody sees it, so a
client that says which event it saw last can be given exactly the rest, or told that the ring no longer has it.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Protocol

from chatd.protocol import (
    AttachRole,
    BranchSelected,
    Event,
    ItemAdded,
    OutputTextDelta,
    ResponseCompleted,
    ResponseIncomplete,
    SessionInfo,
    SessionUpdated,
    TranscriptEvent,
)

EVENT_OVERHEAD_BYTES = 256


class Subscriber(Protocol):
    """A connection, as a session sees it. Called on the event loop; must neither block nor raise."""

    @property
    def connection_id(self) -> str:
        """Names the connection; unique among those that are open."""
        ...

    def deliver(self, event: Event) -> None:
        """Take one event; the order of calls is the order of events."""
        ...


class EventRing:
    """The last transcript events of one session, bounded in number, bytes and age.

    Args:
        max_events: Events kept at most.
        max_bytes: Bytes kept at most, as `event_bytes` counts them.
        ttl_s: Seconds that an event is kept.
    """

    __slots__ = ("_bytes", "_events", "_max_bytes", "_max_events", "_ttl_s", "head_seq")

    def __init__(self, *, max_events: int, max_bytes: int, ttl_s: float) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._events: deque[tuple[int, TranscriptEvent]] = deque()
        self._bytes = 0
        self.head_seq = 0
        """The `seq` of the last event; the next one gets the number after it."""

    def __len__(self) -> int:
        return len(self._events)

    @property
    def num_bytes(self) -> int:
        """Bytes of the events that are kept."""
        return self._bytes

    def append(self, event: TranscriptEvent) -> None:
        """Keep an event, dropping the oldest ones where a bound is passed."""
        assert event.seq == self.head_seq + 1, f"event {event.seq} after {self.head_seq}"
        self.head_seq = event.seq
        size = event_bytes(event)
        events = self._events
        events.append((size, event))
        self._bytes += size
        oldest = event.ts - self._ttl_s
        while events and (len(events) > self._max_events or self._bytes > self._max_bytes or events[0][1].ts < oldest):
            self._bytes -= events.popleft()[0]

    def expire(self, now: float) -> None:
        """Drop what is older than `ttl_s`. `now` is in Unix seconds."""
        oldest = now - self._ttl_s
        while self._events and self._events[0][1].ts < oldest:
            self._bytes -= self._events.popleft()[0]

    def after(self, seq: int) -> list[TranscriptEvent] | None:
        """Return every event after `seq`, or None where the ring does not have all of them."""
        missed = self.head_seq - seq
        if missed < 0 or missed > len(self._events):
            return None
        start = len(self._events) - missed
        return [self._events[i][1] for i in range(start, len(self._events))] if missed else []


def event_bytes(event: TranscriptEvent) -> int:
    """Return about how much memory an event takes."""
    if isinstance(event, OutputTextDelta):
        logprobs = 0 if event.logprobs is None else sum(128 + 96 * len(entry.top) for entry in event.logprobs)
        return EVENT_OVERHEAD_BYTES + sys.getsizeof(event.delta) + logprobs
    if isinstance(event, ItemAdded | ResponseCompleted | ResponseIncomplete):
        return 2 * EVENT_OVERHEAD_BYTES + sys.getsizeof(event.item.content)
    if isinstance(event, BranchSelected):
        return EVENT_OVERHEAD_BYTES * (1 + len(event.items)) + sum(sys.getsizeof(item.content) for item in event.items)
    if isinstance(event, SessionUpdated):
        return 4 * EVENT_OVERHEAD_BYTES + _info_bytes(event.info)
    return 4 * EVENT_OVERHEAD_BYTES


def _info_bytes(info: SessionInfo) -> int:
    """Return the size of what clients decide: a system prompt changed again and again is in each of its events."""
    texts = [info.title, info.system or "", *info.metadata, *info.metadata.values(), *info.params.stop]
    return sum(map(sys.getsizeof, texts)) + 128 * len(info.params.logit_bias or ())


class Subscription:
    """One connection's attachment to one session.

    It is held until `start`: what it has to see meanwhile waits here in order, so that the answer to the attach command
    can go out first.
    """

    __slots__ = ("_waiting", "role", "subscriber")

    def __init__(self, subscriber: Subscriber, role: AttachRole, replay: list[TranscriptEvent]) -> None:
        self.subscriber = subscriber
        self.role: AttachRole = role
        self._waiting: list[Event] | None = list(replay)

    def deliver(self, event: Event) -> None:
        """Pass an event on, now or at `start`."""
        if self._waiting is None:
            self.subscriber.deliver(event)
        else:
            self._waiting.append(event)

    def start(self) -> None:
        """Deliver what waits; from now on events go straight through."""
        waiting, self._waiting = self._waiting, None
        for event in waiting or ():
            self.subscriber.deliver(event)
