"""The native door: one connection of chatd.v1.

Three tasks serve a connection. The reader is always in `receive()`, or the transport would stop reading and pongs would
go unread; the dispatcher carries out one command after another; the writer sends what the outbox holds. The engine and
other connections never wait for any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from chatd.errors import ChatdError, EngineError, InvalidRequest
from chatd.protocol import (
    CLOSE_NO_FIRST_FRAME,
    CLOSE_OVERLOAD,
    CLOSE_PROTOCOL,
    SUBPROTOCOL,
    TICKET_SUBPROTOCOL_PREFIX,
    Error,
    ErrorBody,
    Event,
    Hello,
    Limits,
    command_id,
    decode_command,
)
from chatd.server.auth import Principal
from chatd.server.daemon import Daemon
from chatd.server.inbox import Inbox
from chatd.server.logging import get_logger
from chatd.server.outbox import Outbox
from chatd.server.policy import owner_of
from chatd.server.pool_cells import CellPointer
from chatd.server.verbs import carry_out
from chatd.tenants.quotas import TokenBucket

CAPS = ("fork", "branch", "continue", "erase", "context", "prefill", "pool.map", "pool.inspect", "passages")
COMMANDS_PER_S = 200.0
COMMANDS_BURST = 400.0
FRAMES_BEFORE_YIELD = 64
LAST_COMMANDS_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
logger = get_logger("chatd.server")


class Connection:
    """One websocket, and a `Subscriber` of the sessions that it is attached to.

    Attributes:
        connection_id: Unique.
        principal: Who is at the other end.
        owner: Whose sessions it sees.
        pointer: Its questions about cells of the pool.
    """

    def __init__(self, daemon: Daemon, websocket: WebSocket, principal: Principal) -> None:
        self.daemon = daemon
        self.connection_id = f"con_{secrets.token_hex(8)}"
        self.principal = principal
        self.owner = owner_of(principal)
        self.pointer = CellPointer(principal, daemon.clock)
        self._websocket = websocket
        self._closing: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._outbox = Outbox(
            daemon.encoder,
            high_water_bytes=daemon.settings.server.send_buffer_bytes,
            timeout_s=daemon.settings.server.send_timeout_s,
            on_overload=self._on_overload,
        )
        self._inbox = Inbox(daemon.frame_limit_bytes)
        self._pace = TokenBucket(COMMANDS_BURST, COMMANDS_PER_S, daemon.clock())
        self._is_gone = False

    @property
    def is_closed(self) -> bool:
        """True once nothing that is delivered will be sent."""
        return self._is_gone or self._closing.done()

    def deliver(self, event: Event) -> None:
        """Queue an event; neither blocks nor raises."""
        self._outbox.put(event)

    def deliver_pool(self, source: Any) -> None:
        """Queue the pool's state, made when its turn comes."""
        self._outbox.put_pool(source)

    def drop_pool(self) -> None:
        """Send no pool frame that still waits."""
        self._outbox.drop_pool()

    def refuse(self, error: ChatdError, *, re: str | None = None, session: str | None = None) -> None:
        """Say that a command was refused; the socket stays open."""
        self.daemon.metrics.command_refused(error.error_code)
        self.deliver(Error(error=ErrorBody.of(error), re=re, session=session))

    def close(self, code: int, reason: str) -> None:
        """End the connection with a close code; may be called again."""
        if not self._closing.done():
            self._closing.set_result((code, reason))

    async def serve(self, subprotocol: str | None) -> None:
        """Accept the handshake, say hello, and serve until either side ends it."""
        await self._websocket.accept(subprotocol)
        self.deliver(self._hello())
        reader = asyncio.create_task(self._read(), name="websocket reader")
        dispatcher = asyncio.create_task(self._dispatch(), name="websocket dispatcher")
        writer = asyncio.create_task(self._write(), name="websocket writer")
        tasks = (reader, dispatcher, writer)
        try:
            await asyncio.wait((*tasks, self._closing), return_when=asyncio.FIRST_COMPLETED)
            if not self._closing.done():
                # The peer is gone: nothing is sent any more, and what it said before is still carried out.
                self._is_gone = True
                self._outbox.close()
                self._inbox.close()
                await asyncio.wait((dispatcher,), timeout=LAST_COMMANDS_TIMEOUT_S)
        finally:
            self._is_gone = True
            self._outbox.close()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._leave()
        if self._closing.done():
            code, reason = self._closing.result()
            with contextlib.suppress(TimeoutError, RuntimeError, WebSocketDisconnect):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._websocket.close(code, reason)
            logger.info("websocket.closed", connection=self.connection_id, code=code, reason=reason)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                logger.error("websocket.failed", connection=self.connection_id, exc_info=result)

    def _leave(self) -> None:
        with contextlib.suppress(ChatdError):
            self.daemon.manager.detach_all(self)
            self.daemon.pool.unsubscribe(self.connection_id)

    def _on_overload(self) -> None:
        self.daemon.metrics.connection_overloaded()
        self.close(CLOSE_OVERLOAD, "this reader is too slow; resume by seq")

    def _hello(self) -> Hello:
        settings = self.daemon.settings
        return Hello(
            protocol=SUBPROTOCOL,
            server=self.daemon.version,
            boot=self.daemon.boot,
            connection=self.connection_id,
            tenant=self.principal.tenant,
            user=self.principal.user,
            model=self.daemon.manager.model.info(),
            caps=list(CAPS),
            limits=Limits(
                frame_bytes=self.daemon.frame_limit_bytes,
                sessions=settings.sessions.max_sessions_per_user,
                inflight=settings.quotas.max_inflight,
                replay_events=settings.sessions.replay_events,
                replay_ttl_s=settings.sessions.replay_ttl_s,
            ),
            heartbeat_s=settings.server.heartbeat_s,
        )

    async def _read(self) -> None:
        timeout_s: float | None = self.daemon.settings.server.first_frame_timeout_s
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await self._websocket.receive()
            except TimeoutError:
                self.close(CLOSE_NO_FIRST_FRAME, f"no frame within {timeout_s:.0f} s")
                return
            timeout_s = None
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                self.close(CLOSE_PROTOCOL, "frames are JSON text, not binary")
                return
            await self._inbox.put(text)

    async def _dispatch(self) -> None:
        while True:
            text = await self._inbox.get()
            if text is None:
                return
            await self._outbox.wait_below()
            now = self.daemon.clock()
            wait_s = self._pace.wait_s(now, 1.0)
            self._pace.take(now, 1.0)
            # Nobody's commands hold the loop: at least one turn of it for each.
            await asyncio.sleep(wait_s)
            # What was begun is ended, even if the connection is lost meanwhile.
            await asyncio.shield(self.daemon.spawn(self._obey(text), "websocket command"))

    async def _obey(self, text: str) -> None:
        command = None
        try:
            command = _decode(text)
            await carry_out(self, command)
        except ChatdError as error:
            re = command.id if command is not None else _command_id(text)
            self.refuse(error, re=re, session=getattr(command, "session", None))
        except Exception:
            logger.exception("command.failed", connection=self.connection_id, command=type(command).__name__)
            failure = EngineError("the daemon failed to carry this out; its log says more", code="internal_error")
            self.refuse(
                failure, re=command.id if command is not None else None, session=getattr(command, "session", None)
            )

    async def _write(self) -> None:
        num_sent = 0
        while True:
            text = self._outbox.next()
            if text is None:
                await self._outbox.wait()
                continue
            await self._websocket.send({"type": "websocket.send", "text": text})
            num_sent += 1
            if num_sent % FRAMES_BEFORE_YIELD == 0:
                await asyncio.sleep(0)


