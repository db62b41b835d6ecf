"""The daemons that the terminal is connected to: what is known of each, and which one is on the screen.

Each has a link of its own, so that one that is away disturbs no other. Draws nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from chatd.clean import clean_line
from chatd.client import ConnectionPhase, ConnectionState, FoundSession
from chatd.config import Server
from chatd.errors import ChatdError
from chatd.protocol import AttachRole, Hello, SessionInfo
from chatd_tui import status_text
from chatd_tui.link import DaemonLink
from chatd_tui.messages import ConnectionChanged, DaemonNews
from chatd_tui.obstacles import obstacle
from chatd_tui.views import FoundRow, ServerPlace, ServerRow, SessionRow
from chatd_tui.widgets.welcome import WelcomeView

SEARCH_S = 5.0
"""How long a search waits for daemons that are not on the screen."""


class Daemon:
    """One daemon as it was last heard of.

    Attributes:
        link: To it.
        state: Of the connection.
        hello: What it said of itself, once it did.
        sessions: The person's, last used first.
        left: Its session that was on the screen when another daemon came there, and the role.
    """

    def __init__(self, server: Server, post: Callable[[DaemonNews], object], *, is_shown: bool) -> None:
        self.link = DaemonLink(server, post, is_shown=is_shown)
        self.state = ConnectionState(ConnectionPhase.CONNECTING)
        self.hello: Hello | None = None
        self.sessions: list[SessionInfo] = []
        self.left: tuple[str | None, AttachRole] = (None, "writer")

    @property
    def name(self) -> str:
        """Stands above its conversations."""
        return self.link.name

    @property
    def is_connected(self) -> bool:
        """Whether it can be told anything now."""
        return self.state.phase is ConnectionPhase.CONNECTED and self.hello is not None

    def note(self, session: SessionInfo) -> None:
        """Take another description of a session that is listed."""
        self.sessions = [session if info.id == session.id else info for info in self.sessions]

    def note_tier(self, session: str, tier: str) -> None:
        """Take where a session's KV is now."""
        moved = [info for info in self.sessions if info.id == session]
        if moved:
            self.note(msgspec.structs.replace(moved[0], tier=tier))

    def welcome(self, connect_key: str) -> WelcomeView:
        """Return what stands in place of a conversation that has no messages yet; a key connects at once."""
        view = WelcomeView(obstacle=obstacle(self.state, self.link.url, connect_key))
        if self.hello is None:
            return view
        model = self.hello.model
        return replace(
            view,
            model=clean_line(model.id, 60),
            context=model.context,
            blocks=model.blocks,
            block_size=model.block_size,
        )

    def place(self, *, is_shown: bool) -> ServerPlace:
        """Return it as a place to go to."""
        url, number = clean_line(self.link.url, 80), len(self.sessions)
        parts = [url] if self.name else []
        if self.hello is not None:
            parts += [clean_line(self.hello.model.id, 60), f"{number} conversation{'' if number == 1 else 's'}"]
        state = status_text.connection_word(self.state)
        return ServerPlace(self.name, url, self.state.phase.value, state, " · ".join(parts), is_shown)

    def title(self) -> str:
        """Return the title of its session on the screen, "" where it has none."""
        # An archived one is in no list.
        known = [*self.sessions, *([self.link.info] if self.link.info is not None else [])]
        return next((info.title for info in known if info.id == self.link.session), "")


class Daemons:
    """All of them; there is at least one.

    Args:
        servers: In the order in which they are listed; the first one is on the screen at first.
        post: Takes what they have to say.

    Attributes:
        shown: The one whose session is on the screen, or would be.
    """

    def __init__(self, servers: Sequence[Server], post: Callable[[DaemonNews], object]) -> None:
        first = servers[0]
        self._all = {server.name: Daemon(server, post, is_shown=server is first) for server in servers}
        self.shown = self._all[first.name]

    def __iter__(self) -> Iterator[Daemon]:
        return iter(self._all.values())

    def __getitem__(self, name: str) -> Daemon:
        return self._all[name]

    @property
    def names(self) -> tuple[str, ...]:
        """What each is called, in their order."""
        return tuple(self._all)

    @property
    def are_several(self) -> bool:
        """Whether a name is needed to tell them apart."""
        return len(self._all) > 1

    async def run(self) -> None:
        """Stay connected to all of them until cancelled."""
        async with asyncio.TaskGroup() as group:
            for daemon in self:
                group.create_task(daemon.link.run())

    async def stop(self) -> None:
        """End every task of every link."""
        for daemon in self:
            await daemon.link.stop()

    async def show(self, name: str) -> None:
        """Bring another daemon to the screen, without a session; the one that was there is left."""
        before, self.shown = self.shown, self._all[name]
        before.left = (before.link.session, before.link.role)
        await before.link.hide()
        await self.shown.link.show()

    def is_shown(self, news: DaemonNews) -> bool:
        """Whether this comes from the daemon on the screen."""
        return news.server == self.shown.name

    def changed(self, news: ConnectionChanged) -> bool:
        """Note where a connection stands; return whether its daemon said hello anew."""
        daemon = self._all[news.server]
        daemon.state = news.state
        if news.hello is None or news.hello is daemon.hello:
            return False
        daemon.hello = news.hello
        return True

    def refresh_soon(self) -> None:
        """Have every list of sessions that can be read now read again."""
        for daemon in self:
            if daemon.is_connected:
                daemon.link.refresh_soon()

    async def search(self, query: str) -> list[FoundRow]:
        """Return the conversations in which a text is, of every daemon that is there.

        Raises:
            ChatdError: The daemon on the screen refused.
        """
        asked = [daemon for daemon in self if daemon is self.shown or daemon.is_connected]
        answers = await asyncio.gather(*(self._search(daemon, query) for daemon in asked), return_exceptions=True)
        rows: list[FoundRow] = []
        for daemon, found in zip(asked, answers, strict=True):
            if not isinstance(found, BaseException):
                rows += [FoundRow.of(each, daemon.name) for each in found]
            elif daemon is self.shown or not isinstance(found, ChatdError | TimeoutError):
                raise found
        return rows

    async def _search(self, daemon: Daemon, query: str) -> list[FoundSession]:
        """Ask one; what goes away meanwhile is not waited for, unless it is on the screen."""
        async with asyncio.timeout(None if daemon is self.shown else SEARCH_S):
            return await daemon.link.search(query)

    def rows(self) -> list[ServerRow]:
        """Return the list of conversations, pinned ones first, by daemon."""
        return [self._row(daemon) for daemon in self]

    def places(self) -> list[ServerPlace]:
        """Return all of them as places to go to."""
        return [daemon.place(is_shown=daemon is self.shown) for daemon in self]

    def _row(self, daemon: Daemon) -> ServerRow:
        current = daemon.link.session if daemon is self.shown else None
        ordered = sorted(daemon.sessions, key=lambda info: not info.pinned)
        return ServerRow(
            daemon.name,
            daemon.state.phase.value,
            status_text.connection_word(daemon.state),
            tuple(SessionRow.of(info, current) for info in ordered),
            is_shown=daemon is self.shown,
        )
