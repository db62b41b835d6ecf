"""Commands of one websocket that were read and not carried out yet: bounded, or else the socket is not read."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_COMMANDS = 64


class Inbox:
    """A queue of texts that holds at most `max_bytes`, and always takes one where it is empty.

    Args:
        max_bytes: Beyond it `put` waits.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._texts: deque[str] = deque()
        self._num_bytes = 0
        self._closed = False
        self._changed = asyncio.Event()

    async def put(self, text: str) -> None:
        """Queue a text, once there is room."""
        while self._texts and (self._num_bytes + len(text) > self._max_bytes or len(self._texts) >= MAX_COMMANDS):
            await self._wait()
        self._texts.append(text)
        self._num_bytes += len(text)
        self._changed.set()

    async def get(self) -> str | None:
        """Return the next text; None once the inbox is closed and empty."""
        while not self._texts:
            if self._closed:
                return None
            await self._wait()
        text = self._texts.popleft()
        self._num_bytes -= len(text)
        self._changed.set()
        return text

    def close(self) -> None:
        """Say that no text follows."""
        self._closed = True
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
