"""The bounded queue between a client's socket reader and one consumer of a session's events.

The reader never waits for a consumer, so a slow one must not cost memory without bound. Past the high-water mark
adjacent text deltas of one item merge (nothing is lost) and a state event replaces the older one of its kind. What
then still does not fit ends that one consumer with a typed error; the others and the socket go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from chatd.errors import ChatdError, Unavailable
from chatd.protocol import (
    Event,
    OutputTextDelta,
    ResponsePrefill,
    ResponseQueued,
    SessionTier,
    SessionUsage,
)

_LATEST_WINS = (ResponseQueued, ResponsePrefill, SessionUsage, SessionTier)


class _Run:
    """Deltas that were merged and are not joined yet, so that a long backlog costs linear time."""

    __slots__ = ("first_seq", "last", "num_tokens", "parts")

    def __init__(self, first: OutputTextDelta) -> None:
        self.last = first
        self.first_seq = first.seq_from or first.seq
        self.parts = [first.delta]
        self.num_tokens = first.n_tokens

    def add(self, delta: OutputTextDelta) -> None:
        self.last = delta
        self.parts.append(delta.delta)
        self.num_tokens += delta.n_tokens

    def joined(self) -> OutputTextDelta:
        if len(self.parts) == 1:
            return self.last
        return msgspec.structs.replace(
            self.last, delta="".join(self.parts), n_tokens=self.num_tokens, seq_from=self.first_seq
        )


class EventQueue:
    """Events of one session in order, for one consumer.

    Args:
        limit: Most entries; one more ends the consumer with `Unavailable`.
        high_water: From how many entries on events are merged.
    """

    def __init__(self, limit: int = 4096, high_water: int = 256) -> None:
        self._limit = limit
        self._high_water = high_water
        self._entries: deque[Event | _Run] = deque()
        self._ready = asyncio.Event()
        self._error: ChatdError | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, event: Event) -> None:
        """Append an event, merging it into what waits where there is much."""
        if self._error is not None:
            return
        if len(self._entries) >= self._high_water and self._merge(event):
            return
        if len(self._entries) >= self._limit:
            self.fail(
                Unavailable(
                    f"{self._limit} events wait unread, and there is room for no more of them",
                    code="reader_too_slow",
                    hint="read the session's events faster, or attach again",
                )
            )
            return
        self._entries.append(event)
        self._ready.set()

    def _merge(self, event: Event) -> bool:
        if isinstance(event, OutputTextDelta) and event.logprobs is None:
            # State events in between do not part two deltas: only their latest value matters.
            for index in range(len(self._entries) - 1, -1, -1):
                entry = self._entries[index]
                if isinstance(entry, OutputTextDelta) and entry.item_id == event.item_id and entry.logprobs is None:
                    entry = self._entries[index] = _Run(entry)
                if isinstance(entry, _Run) and entry.last.item_id == event.item_id:
                    entry.add(event)
                    return True
                if not isinstance(entry, _LATEST_WINS):
                    return False
        elif isinstance(event, _LATEST_WINS):
            for index in range(len(self._entries) - 1, -1, -1):
                if type(self._entries[index]) is type(event):
                    del self._entries[index]
                    self._entries.append(event)
                    return True
        return False

    def holds(self, is_meant: Callable[[Event], bool]) -> bool:
        """Return whether such an event waits; text that was merged is none."""
        return any(not isinstance(entry, _Run) and is_meant(entry) for entry in self._entries)

    def fail(self, error: ChatdError) -> None:
        """End the consumer with `error` once it has read what is here already."""
        if self._error is None:
            self._error = error
        self._ready.set()

    async def get(self) -> Event:
        """Return the next event.

        Raises:
            ChatdError: The session or the connection ended, or this consumer was too slow.
        """
        while not self._entries:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        entry = self._entries.popleft()
        return entry.joined() if isinstance(entry, _Run) else entry
