"""A daemon that speaks chatd.v1 from a script: no model, no engine. For tests and measurements of clients.

It keeps sessions with exact `seq`s and a replay ring, answers a repeated command id once, and can misbehave on
request: drop connections, restart with another `boot`, forget its ring, send any frame. Answers come from scripts;
with `manual` each delta waits for `release`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from chatd import protocol as p
from chatd.errors import ChatdError, Conflict, InvalidRequest, NotFound
from chatd.testing.scripted_session import NOW, ScriptedSession

Counts = tuple[int, int, int, int]


@dataclass(frozen=True)
class Script:
    """One answer.

    Attributes:
        deltas: Its pieces.
        before: State events to send first, without a session (it is filled in).
        delay_s: Before each piece.
        manual: Each piece waits for `ScriptedDaemon.release`.
        fail: Ends the turn with this error instead of a completion.
    """

    deltas: Sequence[str] = ("Hello", ".")
    before: Sequence[tuple[type[Any], dict[str, Any]]] = ()
    delay_s: float = 0.0
    manual: bool = False
    fail: ChatdError | None = None


class ScriptedDaemon:
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
        caps: Sequence[str] = ("fork", "branch", "pool.map"),
        frame_bytes: int = p.MIN_FRAME_BYTES,
        port: int = 0,
    ) -> None:
        self.model = p.ModelInfo(id="smollm2-135m", context=8192, block_size=16, blocks=256)
        self.boot = "boot-1"
        self.sessions: dict[str, ScriptedSession] = {}
        self.commands: list[p.Command] = []
        self.num_connections = 0
        self.refuse: tuple[HTTPStatus, bytes] | None = None
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
        )
        self.cells: list[Counts] = []
        self._scripts = list(scripts)
        self._num_answers = 0
        self._key = key
        self._caps = list(caps)
        self._frame_bytes = frame_bytes
        self._port = port
        self._ids = itertools.count(1)
        self._clock = itertools.count(1)
        self._answers: dict[str, p.Event] = {}
        self._attached: dict[ServerConnection, set[str]] = {}
        self._pool_wishes: dict[ServerConnection, p.PoolSubscribe] = {}
        self._step = 0
        self._permits = asyncio.Semaphore(0)
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
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        tasks = [session.task for session in self.sessions.values() if session.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    # What a test makes it do.

    def release(self, deltas: int = 1) -> None:
        """Let a manual answer go on by this many pieces (its end counts as one)."""
        for _ in range(deltas):
            self._permits.release()

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
            await socket.send(
                p.encode(
                    p.Hello(
                        protocol=p.SUBPROTOCOL,
                        server="0.1.0",
                        boot=self.boot,
                        connection=f"con_{self.num_connections}",
                        tenant="local",
                        user="local",
                        model=self.model,
                        caps=self._caps,
                        limits=p.Limits(
                            frame_bytes=self._frame_bytes, sessions=64, inflight=8, replay_events=8192, replay_ttl_s=300
                        ),
                        heartbeat_s=20,
                    )
                )
            )
            async for text in socket:
                await self._receive(socket, text)
        except ConnectionClosed:
            pass
        finally:
            self._attached.pop(socket, None)
            self._pool_wishes.pop(socket, None)

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
                session.items += [self._item(m.role, m.content, session) for m in command.messages]
                self.sessions[session.id] = session
                self._attached[socket].add(session.id)
                await self._reply(socket, p.SessionCreated(session=session.info(self.model), re=command.id), command)
            case p.SessionAttach():
                await self._attach(socket, command)
            case p.SessionList():
                start = int(command.cursor or 0)
                found = [s for s in self.sessions.values() if s.archived == command.archived and _has(s, command.query)]
                infos = [s.info(self.model) for s in found]
                infos.sort(key=lambda info: -info.updated_at)
                end = start + command.limit
                await self._reply(
                    socket,
                    p.SessionListed(
                        sessions=infos[start:end], next_cursor=str(end) if end < len(infos) else None, re=command.id
                    ),
                )
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
                self._attached[socket].discard(command.session)
                await self._reply(socket, p.SessionDetached(session=command.session, re=command.id))
            case p.SessionClose():
                session = self._find(command.session)
                await self._broadcast(session, p.SessionClosed(session=session.id, re=command.id))
            case p.SessionFork():
                await self._fork(socket, command)
            case p.UserMessage() | p.MessageEdit():
                await self._user_message(command)
            case p.ResponseRegenerate():
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
            case p.PoolUnsubscribe():
                self._pool_wishes.pop(socket, None)
                await self._reply(socket, p.PoolUnsubscribed(re=command.id))
            case p.Ping():
                await self._reply(socket, p.Pong(t=command.t, re=command.id))

    async def _attach(self, socket: ServerConnection, command: p.SessionAttach) -> None:
        session = self._find(command.session)
        self._attached[socket].add(session.id)
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

    async def _fork(self, socket: ServerConnection, command: p.SessionFork) -> None:
        origin = self._find(command.session)
        fork = ScriptedSession(f"ses_{next(self._ids)}", command.title or origin.title, origin.system)
        fork.params = origin.params
        at = command.at or (origin.items[-1].id if origin.items else None)
        for item in origin.items:
            fork.items.append(self._item(item.role, item.content, fork))
            if item.id == at:
                break
        else:
            raise NotFound(f"item {at!r} is not known", code="not_found")
        self.sessions[fork.id] = fork
        self._attached[socket].add(fork.id)
        used = fork.info(self.model).context_used
        created = p.SessionCreated(
            session=fork.info(self.model),
            shared_tokens=used,
            shared_blocks=-(-used // self.model.block_size),
            copies_on_write=int(used % self.model.block_size > 0),
            re=command.id,
        )
        await self._reply(socket, created, command)

    async def _user_message(self, command: p.UserMessage | p.MessageEdit) -> None:
        session = self._free(command.session)
        item = self._item("user", command.content, session)
        if isinstance(command, p.MessageEdit):
            item = msgspec.structs.replace(item, parent=session.node(command.item).parent)
        shown = list(session.items)
        session.put(item)
        if not session.title:
            session.title = command.content[:40]
        added = p.ItemAdded(session=session.id, seq=0, ts=NOW, item=session.with_siblings(item), re=command.id)
        self._answers[command.id or ""] = await self._emit(session, added)
        self._begin(session, item, shown)

    async def _regenerate(self, command: p.ResponseRegenerate) -> None:
        session = self._free(command.session)
        target = session.node(command.item) if command.item else session.items[-1]
        asked = target if target.role == "user" else session.node(target.parent or "")
        shown = list(session.items)
        self._begin(session, asked, shown, re=command.id)

    def _free(self, ident: str) -> ScriptedSession:
        session = self._find(ident)
        if session.response is not None:
            raise Conflict("an answer is in progress in this session", code="turn_in_progress")
        return session

    def _begin(
        self, session: ScriptedSession, asked: p.Item, shown: Sequence[p.Item], *, re: str | None = None
    ) -> None:
        """Answer a message by the next script; `shown` is back if that fails."""
        session.response = f"res_{next(self._ids)}"
        session.cancelled = False
        script = self._scripts[min(self._num_answers, len(self._scripts) - 1)]
        self._num_answers += 1
        work = self._respond(session, script, asked, shown, re)
        session.task = asyncio.get_running_loop().create_task(work)

    async def _respond(
        self, session: ScriptedSession, script: Script, asked: p.Item, shown: Sequence[p.Item], re: str | None
    ) -> None:
        response = session.response or ""
        for kind, fields in script.before:
            await self._broadcast(session, kind(session=session.id, **fields))
        item = p.Item(id=f"itm_{next(self._ids)}", role="assistant", content="", status="in_progress", parent=asked.id)
        session.put(item)
        item = session.with_siblings(item)
        created = p.ResponseCreated(session=session.id, seq=0, ts=NOW, response=response, item=item, re=re)
        stamped = await self._emit(session, created)
        if re is not None:
            self._answers[re] = stamped
        for delta in script.deltas:
            await self._pace(script)
            if session.cancelled:
                break
            item = msgspec.structs.replace(item, content=item.content + delta)
            session.put(item)
            event = p.OutputTextDelta(session=session.id, seq=0, ts=NOW, item_id=item.id, delta=delta, n_tokens=1)
            await self._emit(session, event)
        else:
            await self._pace(script)
        session.response = None
        if script.fail is not None:
            await self._fail(session, item, shown, response, script.fail, re)
            return
        await self._complete(session, item, response, len(script.deltas))

    async def _fail(
        self,
        session: ScriptedSession,
        item: p.Item,
        shown: Sequence[p.Item],
        response: str,
        error: ChatdError,
        re: str | None,
    ) -> None:
        """Take a turn back: its answer and, unless it was an answer again, its message."""
        session.remove(item)
        asked = session.items[-1]
        if re is None:
            session.remove(asked)
        parent = asked.id if re is not None else asked.parent
        failed = p.ResponseFailed(
            session=session.id,
            seq=0,
            ts=NOW,
            response=response,
            item_id=item.id,
            error=p.ErrorBody.of(error),
            parent=parent,
        )
        await self._emit(session, failed)
        if [other.id for other in shown] != [other.id for other in session.items]:
            parent, items = session.select(shown[-1].id)
            selected = p.BranchSelected(
                session=session.id, seq=0, ts=NOW, leaf=shown[-1].id, items=items, parent=parent
            )
            await self._emit(session, selected)

    async def _complete(self, session: ScriptedSession, item: p.Item, response: str, num_tokens: int) -> None:
        usage = p.Usage.of(64, 48, num_tokens)
        timings = p.Timings(queue_ms=1.0, ttft_ms=120.0, prefill_tok_s=400.0, decode_tok_s=38.0, preemptions=0)
        reason = "cancelled" if session.cancelled else "stop"
        status: p.ItemStatus = "incomplete" if session.cancelled else "completed"
        item = msgspec.structs.replace(item, status=status, reason=reason, usage=usage, timings=timings)
        session.put(item)
        common: dict[str, Any] = {
            "session": session.id,
            "seq": 0,
            "ts": NOW,
            "response": response,
            "item": item,
            "reason": reason,
            "usage": usage,
            "timings": timings,
        }
        await self._emit(
            session, p.ResponseIncomplete(**common) if session.cancelled else p.ResponseCompleted(**common)
        )
        used = session.info(self.model).context_used
        await self._broadcast(
            session,
            p.SessionUsage(
                session=session.id,
                context_used=used,
                context_max=self.model.context,
                blocks_held=-(-used // self.model.block_size),
                blocks_shared=4,
            ),
        )

    async def _pace(self, script: Script) -> None:
        if script.manual:
            await self._permits.acquire()
        elif script.delay_s:
            await asyncio.sleep(script.delay_s)

    def _item(self, role: p.Role, content: str, session: ScriptedSession, status: p.ItemStatus = "completed") -> p.Item:
        parent = session.items[-1].id if session.items else None
        return p.Item(id=f"itm_{next(self._ids)}", role=role, content=content, status=status, parent=parent)

    def _find(self, ident: str) -> ScriptedSession:
        session = self.sessions.get(ident)
        if session is None:
            raise NotFound(f"session {ident!r} is not known", code="session_not_found")
        return session

    def _blocks_per_cell(self) -> int:
        return -(-self.totals.blocks // max(1, len(self.cells)))

    def _tenants(self) -> list[p.TenantBlocks]:
        totals = self.totals
        return [
            p.TenantBlocks(
                tenant="local",
                active=totals.active,
                cached=totals.cached,
                running=totals.running,
                waiting=totals.waiting,
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

    async def _emit(self, session: ScriptedSession, event: Any) -> p.Event:
        """Give a transcript event its `seq`, keep it for replay and send it; `re` stays with the sender."""
        session.seq += 1
        session.touched = next(self._clock)
        stamped: p.Event = msgspec.structs.replace(event, seq=session.seq)
        session.ring.append(
            msgspec.structs.replace(event, seq=session.seq, re=None) if hasattr(event, "re") else stamped
        )
        await self._broadcast(session, stamped)
        return stamped

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
            await socket.send(text)


def _has(session: ScriptedSession, query: str | None) -> bool:
    texts = [session.title, *(item.content for item in session.items)]
    return query is None or any(query.lower() in text.lower() for text in texts)


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
