"""A daemon that speaks chatd.v1 from a script: no model, no engine. For tests and measurements of clients.

It keeps sessions with exact `seq`s and a replay ring, answers a repeated command id once, and can misbehave on
request: drop connections, restart with another `boot`, forget its ring, send any frame, rewrite each as another
version says it. Answers come from scripts; with `manual` each delta waits for `release`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus
from types import TracebackType

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from chatd import protocol as p
from chatd.errors import ChatdError, Conflict, InvalidRequest
from chatd.testing.protocol_values import make_hello
from chatd.testing.scripted_session import NOW, ScriptedSession
from chatd.testing.scripted_turns import Script, ScriptedTurns

__all__ = ["Script", "ScriptedDaemon", "merged"]

Counts = tuple[int, int, int, int]


class ScriptedDaemon(ScriptedTurns):
    """Serves on a free port of the loopback; `async with` it.

    Args:
        scripts: Answers in order; when they are used up, the last one repeats.
        key: Required of clients, if given.
        caps: Of the hello.
    """

    def __init__(
        self,
        scripts: Sequence[Script] = (Script(),),
        *,
        key: str | None = None,
        caps: Sequence[str] = ("fork", "branch", "continue", "erase", "context", "prefill", "pool.map", "pool.inspect"),
        frame_bytes: int = p.MIN_FRAME_BYTES,
        port: int = 0,
    ) -> None:
        super().__init__(scripts)
        self.boot = "boot-1"
        self.commands: list[p.Command] = []
        self.num_connections = 0
        self.refuse: tuple[HTTPStatus, bytes] | None = None
        self.rewrite: Callable[[str], list[str]] = lambda frame: [frame]
        self.on_command: Callable[[p.Command], Awaitable[bool]] | None = None
        self.totals = p.PoolTotals(
            blocks=256,
            free=100,
            cached=60,
            active=96,
            shared=16,
            evictions=3,
            hit_rate=0.87,
            tok_s=38.0,
            running=1,
            waiting=0,
            public=2,
            wanted_again=1,
        )
        self.cells: list[Counts] = []
        self.tenants: list[p.TenantBlocks] = []
        self.blocks: dict[int, list[p.CellBlock]] = {}
        self._key = key
        self._caps = list(caps)
        self._frame_bytes = frame_bytes
        self._port = port
        self._attached: dict[ServerConnection, set[str]] = {}
        self._pool_wishes: dict[ServerConnection, p.PoolSubscribe] = {}
        self._step = 0
        self._server: Server | None = None

    async def __aenter__(self) -> ScriptedDaemon:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self._port,
            process_request=self._admit,
            subprotocols=[Subprotocol(p.SUBPROTOCOL)],
            compression=None,
            max_size=self._frame_bytes,
            close_timeout=1,
        )
        self._port = next(iter(self._server.sockets)).getsockname()[1]

    async def stop(self) -> None:
        """Close the socket, every connection, and every answer in progress."""
        if self._server is not None:
            await self.drop(p.CLOSE_RESTART)
            await self.stop_listening()
        tasks = [session.task for session in self.sessions.values() if session.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop_listening(self) -> None:
        """Close the socket and every connection; answers go on."""
        server, self._server = self._server, None
        assert server is not None, "it listens"
        # Python 3.11 leaves a connection open whose acceptance is on its way while the server closes.
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await asyncio.sleep(0)
        server.close()
        await server.wait_closed()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    # What a test makes it do.

    async def drop(self, code: int = 1011) -> None:
        """Close every connection; answers go on."""
        for socket in list(self._attached):
            await socket.close(code)

    def abort(self) -> None:
        """Cut every connection without a close frame."""
        for socket in list(self._attached):
            socket.transport.abort()

    def forget(self, boot: str = "boot-2") -> None:
        """Behave as after a restart: another boot, no ring; sessions and partial answers are kept."""
        self.boot = boot
        for session in self.sessions.values():
            session.ring.clear()

    async def send_everywhere(self, frame: str) -> None:
        """Send any text to every connection."""
        for socket in list(self._attached):
            await self._send(socket, frame)

    async def show_pool(
        self,
        cells: Sequence[Counts],
        totals: p.PoolTotals | None = None,
        *,
        sessions: list[p.SessionBlocks] | None = None,
    ) -> None:
        """Change the pool and send every subscriber what changed."""
        changed = [index for index, cell in enumerate(cells) if index >= len(self.cells) or self.cells[index] != cell]
        self.cells = list(cells)
        self.totals = totals or self.totals
        self._step += 1
        for socket, wish in list(self._pool_wishes.items()):
            delta = p.PoolDelta(
                step=self._step,
                totals=self.totals,
                tenants=self._tenants(),
                sessions=(sessions or self._session_blocks()) if wish.detail != "summary" else None,
                cells=p.Cells(
                    count=len(self.cells),
                    blocks_per_cell=self._blocks_per_cell(),
                    index=changed,
                    data=p.pack_cells([self.cells[index] for index in changed]),
                )
                if wish.detail == "map"
                else None,
            )
            await self._send(socket, p.encode(delta))

    # Serving.

    def _admit(self, socket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ready":
            return _response(socket, HTTPStatus.OK, b'{"status": "ready"}')
        if self.refuse is not None:
            status, body = self.refuse
            return _response(socket, status, body)
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            text = {"error": {"type": "authentication_error", "code": "invalid_api_key", "message": "key is not known"}}
            return _response(socket, HTTPStatus.UNAUTHORIZED, json.dumps(text).encode())
        return None

    async def _serve(self, socket: ServerConnection) -> None:
        self.num_connections += 1
        self._attached[socket] = set()
        try:
            await self._send(socket, p.encode(self._hello()))
            async for text in socket:
                await self._receive(socket, text)
        except ConnectionClosed:
            pass
        finally:
            for ident in list(self._attached.get(socket, ())):
                await self._leave(socket, ident)
            self._attached.pop(socket, None)
            self._pool_wishes.pop(socket, None)

    def _hello(self) -> p.Hello:
        return make_hello(
            boot=self.boot,
            connection=f"con_{self.num_connections}",
            tenant="local",
            user="local",
            model=self.model,
            caps=self._caps,
            limits=p.Limits(
                frame_bytes=self._frame_bytes, sessions=64, inflight=8, replay_events=8192, replay_ttl_s=300
            ),
        )

    async def _receive(self, socket: ServerConnection, text: str | bytes) -> None:
        re = p.command_id(text)
        try:
            command = p.decode_command(text)
            self.commands.append(command)
            if self.on_command is not None and await self.on_command(command):
                return
            if command.id in self._answers:
                await self._send(socket, p.encode(self._answers[command.id]))
                return
            await self._do(socket, command)
        except ChatdError as error:
            await self._send(socket, p.encode(p.Error(error=p.ErrorBody.of(error), re=re)))

    async def _do(self, socket: ServerConnection, command: p.Command) -> None:
        match command:
            case p.SessionCreate():
                session = ScriptedSession(f"ses_{next(self._ids)}", command.title or "", command.system)
                session.params = command.params
                session.context_policy = command.context_policy or "refuse"
                session.items += [self._item(m.role, m.content, session) for m in command.messages]
                self.sessions[session.id] = session
                await self._join(socket, session, "writer")
                await self._reply(socket, p.SessionCreated(session=session.info(self.model), re=command.id), command)
            case p.SessionAttach():
                await self._attach(socket, command)
            case p.SessionList():
                await self._reply(socket, self._listed(command))
            case p.SessionGet():
                session = self._find(command.session)
                await self._reply(
                    socket, p.SessionGot(session=session.info(self.model), items=session.path(), re=command.id)
                )
            case p.SessionUpdate():
                session = self._find(command.session)
                session.update(command)
                updated = p.SessionUpdated(
                    session=session.id, seq=0, ts=NOW, info=session.info(self.model), re=command.id
                )
                await self._emit(session, updated)
            case p.SessionDetach():
                await self._leave(socket, command.session)
                await self._reply(socket, p.SessionDetached(session=command.session, re=command.id))
            case p.SessionClose():
                session = self._find(command.session)
                closed = p.SessionClosed(session=session.id, blocks=7, shared_blocks=2)
                await self._broadcast(session, closed)
                await self._reply(socket, msgspec.structs.replace(closed, re=command.id))
                for attached in self._attached.values():
                    attached.discard(session.id)
            case p.SessionErase():
                session = self._find(command.session)
                del self.sessions[session.id]
                receipt = p.EraseReceipt(
                    messages=len(session.items),
                    shared_messages=0,
                    tokens=100,
                    blocks=7,
                    host_blocks=0,
                    disk_blocks=0,
                    journal_bytes=4000,
                )
                await self._broadcast(session, p.SessionErased(session=session.id, receipt=receipt, re=command.id))
            case p.Prefill():
                session = self._find(command.session)
                tokens = len(command.content or "") // 4
                for re in (command.id, None):
                    state = p.PrefillState(session=session.id, tokens=tokens, computed=re is None, re=re)
                    await self._reply(socket, state)
            case p.SessionFork():
                created = self._fork(command)
                await self._join(socket, self.sessions[created.session.id], "writer")
                await self._reply(socket, created, command)
            case p.UserMessage() | p.MessageEdit():
                await self._user_message(command)
            case p.ResponseRegenerate() | p.ResponseContinue():
                await self._regenerate(command)
            case p.BranchSelect():
                session = self._free(command.session)
                parent, items = session.select(command.leaf)
                selected = p.BranchSelected(
                    session=session.id, seq=0, ts=NOW, leaf=command.leaf, items=items, parent=parent, re=command.id
                )
                self._answers[command.id or ""] = await self._emit(session, selected)
            case p.ResponseCancel():
                session = self._find(command.session)
                if session.response is None:
                    raise Conflict("no answer is in progress", code="nothing_to_cancel")
                session.cancelled = True
                self._permits.release()
            case p.PoolSubscribe():
                self._pool_wishes[socket] = command
                await self._reply(socket, self._pool_snapshot(command))
            case p.PoolInspect():
                await self._reply(socket, self._inspected(command))
            case p.PoolUnsubscribe():
                self._pool_wishes.pop(socket, None)
                await self._reply(socket, p.PoolUnsubscribed(re=command.id))
            case p.Ping():
                await self._reply(socket, p.Pong(t=command.t, re=command.id))

    async def _attach(self, socket: ServerConnection, command: p.SessionAttach) -> None:
        session = self._find(command.session)
        await self._join(socket, session, command.role)
        first = session.ring[0].seq if session.ring else session.seq + 1  # type: ignore[union-attr]
        after = command.after_seq
        if after is not None and command.boot == self.boot and first <= after + 1 <= session.seq + 1:
            await self._reply(
                socket, p.SessionAttached(session=session.id, head_seq=session.seq, replay="exact", re=command.id)
            )
            for event in session.ring:
                if event.seq > after:  # type: ignore[union-attr]
                    await self._send(socket, p.encode(event))
            return
        snapshot = session.snapshot(self.model) if command.history != "none" else None
        await self._reply(
            socket,
            p.SessionAttached(
                session=session.id, head_seq=session.seq, replay="snapshot", snapshot=snapshot, re=command.id
            ),
        )

    async def _join(self, socket: ServerConnection, session: ScriptedSession, role: p.AttachRole) -> None:
        """Attach a connection; the others are told."""
        name = str(socket.id)
        if session.roles.get(name) != role:
            self._attached[socket].discard(session.id)
            await self._broadcast(session, p.ClientAttached(session=session.id, connection=name, role=role))
        session.roles[name] = role
        self._attached[socket].add(session.id)

    async def _leave(self, socket: ServerConnection, ident: str) -> None:
        """Detach a connection; the others are told."""
        self._attached[socket].discard(ident)
        session = self.sessions.get(ident)
        if session is not None and session.roles.pop(str(socket.id), None) is not None:
            await self._broadcast(session, p.ClientLeft(session=ident, connection=str(socket.id)))

    def _blocks_per_cell(self) -> int:
        return -(-self.totals.blocks // max(1, len(self.cells)))

    def _inspected(self, command: p.PoolInspect) -> p.PoolInspected:
        size = command.blocks_per_cell
        return p.PoolInspected(
            cell=command.cell,
            blocks_per_cell=command.blocks_per_cell,
            blocks=self.blocks.get(command.cell, []),
            left_out=max(0, min(size, self.totals.blocks - command.cell * size) - 64),
            re=command.id,
        )

    def _tenants(self) -> list[p.TenantBlocks]:
        totals = self.totals
        return self.tenants or [
            p.TenantBlocks(
                tenant="local",
                active=totals.active,
                cached=totals.cached,
                running=totals.running,
                waiting=totals.waiting,
                weight=1.0,
                share=float(totals.blocks),
                floor=0,
                evicted=totals.evictions,
                wanted_again=totals.wanted_again,
            )
        ]

    def _session_blocks(self) -> list[p.SessionBlocks]:
        infos = [session.info(self.model) for session in self.sessions.values()]
        return [
            p.SessionBlocks(
                session=info.id,
                title=info.title,
                held=-(-info.context_used // 16),
                shared=min(4, info.context_used // 16),
                tokens=info.context_used,
                tier=info.tier,
                active=info.busy,
                bill=-(-info.context_used // 16) - min(4, info.context_used // 16) / 2,
                lease="answering" if info.busy else "idle",
                idle_s=0.0 if info.busy else 90.0,
                tenant="local",
            )
            for info in infos
        ]

    def _pool_snapshot(self, wish: p.PoolSubscribe) -> p.PoolSnapshot:
        return p.PoolSnapshot(
            step=self._step,
            totals=self.totals,
            tenants=self._tenants(),
            sessions=self._session_blocks() if wish.detail != "summary" else None,
            cells=p.Cells(count=len(self.cells), blocks_per_cell=self._blocks_per_cell(), data=p.pack_cells(self.cells))
            if wish.detail == "map"
            else None,
            re=wish.id,
        )

    async def _broadcast(self, session: ScriptedSession, event: p.Event) -> None:
        for socket, attached in list(self._attached.items()):
            if session.id in attached:
                await self._send(socket, p.encode(event))

    async def _reply(self, socket: ServerConnection, event: p.Event, command: p.Command | None = None) -> None:
        if command is not None and command.id is not None:
            self._answers[command.id] = event
        await self._send(socket, p.encode(event))

    async def _send(self, socket: ServerConnection, text: str) -> None:
        with contextlib.suppress(ConnectionClosed):
            for frame in self.rewrite(text):
                await socket.send(frame)


def _response(socket: ServerConnection, status: HTTPStatus, body: bytes) -> Response:
    response = socket.respond(status, body.decode())
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    return response


def merged(deltas: Iterable[p.OutputTextDelta]) -> p.OutputTextDelta:
    """Merge adjacent deltas as a lagging connection's writer does."""
    first, *rest = deltas
    if not rest:
        return first
    every = [first, *rest]
    if len({delta.item_id for delta in every}) != 1:
        raise InvalidRequest("only deltas of one item merge")
    return msgspec.structs.replace(
        rest[-1],
        delta="".join(delta.delta for delta in every),
        n_tokens=sum(delta.n_tokens for delta in every),
        seq_from=first.seq,
    )
