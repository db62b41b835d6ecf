"""What one websocket has yet to send: bounded in bytes, merging what may be merged. Knows no socket.

Text deltas of one answer that wait behind each other become one frame (`seq_from`..`seq`), and of the pool only the
latest state is kept, so a reader that lags gets fewer and larger frames instead of a longer queue. Order is kept within
a session. Each event is encoded once, however many connections it goes to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from chatd.protocol import Event, Logprob, OutputTextDelta, encode

HARD_LIMIT_FACTOR = 8
"""Above so many times the high-water mark a connection ends at once."""

LOGPROB_BYTES = 256
MAX_PARTS = 64


class EventEncoder:
    """Encodes events, and remembers the last one: an event goes to all its subscribers in a row."""

    def __init__(self) -> None:
        self._event: Event | None = None
        self._text = ""

    def encode(self, event: Event) -> str:
        """Return an event's frame."""
        if event is not self._event:
            self._text = encode(event)
            self._event = event
        return self._text


class _Entry:
    """A frame that waits, or the merged text of several deltas that is encoded when it is sent."""

    __slots__ = ("_logprobs", "_num_tokens", "_parts", "_seq_from", "delta", "session", "size", "text")

    def __init__(self, text: str, session: str | None, delta: OutputTextDelta | None) -> None:
        self.text: str | None = text
        self.size = len(text) if text.isascii() else len(text.encode())
        self.session = session
        self.delta = delta
        self._parts: list[str] = []
        self._logprobs: list[Logprob] = []
        self._num_tokens = 0
        self._seq_from = 0

    def can_merge(self, delta: OutputTextDelta) -> bool:
        """True where `delta` goes on exactly where this entry ends."""
        last = self.delta
        first_seq = delta.seq if delta.seq_from is None else delta.seq_from
        return last is not None and last.item_id == delta.item_id and last.seq + 1 == first_seq

    def merge(self, delta: OutputTextDelta) -> int:
        """Take one more delta of the same answer; return the bytes that it adds."""
        if self.text is not None:
            assert self.delta is not None
            self.text = None
            self._seq_from = self.delta.seq if self.delta.seq_from is None else self.delta.seq_from
            self._add(self.delta)
        self._add(delta)
        self.delta = delta
        added = len(delta.delta.encode()) + LOGPROB_BYTES * len(delta.logprobs or ())
        self.size += added
        return added

    def _add(self, delta: OutputTextDelta) -> None:
        self._num_tokens += delta.n_tokens
        self._parts.append(delta.delta)
        if len(self._parts) >= MAX_PARTS:
            self._parts = ["".join(self._parts)]
        if delta.logprobs:
            self._logprobs += delta.logprobs

    def render(self) -> str:
        """Return the frame."""
        if self.text is not None:
            return self.text
        assert self.delta is not None
        return encode(
            msgspec.structs.replace(
                self.delta,
                delta="".join(self._parts),
                n_tokens=self._num_tokens,
                seq_from=self._seq_from,
                logprobs=self._logprobs or None,
            )
        )


class Outbox:
    """The queue of one connection.

    Args:
        encoder: Shared by all connections.
        high_water_bytes: Above this the clock runs.
        timeout_s: Longest above it.
        on_overload: Called once, when the queue was above the mark for `timeout_s` or is far above it; afterwards
            nothing is taken any more.
    """

    def __init__(
        self,
        encoder: EventEncoder,
        *,
        high_water_bytes: int,
        timeout_s: float,
        on_overload: Callable[[], None],
    ) -> None:
        self._encoder = encoder
        self._high_water_bytes = high_water_bytes
        self._timeout_s = timeout_s
        self._on_overload = on_overload
        self._entries: deque[_Entry] = deque()
        self._tails: dict[str, _Entry] = {}
        self._pool_source: Callable[[], Event | None] | None = None
        self._num_bytes = 0
        self._wake = asyncio.Event()
        self._below = asyncio.Event()
        self._below.set()
        self._clock: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that wait."""
        return self._num_bytes

    def put(self, event: Event) -> None:
        """Queue an event; merged with the last one of its session where both are text of one answer."""
        if self._closed:
            return
        session = getattr(event, "session", None)
        session = session if isinstance(session, str) else None
        delta = event if isinstance(event, OutputTextDelta) else None
        if delta is not None:
            tail = self._tails.get(delta.session)
            if tail is not None and tail.can_merge(delta):
                self._grow(tail.merge(delta))
                return
        # One frame may be larger than any mark; it is what comes behind it that is bounded.
        first_bytes = self._entries[0].size if self._entries else 0
        if self._num_bytes - first_bytes > HARD_LIMIT_FACTOR * self._high_water_bytes:
            self._overload()
            return
        entry = _Entry(self._encoder.encode(event), session, delta)
        if session is not None:
            self._tails[session] = entry
        self._entries.append(entry)
        self._wake.set()
        self._grow(entry.size)

    def put_pool(self, source: Callable[[], Event | None]) -> None:
        """Send the pool's state, made by `source` when its turn comes; replaces one that still waits."""
        if not self._closed:
            self._pool_source = source
            self._wake.set()

    def drop_pool(self) -> None:
        """Forget a pool frame that still waits."""
        self._pool_source = None

    def next(self) -> str | None:
        """Return the next frame, None where nothing waits."""
        while True:
            if self._entries:
                entry = self._entries.popleft()
                if entry.session is not None and self._tails.get(entry.session) is entry:
                    del self._tails[entry.session]
                self._shrink(entry.size)
                return entry.render()
            if self._pool_source is None:
                return None
            source, self._pool_source = self._pool_source, None
            event = source()
            if event is not None:
                return encode(event)

    async def wait(self) -> None:
        """Return when something may wait."""
        while not self._entries and self._pool_source is None:
            self._wake.clear()
            await self._wake.wait()

    async def wait_below(self) -> None:
        """Return when the queue is below its high-water mark: answers to commands wait for this."""
        await self._below.wait()

    def close(self) -> None:
        """Take nothing any more, and forget what waits."""
        self._closed = True
        self._entries.clear()
        self._tails.clear()
        self._pool_source = None
        self._num_bytes = 0
        self._below.set()
        self._stop_clock()

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._high_water_bytes and self._clock is None:
            self._below.clear()
            self._clock = asyncio.get_running_loop().call_later(self._timeout_s, self._overload)

    def _shrink(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        if self._num_bytes <= self._high_water_bytes and self._clock is not None:
            self._below.set()
            self._stop_clock()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _overload(self) -> None:
        if not self._closed:
            self.close()
            self._on_overload()
