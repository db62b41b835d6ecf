"""Frames over a byte stream, and the engine's end of the pipe. Knows bytes only; messages are decoded by its users.

```
frame = length (4 bytes, big endian) | body (msgpack)
```
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Sequence

from chatd.engine.messages import LENGTH_PREFIX_BYTES, MAX_MESSAGE_BYTES

_READ_BYTES = 1 << 20

# What one call of `receive` takes at most, so that a flood of messages cannot keep the engine from its step.
_MAX_BYTES_AT_ONCE = 64 << 20


class PipeClosed(Exception):
    """The other end is gone."""


class FrameError(Exception):
    """What arrived is no frame: its length is beyond the limit."""


class FrameReader:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take what arrived and return the bodies that are complete, in order.

        Raises:
            FrameError: A frame announces more than the limit.
        """
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        end = len(self._buffer)
        view = memoryview(self._buffer)
        try:
            while end - start >= LENGTH_PREFIX_BYTES:
                length = int.from_bytes(view[start : start + LENGTH_PREFIX_BYTES], "big")
                if length > self._max_bytes:
                    raise FrameError(f"a frame of {length} bytes, the limit is {self._max_bytes}")
                body = start + LENGTH_PREFIX_BYTES
                if end - body < length:
                    break
                bodies.append(bytes(view[body : body + length]))
                start = body + length
        finally:
            view.release()
        del self._buffer[:start]
        return bodies


class EnginePipe:
    """The engine's end: reads what is there, and never waits for the front to read.

    Args:
        sock: Connected; becomes non-blocking and is owned by the pipe.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the front has not taken yet."""
        return self._backlog_bytes

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """Return the bodies of the frames that have arrived, after waiting for one; sends the backlog meanwhile.

        Args:
            timeout_s: Longest wait; 0 does not wait, None waits for ever.

        Raises:
            PipeClosed: The front is gone.
            FrameError: The front sends nonsense.
        """
        writing = bool(self._unsent)
        if writing:
            self._selector.modify(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        try:
            ready = self._selector.select(timeout_s)
        finally:
            if writing:
                self._selector.modify(self._socket, selectors.EVENT_READ)
        bodies: list[bytes] = []
        for _, events in ready:
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ:
                bodies = self._read()
        return bodies

    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames in order; what the front does not take at once is kept for the next `receive` or `send`.

        Raises:
            PipeClosed: The front is gone.
        """
        if not frames:
            return
        data = memoryview(b"".join(frames))
        self._unsent.append(data)
        self._backlog_bytes += len(data)
        self._flush()

    def close(self) -> None:
        """Close the socket; what is unsent is lost."""
        self._selector.close()
        self._socket.close()

    def finish(self, timeout_s: float) -> None:
        """Wait until the backlog is sent, or the time is over, or the front is gone; then close."""
        try:
            self._socket.settimeout(timeout_s)
            while self._unsent:
                self._socket.sendall(self._unsent.popleft())
        except OSError:
            pass
        self.close()

    def _read(self) -> list[bytes]:
        bodies: list[bytes] = []
        num_bytes = 0
        while num_bytes < _MAX_BYTES_AT_ONCE:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError as error:
                raise PipeClosed from error
            if not data:
                raise PipeClosed
            bodies += self._reader.feed(data)
            num_bytes += len(data)
            if len(data) < _READ_BYTES:
                break
        return bodies

    def _flush(self) -> None:
        while self._unsent:
            data = self._unsent[0]
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise PipeClosed from error
            self._backlog_bytes -= sent
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = data[sent:]
