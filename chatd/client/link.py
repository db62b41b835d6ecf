"""The connection under a client: one socket that comes back, and the routing of what it brings.

One task connects, reads and connects again. Each frame is applied without a pause, so that everybody sees events in
the order they came in. What knows sessions' contents is `session`, what waits for answers is in `waiting`, and what an
app calls is `client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.typing import Subprotocol

from chatd.client.address import websocket_url
from chatd.client.errors import FATAL, error_of_close, error_of_connect
from chatd.client.pool import PoolReader, PoolState, apply_frame, combined
from chatd.client.session import Session
from chatd.client.state import ConnectionPhase, ConnectionState
from chatd.client.waiting import Waiting, WaitingCommands
from chatd.config import check_key, check_key_transport
from chatd.errors import ChatdError, EngineError, InvalidRequest, NotFound, Unavailable
from chatd.protocol import (
    SUBPROTOCOL,
    Command,
    Error,
    Event,
    Hello,
    PoolDelta,
    PoolSnapshot,
    RateLimitsUpdated,
    ServerDraining,
    SessionAttached,
    SessionCreated,
    SessionErased,
    decode_event,
    encode,
)

MAX_BACKOFF_S = 10.0
# A daemon that loads is there and will be ready in seconds.
MAX_LOADING_S = 1.0
MAX_EVENT_BYTES = 64 * 1024 * 1024
_STABLE_S = 5.0

E = TypeVar("E")


class _EventHead(msgspec.Struct):
    """What is read of an event that this version cannot read."""

    type: str
    session: Any = None
    seq: Any = None
    seq_from: Any = None
    re: Any = None


def _jittered_backoff(attempt: int) -> float:
    """Seconds before try `attempt` (from 1): doubling from 0.25, at most 10, minus up to half at random."""
    return min(MAX_BACKOFF_S, 0.25 * 2.0 ** min(attempt - 1, 10)) * random.uniform(0.5, 1.0)


class Connection:
    """A socket to one daemon that repairs itself; arguments as for `client.Client`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        wait_s: float = 0.0,
        on_state: Callable[[ConnectionState], None] | None = None,
        on_notice: Callable[[Event], None] | None = None,
        open_timeout_s: float = 10.0,
        backoff: Callable[[int], float] = _jittered_backoff,
        allow_plaintext: bool = False,
    ) -> None:
        self.url = websocket_url(url)
        check_key(key)
        if not allow_plaintext:
            check_key_transport(self.url, key)
        self._key = key
        self._wait_s = wait_s
        self._on_state = on_state
        self._on_notice = on_notice
        self._open_timeout_s = open_timeout_s
        self._backoff = backoff
        self._hello: Hello | None = None
        self._socket: ClientConnection | None = None
        self._state = ConnectionState(ConnectionPhase.CLOSED)
        self._sessions: dict[str, Session] = {}
        self._waiting = WaitingCommands()
        self._pool_readers: list[PoolReader] = []
        self._pool_state: PoolState | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._retry_now = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._runner = loop.create_task(self._run(), name="chatd client")
        try:
            await self._ready
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end everything that waits for it. Generations in the daemon go on."""
        tasks = [task for task in (self._runner, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runner = None
        self._end(Unavailable("this client was closed", code="client_closed"))

    async def wait_refused(self) -> None:
        """Wait until the connection ends for good, as only a refusal or `close` makes it.

        Raises:
            ChatdError: Why it ended.
        """
        if self._runner is not None:
            await asyncio.wait([self._runner])
        raise self._state.error or Unavailable("this client was closed", code="client_closed")

    # State.

    @property
    def hello(self) -> Hello:
        """The daemon's first frame on the latest connection: its model, caps and limits."""
        if self._hello is None:
            raise Unavailable("this client is not connected yet", code="not_connected")
        return self._hello

    @property
    def state(self) -> ConnectionState:
        """Where the client stands with its daemon."""
        return self._state

    def retry_now(self) -> None:
        """Cut the wait before the next try short."""
        self._retry_now.set()

    async def _ask(
        self, command: Command, expect: type[E], *, session: str | None = None, ends_with_response: bool = False
    ) -> tuple[E, int]:
        """Send a command; return its answer and how often it was sent. It survives a lost connection."""
        if self._runner is None or self._runner.done():
            raise self._state.error or Unavailable("this client is not connected", code="not_connected")
        text = encode(command)
        if self._hello is not None and len(text.encode()) > self._hello.limits.frame_bytes:
            raise InvalidRequest(
                f"the message makes a frame of {len(text.encode())} bytes, the limit is "
                f"{self._hello.limits.frame_bytes} (limits.frame_bytes)",
                code="frame_too_large",
            )
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting = Waiting(command, expect, session, future, ends_with_response=ends_with_response)
        self._waiting.add(waiting)
        try:
            if self._socket is not None:
                waiting.num_sends += 1
                # A connection that is lost here is noticed by the reader, and the command is sent again.
                with contextlib.suppress(ConnectionClosed):
                    await self._socket.send(text)
            answer = await future
        finally:
            self._waiting.forget(command.id)
        return cast(E, answer), waiting.num_sends

    def _spawn(self, command: Command) -> None:
        """Send a command whose answer nobody waits for, in a task that the client owns."""
        socket = self._socket
        if socket is None:
            return

        async def send() -> None:
            with contextlib.suppress(ConnectionClosed):
                await socket.send(encode(command))

        task = asyncio.get_running_loop().create_task(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The connection.

    async def _run(self) -> None:
        """Connect, read, and connect again until the client is closed or the daemon refuses for good."""
        try:
            await self._keep_connected()
        except asyncio.CancelledError:
            raise
        except ChatdError as error:
            self._end(error)
        except BaseException as error:
            self._end(EngineError(f"the client failed: {error!r}", code="client_error"))
            raise

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._wait_s
        attempt = 0
        error: ChatdError | None = None
        while True:
            attempt += 1
            self._set_state(ConnectionState(ConnectionPhase.CONNECTING, attempt, error=error))
            connected_at: float | None = None
            try:
                async with self._open() as socket:
                    async with asyncio.timeout(self._open_timeout_s):
                        await self._greet(socket)
                    connected_at = loop.time()
                    await self._restore(socket)
                    self._set_state(ConnectionState(ConnectionPhase.CONNECTED))
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(None)
                    while True:
                        self._handle(await socket.recv())
            except ConnectionClosed as closed:
                error = error_of_close(closed)
            except (OSError, InvalidHandshake, InvalidURI, EOFError) as failure:
                error = error_of_connect(failure, self.url)
            finally:
                self._socket = None
                self._pool_state = None
            if isinstance(error, FATAL) or (self._hello is None and loop.time() >= give_up_at):
                raise error
            if connected_at is not None and loop.time() - connected_at > _STABLE_S:
                attempt = 1
            delay_s = max(self._backoff(attempt), (error.retry_after_ms or 0) / 1000)
            if error.error_code == "loading":
                delay_s = min(delay_s, MAX_LOADING_S)
            self._set_state(ConnectionState(ConnectionPhase.WAITING, attempt, delay_s, error))
            self._retry_now.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._retry_now.wait(), delay_s)

    def _open(self) -> open_websocket:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        host = urlsplit(self.url).hostname
        options: dict[str, Any] = {}
        if host in ("localhost", "::1") or (host or "").startswith("127."):
            options["proxy"] = None
        return open_websocket(
            self.url,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            additional_headers=headers,
            compression=None,
            open_timeout=self._open_timeout_s,
            max_size=MAX_EVENT_BYTES,
            **options,
        )

    async def _greet(self, socket: ClientConnection) -> None:
        hello = decode_event(await socket.recv())
        if not isinstance(hello, Hello):
            raise InvalidRequest(f"{self.url} did not say hello as {SUBPROTOCOL} does", code="protocol_error")
        self._hello = hello

    async def _restore(self, socket: ClientConnection) -> None:
        """Attach again where the last connection stopped, then send what was not answered."""
        self._waiting.forget_attachments()
        for session in list(self._sessions.values()):
            session._resyncing = False
            if session._attached:
                command = session._resume_command(fresh=False)
                self._waiting.reattach(command, session.id)
                await socket.send(encode(command))
        wish = combined([reader.wish for reader in self._pool_readers])
        if wish is not None:
            await socket.send(encode(msgspec.structs.replace(wish, id=None)))
        # From here on `_ask` sends by itself; what waits now it sent to a connection that is gone, or not at all.
        again = self._waiting.asked()
        self._socket = socket
        for waiting in again:
            waiting.num_sends += 1
            await socket.send(encode(waiting.command))

    def _resync(self, session: Session, *, fresh: bool) -> None:
        """Ask for what is missing after a gap; `fresh` asks for a snapshot."""
        session._resyncing = True
        command = session._resume_command(fresh=fresh)
        self._waiting.reattach(command, session.id)
        self._spawn(command)

    def _set_state(self, state: ConnectionState) -> None:
        self._state = state
        if self._on_state is not None:
            self._on_state(state)

    def _end(self, error: ChatdError) -> None:
        """Give up: everything that waits ends with `error`."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        self._waiting.end(error)
        for ident in list(self._sessions):
            self._drop_session(ident, error)
        for reader in self._pool_readers:
            reader.fail(error)
        if self._state.phase is not ConnectionPhase.CLOSED:
            self._set_state(ConnectionState(ConnectionPhase.CLOSED, error=error))

    # Frames.

    def _handle(self, text: str | bytes) -> None:
        """Apply one frame. Runs without a pause, so that everybody sees events in the order they came in."""
        try:
            event = decode_event(text)
        except InvalidRequest:
            self._pass_over(text, readable=False)
            return
        if event is None:
            self._pass_over(text, readable=True)
            return
        match event:
            case PoolSnapshot() | PoolDelta():
                self._pool_state = apply_frame(self._pool_state, event)
                if self._pool_state is not None:
                    for reader in self._pool_readers:
                        reader.put(self._pool_state)
            case SessionCreated(session=info):
                created = self._sessions.setdefault(info.id, Session(self, info.id))
                created._begin(info, event.head_seq)
            case SessionAttached(session=ident):
                self._sessions.setdefault(ident, Session(self, ident))._attached_again(event)
            case Hello() | RateLimitsUpdated() | ServerDraining():
                self._notify(event)
            case _:
                session = getattr(event, "session", None)
                # Some answers carry the whole session there, and those belong to whoever asked.
                owner = self._sessions.get(session) if isinstance(session, str) else None
                if owner is not None and not (isinstance(event, Error) and event.re):
                    owner._deliver(event)
                    if isinstance(event, SessionErased):
                        self._drop_session(owner.id, NotFound("this session was erased", code="erased"))
                elif isinstance(event, Error) and event.re is None:
                    self._notify(event)
        lost = self._waiting.take(event)
        if lost is not None:
            self._drop_session(*lost)

    def _response_ended(self, session: str) -> None:
        self._waiting.response_ended(session)

    def _pass_over(self, text: str | bytes, *, readable: bool) -> None:
        """Step over an event that is not known here, so that its `seq` leaves no gap.

        A known event with a value that is not (a newer daemon's) may be the end of an answer; a snapshot tells.
        """
        try:
            head = msgspec.json.decode(text, type=_EventHead)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        unreadable = f"the daemon's answer {head.type[:64]!r} is not readable here"
        self._waiting.refuse(head.re, InvalidRequest(unreadable, code="protocol_error"))
        session = self._sessions.get(head.session) if isinstance(head.session, str) else None
        if session is None or type(head.seq) is not int or head.seq <= session.seq:
            return
        if session._resyncing:
            return
        first = head.seq_from if type(head.seq_from) is int else head.seq
        if first != session.seq + 1:
            self._resync(session, fresh=False)
            return
        session.seq = head.seq
        if not readable:
            self._resync(session, fresh=True)

    def _notify(self, event: Event) -> None:
        if self._on_notice is not None:
            self._on_notice(event)

    def _drop_session(self, ident: str, error: ChatdError) -> None:
        session = self._sessions.pop(ident, None)
        if session is not None:
            session._fail(error)
