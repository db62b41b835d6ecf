"""uvicorn's protocols with bounds where it has none: half-open connections, ping floods, endless fragments.

Knows uvicorn's classes; the application does not know of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from chatd.protocol import CLOSE_RATE

HEADER_TIMEOUT_S = 10.0
"""Longest from a connection to the end of its first request's headers; for later ones, from their first byte."""

MAX_HALF_OPEN = 512
"""Connections that have not sent a request yet; above it the newest is dropped."""

MAX_FRAGMENTS = 1024
"""Frames of one message; a client that means well sends one."""

MAX_PINGS_PER_S = 50
CLOSE_LINGER_S = 5.0
"""Longest that what is left for a closed websocket's peer waits to be read."""


class BoundedHttpProtocol(H11Protocol):
    """HTTP/1.1 whose clients must finish the headers that they began, the first ones and those of later requests."""

    _num_half_open = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request."""
        super().connection_made(transport)
        self._is_half_open = True
        self._header_clock: asyncio.TimerHandle | None = None
        BoundedHttpProtocol._num_half_open += 1
        self._start_clock()
        if BoundedHttpProtocol._num_half_open > MAX_HALF_OPEN:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once a request is there; start it where only a part of one is."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        is_upgraded = self.transport.get_protocol() is not self
        has_request = self.cycle is not None and not self.cycle.response_complete
        if is_upgraded or has_request:
            self._opened()
            self._stop_clock()
        else:
            self._start_clock()

    def on_response_complete(self) -> None:
        """Leave the wait for the next request to uvicorn's keep-alive."""
        self._stop_clock()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._opened()
        self._stop_clock()
        super().connection_lost(exc)

    def _opened(self) -> None:
        if self._is_half_open:
            self._is_half_open = False
            BoundedHttpProtocol._num_half_open -= 1

    def _start_clock(self) -> None:
        if self._header_clock is None:
            self._header_clock = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._header_clock is not None:
            self._header_clock.cancel()
            self._header_clock = None


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """A websocket whose control frames and fragments are counted, and whose end does not wait for its reader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_pings = 0
        self._pings_since = 0.0
        self._linger: asyncio.TimerHandle | None = None

    def handle_ping(self) -> None:
        """Answer a ping; at once where the peer reads, with the next frame where it does not."""
        now = self.loop.time()
        if now - self._pings_since >= 1.0:
            self._pings_since, self._num_pings = now, 0
        self._num_pings += 1
        if self._num_pings > MAX_PINGS_PER_S:
            self._fail(CLOSE_RATE, "too many pings")
        elif self.writable.is_set():
            super().handle_ping()

    def handle_cont(self, event: Frame) -> None:
        """Take a fragment, unless there are too many."""
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(1009, "too many fragments")
            return
        super().handle_cont(event)

    def _fail(self, code: int, reason: str) -> None:
        if self.close_sent:
            return
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.frames = []
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.close()
        self._drop_later()

    async def send(self, message: Any) -> None:
        """Send; a close frame goes out even if the peer reads nothing, which then has a while to read it."""
        if message["type"] == "websocket.close":
            self.writable.set()
            self._drop_later()
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refused handshake is complete too; uvicorn would log it as an error of the application.
            self.handshake_complete = True

    def shutdown(self) -> None:
        """Close for a restart, and do not wait for a peer that reads nothing."""
        super().shutdown()
        self._drop_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the clock."""
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(exc)

    def _drop_later(self) -> None:
        if self._linger is None:
            self._linger = self.loop.call_later(CLOSE_LINGER_S, self.transport.abort)