def _decode(text: str) -> Any:
    try:
        return decode_command(text)
    except RecursionError:
        raise InvalidRequest("the frame is nested too deeply", code="invalid_json") from None


def _command_id(text: str) -> str | None:
    try:
        return command_id(text)
    except RecursionError:
        return None


async def chat_websocket(websocket: WebSocket) -> None:
    """Serve `GET /v1/chat/ws`; the caller is in `state.principal`.

    Raises:
        ChatdError: The handshake is refused, as an HTTP answer.
    """
    daemon: Daemon = websocket.app.state.daemon
    principal: Principal = websocket.state.principal
    daemon.check_accepting()
    _ = daemon.manager
    offered = websocket.scope.get("subprotocols", [])
    others = [name for name in offered if not name.startswith(TICKET_SUBPROTOCOL_PREFIX)]
    if others and SUBPROTOCOL not in others:
        raise InvalidRequest(f"this door speaks {SUBPROTOCOL} only", code="bad_subprotocol")
    address = websocket.client.host if websocket.client is not None else ""
    daemon.quotas.connect(principal.key_id, address)
    connection = Connection(daemon, websocket, principal)
    daemon.connections.add(connection)
    daemon.pool.set_attended(True)
    logger.info("websocket.opened", connection=connection.connection_id)
    try:
        await connection.serve(SUBPROTOCOL if SUBPROTOCOL in others else None)
    finally:
        daemon.connections.discard(connection)
        daemon.pool.set_attended(bool(daemon.connections))
        daemon.quotas.disconnect(principal.key_id, address)
