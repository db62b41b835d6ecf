"""The people of the load command: they talk, cancel, lose their connection, come back, or only sit there.

Each checks what it sees: an answer's pieces add up to the answer, whatever happened to the connection between, and
nothing fails. What was wrong is counted by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from chatd.bench.chat import text
from chatd.client import Client, ConnectionPhase, ConnectionState, Session
from chatd.errors import ChatdError
from chatd.protocol import OutputTextDelta, Params, ResponseCreated

RECONNECT_SHARE = 0.1
"""Of turns, so many lose their connection in the middle."""

NEW_SESSION_SHARE = 0.03
"""After so many turns a session is closed, and another one is begun in its place."""

CHECKED_SHARE = 0.2
"""Of answers, so many are read again and compared."""

_HANDSHAKES_AT_ONCE = 10


@dataclass(slots=True)
class Traffic:
    """What happened, as the clients saw it.

    Attributes:
        counts: Turns, cancels, reconnects and the like.
        errors: What was wrong, by name.
        ttfts_s: Of each answer that was not cancelled before.
        gaps_s: Between pieces of answers, in which there may be several tokens.
    """

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class LoadClient(Client):
    """A client whose connection can be lost on purpose."""

    def lose_connection(self) -> None:
        """Cut the connection as a network does: without a word."""
        if self._socket is not None:
            self._socket.transport.abort()


@dataclass(slots=True)
class Shape:
    """How much there is of everything.

    Attributes:
        url: Of the daemon.
        key: For it.
        streams: Turns at a time.
        sessions: Conversations between which they go.
        idle: Connections that do nothing.
        cancel_share: Of turns, so many are cancelled at a random place.
        max_tokens: Of an answer.
        seed: Of everything random.
    """

    url: str
    key: str | None
    streams: int
    sessions: int
    idle: int
    cancel_share: float
    max_tokens: int
    seed: int


class Crowd:
    """Streams over resident sessions, and idle connections.

    Args:
        shape: How many.
    """

    def __init__(self, shape: Shape) -> None:
        self.traffic = Traffic()
        self._shape = shape
        self._rng = random.Random(shape.seed)
        self._free: list[str] = []

    async def run(self, seconds: float) -> None:
        """Open the sessions and the idle connections, talk for so long, and close everything."""
        async with contextlib.AsyncExitStack() as stack:
            gate = asyncio.Semaphore(_HANDSHAKES_AT_ONCE)
            await asyncio.gather(*(self._sit(stack, gate) for _ in range(self._shape.idle)))
            async with self._client() as client:
                for _ in range(self._shape.sessions):
                    self._free.append((await client.create_session(system=text(3, 60))).id)
            end = time.monotonic() + seconds
            await asyncio.gather(*(self._talk(end) for _ in range(self._shape.streams)))
            async with self._client() as client:
                for session in self._free:
                    await client.close_session(session)

    def _client(self) -> LoadClient:
        shape = self._shape
        return LoadClient(shape.url, key=shape.key, backoff=lambda attempt: 0.05 * attempt, allow_plaintext=True)

    async def _sit(self, stack: contextlib.AsyncExitStack, gate: asyncio.Semaphore) -> None:
        """Open a connection that says one thing and no more; losing it is an error."""

        def note(state: ConnectionState) -> None:
            self.traffic.errors["idle connection lost"] += state.phase is ConnectionPhase.WAITING

        async with gate:
            client = Client(self._shape.url, key=self._shape.key, on_state=note, allow_plaintext=True)
            await stack.enter_async_context(client)
            await client.ping()
            self.traffic.counts["idle connections"] += 1

    async def _talk(self, end: float) -> None:
        """Have turns in one free session after another."""
        async with self._client() as client:
            while time.monotonic() < end:
                ident = self._free.pop(self._rng.randrange(len(self._free)))
                try:
                    session = await client.attach(ident, history="none")
                    await self._turn(client, session)
                    await session.detach()
                    if self._rng.random() < NEW_SESSION_SHARE:
                        await client.close_session(ident)
                        session = await client.create_session(system=text(3, 60))
                        ident = session.id
                        await session.detach()
                        self.traffic.counts["sessions replaced"] += 1
                except ChatdError as error:
                    self.traffic.errors[error.error_code] += 1
                finally:
                    self._free.append(ident)

    async def _turn(self, client: LoadClient, session: Session) -> None:
        rng, traffic, most = self._rng, self.traffic, self._shape.max_tokens
        cancel_at = rng.randrange(most // 2) if rng.random() < self._shape.cancel_share else None
        lose_at = rng.randrange(most // 2) if rng.random() < RECONNECT_SHARE else None
        content = text(rng.randrange(1000), rng.randint(5, 40))
        params = Params(max_tokens=most, temperature=rng.choice((0.0, 0.9)))
        turn = session.say(content, params=params)
        num_pieces = 0
        last = time.monotonic()
        cancelling: asyncio.Task[None] | None = None
        async for event in turn:
            now = time.monotonic()
            if isinstance(event, OutputTextDelta):
                (traffic.gaps_s if num_pieces else traffic.ttfts_s).append(now - last)
                num_pieces += 1
                last = now
            elif not isinstance(event, ResponseCreated):
                continue
            if cancel_at is not None and num_pieces >= cancel_at and cancelling is None:
                cancelling = asyncio.create_task(self._cancel(session))
            if lose_at is not None and num_pieces >= lose_at:
                lose_at = None
                client.lose_connection()
                traffic.counts["connections lost"] += 1
        if cancelling is not None:
            await cancelling
        traffic.counts["turns"] += 1
        traffic.counts[f"ended by {turn.reason}"] += 1
        traffic.counts["output tokens"] += turn.usage.output_tokens if turn.usage is not None else 0
        if turn.item is None or turn.item.content != turn.text:
            traffic.errors["pieces are not the answer"] += 1
        elif rng.random() < CHECKED_SHARE:
            _, items = await client.get_session(session.id)
            answers = [item.content for item in items if item.id == turn.item.id]
            traffic.errors["another answer was kept"] += answers != [turn.text]
            traffic.counts["answers read again"] += 1

    async def _cancel(self, session: Session) -> None:
        try:
            await session.cancel()
            self.traffic.counts["turns cancelled"] += 1
        except ChatdError as error:
            if error.error_code != "not_responding":  # It has ended just before.
                self.traffic.errors[error.error_code] += 1
