"""The async client of chatd.v1: sessions that survive a lost connection. Websockets and msgspec only.

```python
async with Client.connect("http://127.0.0.1:8790", key=key) as client:
    session = await client.create_session(system="Be brief.")
    async for text in session.stream("What is a KV cache?"):
        print(text, end="", flush=True)
```

One task reads the socket and hands each event to whoever asked for it; when the connection is lost it comes back with
`after_seq` and `boot`, so that an answer goes on where it stopped, without a gap or a duplicate. Commands that were
not answered yet are sent again under the same id, which the daemon answers once. Errors are the classes of
`chatd.errors`. What the daemon knows that this version does not is ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chatd.client.link import Connection
from chatd.client.pool import Detail, PoolReader, PoolState, combined
from chatd.client.session import Session, new_id
from chatd.errors import ChatdError
from chatd.protocol import (
    AttachRole,
    ContextPolicy,
    EraseReceipt,
    Event,
    HistoryScope,
    Item,
    Message,
    Params,
    Passage,
    Ping,
    Pong,
    PoolInspect,
    PoolInspected,
    PoolSnapshot,
    PoolSubscribe,
    PoolUnsubscribe,
    SessionAttach,
    SessionAttached,
    SessionClose,
    SessionClosed,
    SessionCreate,
    SessionCreated,
    SessionErase,
    SessionErased,
    SessionFork,
    SessionGet,
    SessionGot,
    SessionInfo,
    SessionList,
    SessionListed,
    SessionUpdate,
    SessionUpdated,
)


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session that a search found.

    Attributes:
        info: The session.
        passage: The message that has it, and where; None where only the title does, or the daemon does not say.
    """

    info: SessionInfo
    passage: Passage | None


