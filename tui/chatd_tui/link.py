"""Between the daemon and the screens: runs the client and turns what it brings into messages. No widgets here."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from chatd.client import Client, ConnectionPhase, ConnectionState, FoundSession, Session
from chatd.config import Server
from chatd.errors import ChatdError, InvalidRequest, NotFound
from chatd.protocol import (
    AttachRole,
    ClientAttached,
    ClientLeft,
    ContextPolicy,
    EraseReceipt,
    Event,
    Hello,
    Item,
    Params,
    PoolInspected,
    SessionAttached,
    SessionCreated,
    SessionInfo,
)
from chatd.titles import title_of
from chatd_tui.messages import (
    ConnectionChanged,
    DaemonNews,
    Noticed,
    PoolChanged,
    Refused,
    SessionLost,
    SessionNews,
    SessionOpened,
    SessionsListed,
)

METER_HZ = 1.0
PAGE_HZ = 4.0
KEY_POLL_S = 1.0
"""How often a key that a daemon refused is looked at: a daemon that is started writes a new one."""


def not_connected() -> InvalidRequest:
    """Return the refusal of what needs a daemon, before there is one."""
    return InvalidRequest("there is no connection to the daemon yet", code="not_connected")


@dataclass(frozen=True)
class Draft:
    """What a conversation begins with that the daemon does not have yet."""

    title: str | None = None
    system: str | None = None
    params: Params = field(default_factory=Params)
    context_policy: ContextPolicy | None = None


class DaemonLink:
    """One person's connection to one daemon, with at most one session on the screen.

    Args:
        server: Which daemon, and where its key is.
        post: Takes every message, in the event loop.
        is_shown: Whether it is on the screen, where there are others.

    Attributes:
        name: Of the daemon among others.
        url: Where it listens.
        draft: What the next new session begins with.
    """

    def __init__(self, server: Server, post: Callable[[DaemonNews], object], *, is_shown: bool = True) -> None:
        self.name = server.name
        self.url = server.url
        self.draft = Draft()
        self._read_key = server.read_key
        self._take = post
        self._client: Client | None = None
        self._session: str | None = None
        self._role: AttachRole = "writer"
        self._is_shown = is_shown
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._connected = asyncio.Event()
        self._again = asyncio.Event()
        self._connections: set[str] = set()

    @property
    def session(self) -> str | None:
        """The session on the screen; None is one that is not created yet."""
        return self._session

    @property
    def role(self) -> AttachRole:
        """Whether the session on the screen is only watched."""
        return self._role

    @property
    def info(self) -> SessionInfo | None:
        """The session on the screen as the daemon last described it."""
        session = self._client.session(self._session) if self._client is not None and self._session else None
        return session.info if session is not None else None

    @property
    def hello(self) -> Hello | None:
        """What the daemon said of itself, once it did."""
        return self._client.hello if self._client is not None and self._connected.is_set() else None

    async def run(self) -> None:
        """Stay connected until cancelled. What refused for good is tried again when asked to, or with another key."""
        try:
            while True:
                self._again.clear()
                key: str | None = None
                try:
                    key = await asyncio.to_thread(self._read_key)
                    await self._stay_connected(key)
                except ChatdError as error:
                    self._connected.clear()
                    await self.stop()
                    self._on_state(ConnectionState(ConnectionPhase.CLOSED, error=error))
                await self._worth_another_try(key)
        finally:
            self._connected.clear()
            await self.stop()

    async def _stay_connected(self, key: str | None) -> None:
        client = Client(self.url, key=key, wait_s=math.inf, on_state=self._on_state, on_notice=self._on_notice)
        self._client = client
        async with client:
            self._connected.set()
            self._on_state(client.state)
            if self._is_shown:
                self._start("meter", self._watch_pool(METER_HZ, "summary", 1024))
            if self._session is not None:
                self._start("follow", self._follow(self._session))
            await client.wait_refused()

    async def _worth_another_try(self, key: str | None) -> None:
        while not self._again.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), KEY_POLL_S)
            with contextlib.suppress(ChatdError):
                if await asyncio.to_thread(self._read_key) != key:
                    return

    async def stop(self) -> None:
        """End every task of this link."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def show(self) -> None:
        """Come to the screen."""
        self._is_shown = True
        if self._connected.is_set():
            self._start("meter", self._watch_pool(METER_HZ, "summary", 1024))

    async def hide(self) -> None:
        """Leave the screen: what is not shown follows no session and no pool."""
        self._is_shown = False
        await self.open(None)
        await self._end("meter")
        await self._end("page")

    # What the person does.

    async def open(self, session: str | None, role: AttachRole = "writer") -> None:
        """Show another session, or a new one that is created with its first message.

        Waits for nothing of the daemon, which may be away: the keyboard stays alive.
        """
        client = self._client
        left, self._session = self._session, session
        self._role = role
        self.draft = Draft()
        await self._end("follow")
        if client is None:
            return
        if left is not None and left != session:
            self._start(f"leave {left}", self._leave(client, left))
        if session is not None:
            self._start("follow", self._follow(session))
        self._start("list", self.refresh_sessions())

    def send(self, text: str) -> None:
        """Say something in the session on the screen."""
        self._start("send", self._send(text))

    async def edit(self, item: str, text: str) -> None:
        """Put another message of the user's beside `item`, and have it answered."""
        await (await self._attached()).edit(item, text).send()

    async def regenerate(self, item: str | None, params: Params | None) -> None:
        """Have another answer beside `item`, else beside the last one."""
        await (await self._attached()).regenerate(item, params=params).send()

    async def go_on(self, item: str | None) -> None:
        """Go on from an answer that was cut short, `item` or the last one."""
        await (await self._attached()).continue_(item).send()

    async def erase(self) -> EraseReceipt:
        """Remove the session on the screen and everything that was kept of it."""
        session = (await self._attached()).id
        receipt = await self._connected_client().erase_session(session)
        if self._session == session:
            self._session = None
        return receipt

    async def close(self) -> None:
        """Release what the daemon's memory has of the session on the screen; its text stays."""
        await self._connected_client().close_session((await self._attached()).id)

    def type_ahead(self, text: str | None, after_s: float) -> None:
        """Have what is typed computed ahead, unless more is typed before `after_s` are over; None takes it back."""
        self._start("type-ahead", self._type_ahead(text, after_s))

    async def _type_ahead(self, text: str | None, after_s: float) -> None:
        await asyncio.sleep(after_s)
        # It is refused where the message would be, and then that tells why.
        with contextlib.suppress(ChatdError):
            if self._session is not None and self._role == "writer":
                await (await self._attached()).prefill(text)

    async def select_branch(self, leaf: str) -> None:
        """Show the branch that ends at a message."""
        await (await self._attached()).select_branch(leaf)

    async def fork(self, at: str | None, title: str | None) -> SessionCreated:
        """Make a session with the messages up to `at`; it is not shown yet."""
        session, client = await self._attached(), self._connected_client()
        forked = await client.fork_session(session.id, at=at, title=title)
        assert forked.created is not None
        return forked.created

    async def update(self, **changes: Any) -> SessionInfo:
        """Change the session on the screen; arguments as for `Client.update_session`."""
        return await self._connected_client().update_session((await self._attached()).id, **changes)

    async def history(self) -> tuple[SessionInfo, list[Item]]:
        """Return all of the session on the screen."""
        return await self._connected_client().get_session((await self._attached()).id)

    async def search(self, query: str) -> list[FoundSession]:
        """Return the sessions in which a text is and where it is, the archived ones last."""
        client = self._connected_client()
        found = await client.search_sessions(query, limit=100)
        return found + await client.search_sessions(query, limit=100, archived=True)

    def cancel(self) -> None:
        """End the answer in progress."""
        if self._session is not None:
            self._start("cancel", self._cancel(self._session))

    def watch_page(self, cells: int | None) -> None:
        """Ask for the pool page's detail: a map of `cells` cells, or sessions only for None."""
        self._start("page", self._watch_pool(PAGE_HZ, "sessions" if cells is None else "map", cells or 1024))

    async def inspect_cell(self, cell: int, blocks_per_cell: int) -> PoolInspected:
        """Return what is in a cell of the pool's map now."""
        return await self._connected_client().inspect_cell(cell, blocks_per_cell)

    async def unwatch_page(self) -> None:
        """Ask for the meter's detail only."""
        await self._end("page")

    async def refresh_sessions(self) -> None:
        """Read the list of sessions again."""
        if self._client is None or not self._connected.is_set():
            return
        try:
            self._post(SessionsListed(await self._client.list_sessions(limit=100)))
        except ChatdError as error:
            self._post(Refused(error))

    def refresh_soon(self) -> None:
        """Read the list of sessions again, and wait for nothing."""
        self._start("list", self.refresh_sessions())

    def retry_now(self) -> None:
        """Try to connect at once."""
        self._again.set()
        if self._client is not None:
            self._client.retry_now()

    # Tasks.

    def _post(self, message: DaemonNews) -> None:
        message.server = self.name
        self._take(message)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as the one task of this name, in place of the one before it."""
        before = self._tasks.get(name)
        if before is not None:
            before.cancel()
        task = asyncio.get_running_loop().create_task(work, name=f"chatd-tui {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._tasks.pop(name, None) if self._tasks.get(name) is done else None)

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _connected_client(self) -> Client:
        if self._client is None or not self._connected.is_set():
            raise not_connected()
        return self._client

    async def _attached(self) -> Session:
        client = self._connected_client()
        if self._session is None:
            raise InvalidRequest("this conversation has no messages yet", code="no_session")
        return client.session(self._session) or await client.attach(self._session, role=self._role)

    async def _send(self, text: str) -> None:
        try:
            client = self._connected_client()
            if self._session is None:
                draft = self.draft
                session = await client.create_session(
                    title=draft.title or title_of(text),
                    system=draft.system,
                    params=draft.params,
                    context_policy=draft.context_policy,
                )
                self._session = session.id
                self._start("follow", self._follow(session.id))
            else:
                session = await self._attached()
            await session.send(text)
        except ChatdError as error:
            self._post(Refused(error, text))
            return
        await self.refresh_sessions()

    async def _cancel(self, session: str) -> None:
        try:
            assert self._client is not None
            await self._client.cancel(session)
        except ChatdError as error:
            self._post(Refused(error))

    async def _leave(self, client: Client, session: str) -> None:
        with contextlib.suppress(ChatdError):
            await client.detach(session)

    async def _follow(self, session: str) -> None:
        assert self._client is not None
        leaving = self._tasks.get(f"leave {session}")
        if leaving is not None:
            # It would end what begins here.
            await asyncio.wait([leaving])
        try:
            async for event in self._client.follow(session, role=self._role):
                if isinstance(event, SessionAttached):
                    self._post(SessionOpened(event))
                elif isinstance(event, ClientAttached | ClientLeft) and event.connection in self._connections:
                    continue  # Of a connection that was lost here the daemon may hear later.
                else:
                    self._post(SessionNews(session, event))
        except ChatdError as error:
            if isinstance(error, NotFound) and self._session == session and error.error_code != "erased":
                self._session = None
                self._post(SessionLost(session))
                error = NotFound(
                    "the daemon no longer has this conversation",
                    code=error.error_code,
                    hint="the next message begins a new one",
                )
            if error.error_code == "erased":
                if self._session == session:
                    self._session = None
                    self._post(SessionLost(session, is_erased=True))
                await self.refresh_sessions()
            elif error.error_code not in ("detached", "client_closed"):
                self._post(Refused(error))

    async def _watch_pool(self, hz: float, detail: Any, cells: int) -> None:
        assert self._client is not None
        while True:
            try:
                async for state in self._client.pool(hz=hz, detail=detail, cells=cells):
                    self._post(PoolChanged(state))
            except ChatdError as error:
                # A tenant may watch once a second at most; then the page is as fast as the meter.
                if hz <= METER_HZ or error.error_code == "client_closed":
                    return
                hz = METER_HZ

    def _on_state(self, state: ConnectionState) -> None:
        self._post(ConnectionChanged(state, self.hello))
        if state.phase is ConnectionPhase.CONNECTED and self.hello is not None:
            self._connections.add(self.hello.connection)
            # Others may have changed the list meanwhile, or the daemon is another one.
            self._start("list", self.refresh_sessions())

    def _on_notice(self, event: Event) -> None:
        self._post(Noticed(event))