class Client(Connection):
    """A connection to one daemon, for any number of sessions; an async context manager.

    Args:
        url: Of the daemon, such as "http://127.0.0.1:8790".
        key: Sent as a bearer token; None sends none.
        wait_s: How long to go on trying at first while nothing answers or the daemon still loads. Later losses are
            repaired for as long as the client is open.
        on_state: Called, in the event loop, with each change of the connection.
        on_notice: Called with events that belong to no session and no command (draining, rate limits, errors).
        open_timeout_s: For one try, the daemon's first frame included.
        backoff: Seconds to wait before try number n.
        allow_plaintext: Send the key to another machine even over http, which is refused otherwise.

    Raises:
        ChatdError: On entry, if the daemon refuses or does not answer.
    """

    @classmethod
    def connect(cls, url: str, *, key: str | None = None, **options: Any) -> Client:
        """Return a client to enter with `async with`; arguments as for the class."""
        return cls(url, key=key, **options)

    # Commands.

    async def create_session(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        params: Params | None = None,
        title: str | None = None,
        metadata: dict[str, str] | None = None,
        context_policy: ContextPolicy | None = None,
    ) -> Session:
        """Open a session and attach to it as a writer."""
        command = SessionCreate(
            id=new_id(),
            system=system,
            messages=tuple(messages),
            params=params or Params(),
            title=title,
            metadata=metadata or {},
            context_policy=context_policy,
        )
        return await self._created(command)

    async def fork_session(self, session: str, *, at: str | None = None, title: str | None = None) -> Session:
        """Open a session with the messages of another one, up to the message `at`, and attach to it as a writer.

        `Session.created` says what KV the two share.
        """
        return await self._created(SessionFork(id=new_id(), session=session, at=at, title=title))

    async def _created(self, command: SessionCreate | SessionFork) -> Session:
        """Send what makes a session, and return that."""
        created, num_sends = await self._ask(command, SessionCreated)
        if num_sends > 1:
            # Another connection may have made it, and then this one is not attached.
            await self.attach(created.session.id, history="none")
        session = self._sessions[created.session.id]
        session.created = created
        return session

    async def attach(self, session: str, *, role: AttachRole = "writer", history: HistoryScope = "full") -> Session:
        """Attach to a session that exists; its messages are then in `Session.snapshot`."""
        command = SessionAttach(id=new_id(), session=session, role=role, history=history)
        await self._ask(command, SessionAttached, session=session)
        return self._sessions[session]

    async def follow(
        self, session: str, *, role: AttachRole = "writer", history: HistoryScope = "full"
    ) -> AsyncIterator[Event]:
        """Attach and yield all of a session's events: first `SessionAttached` with its snapshot, then what happens.

        After a lost connection nothing is missing; where the daemon no longer has the missed events, another
        `SessionAttached` replaces what was shown.
        """
        target = self._sessions.get(session) or Session(self, session)
        with target._listen() as queue:
            command = SessionAttach(id=new_id(), session=session, role=role, history=history)
            self._sessions[session] = target
            target._role, target._history = role, history
            try:
                await self._ask(command, SessionAttached, session=session)
            except ChatdError:
                if not target._attached:
                    self._sessions.pop(session, None)
                raise
            while True:
                yield await queue.get()

    def session(self, session: str) -> Session | None:
        """Return a session that this client is attached to."""
        return self._sessions.get(session)

    async def detach(self, session: str) -> None:
        """Receive no more of a session's events."""
        if session in self._sessions:
            await self._sessions[session].detach()

    async def close_session(self, session: str) -> SessionClosed:
        """Release the session's KV in the daemon, and return how much that was; its text stays.

        Everybody is detached from it.
        """
        closed, _ = await self._ask(SessionClose(id=new_id(), session=session), SessionClosed)
        return closed

    async def erase_session(self, session: str) -> EraseReceipt:
        """Remove the session and everything that was kept of it, and return what that was."""
        erased, _ = await self._ask(SessionErase(id=new_id(), session=session), SessionErased)
        return erased.receipt

    async def list_sessions(
        self, *, limit: int = 50, query: str | None = None, archived: bool = False
    ) -> list[SessionInfo]:
        """Return one's own sessions, last used first, at most `limit`."""
        return [info async for page in self._pages(limit, query, archived) for info in page.sessions][:limit]

    async def search_sessions(self, query: str, *, limit: int = 50, archived: bool = False) -> list[FoundSession]:
        """Return one's own sessions that have a text, with the place where it is; last used first, at most `limit`."""
        pages = [page async for page in self._pages(limit, query, archived)]
        places = {passage.session: passage for page in pages for passage in reversed(page.passages)}
        sessions = [info for page in pages for info in page.sessions]
        return [FoundSession(info, places.get(info.id)) for info in sessions[:limit]]

    async def _pages(self, limit: int, query: str | None, archived: bool) -> AsyncIterator[SessionListed]:
        """Yield a list page by page, until there are `limit` sessions."""
        num_left, cursor = limit, None
        while num_left > 0:
            command = SessionList(id=new_id(), cursor=cursor, limit=min(200, num_left), query=query, archived=archived)
            page, _ = await self._ask(command, SessionListed)
            yield page
            num_left, cursor = num_left - len(page.sessions), page.next_cursor
            if cursor is None or not page.sessions:
                return

    async def get_session(self, session: str) -> tuple[SessionInfo, list[Item]]:
        """Return a session and its messages without attaching to it."""
        got, _ = await self._ask(SessionGet(id=new_id(), session=session), SessionGot)
        return got.session, got.items

    async def update_session(
        self,
        session: str,
        *,
        title: str | None = None,
        system: str | None = None,
        params: Params | None = None,
        archived: bool | None = None,
        pinned: bool | None = None,
        metadata: dict[str, str] | None = None,
        context_policy: ContextPolicy | None = None,
    ) -> SessionInfo:
        """Change what is named."""
        command = SessionUpdate(
            id=new_id(),
            session=session,
            title=title,
            system=system,
            params=params,
            archived=archived,
            pinned=pinned,
            metadata=metadata,
            context_policy=context_policy,
        )
        updated, _ = await self._ask(command, SessionUpdated)
        return updated.info

    async def cancel(self, session: str) -> None:
        """End the session's answer in progress and return when it has ended; what is there is kept."""
        # The end of the answer is what is waited for, and only those who are attached hear of it.
        target = self._sessions.get(session) or await self.attach(session, history="none")
        await target.cancel()

    async def ping(self) -> float:
        """Return the round trip in seconds."""
        loop = asyncio.get_running_loop()
        sent = loop.time()
        await self._ask(Ping(id=new_id(), t=sent), Pong)
        return loop.time() - sent

    async def pool(self, hz: float = 1.0, detail: Detail = "summary", cells: int = 1024) -> AsyncIterator[PoolState]:
        """Yield the pool's state `hz` times a second at most; a slow reader gets the latest, never a backlog.

        Several readers share one subscription, which is the finest of what they ask for.
        """
        reader = PoolReader(PoolSubscribe(id=new_id(), hz=hz, detail=detail, cells=cells))
        self._pool_readers.append(reader)
        try:
            await self._subscribe_pool()
            while True:
                yield await reader.get()
        finally:
            self._pool_readers.remove(reader)
            # The wire follows the readers that are left; nobody waits for that.
            if self._socket is not None:
                wish = combined([other.wish for other in self._pool_readers])
                self._spawn(wish or PoolUnsubscribe())

    async def inspect_cell(self, cell: int, blocks_per_cell: int = 1) -> PoolInspected:
        """Return what is in a cell of the map now; `blocks_per_cell` is what `PoolState.cells` has.

        For daemons that offer it (`"pool.inspect"` in `hello.caps`). A tenant among others is answered once a second.
        """
        command = PoolInspect(id=new_id(), cell=cell, blocks_per_cell=blocks_per_cell)
        inspected, _ = await self._ask(command, PoolInspected)
        return inspected

    async def _subscribe_pool(self) -> None:
        wish = combined([reader.wish for reader in self._pool_readers])
        if wish is not None:
            await self._ask(msgspec.structs.replace(wish, id=new_id()), PoolSnapshot)
