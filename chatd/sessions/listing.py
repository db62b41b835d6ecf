"""Lists of an owner's sessions: pages of those last used, and searches. Changes nothing.

A page costs what is on it. A search looks at every title and may look at texts, so it lets the loop go on in between,
and a tenant has one at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from chatd.errors import InvalidRequest
from chatd.journal.passages import passage
from chatd.journal.records import Match
from chatd.protocol import Passage, SessionInfo, SessionList, SessionListed
from chatd.sessions.conversation import Owner
from chatd.sessions.logs import Node
from chatd.sessions.owned import Place
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session
from chatd.sessions.store import SessionStore

MAX_SEARCHED_CHARS = 4 * 2**20
MAX_FOUND = 1000
"""Sessions that a search in the journal brings at most."""

MAX_CHARS_AT_ONCE = 2**16
TITLE_CHARS = 256
"""What a look at a session counts as beside its text; so many looks, or characters, go by before the loop goes on."""


class SessionLists:
    """Lists sessions.

    Args:
        store: Has them.
        journal: Finds texts.
        recorder: Says whether the journal keeps any.
    """

    def __init__(self, store: SessionStore, journal: Journal, recorder: Recorder) -> None:
        self._store = store
        self._journal = journal
        self._recorder = recorder
        self._searching: dict[str, asyncio.Lock] = {}

    async def list(self, owner: Owner, command: SessionList) -> SessionListed:
        """Return an owner's sessions, last used first; see `SessionManager.list`."""
        before = _parse_cursor(command.cursor)
        if not command.query:
            page = _Page(command.limit)
            for place, session in self._store.owned(owner).last_used(archived=command.archived, before=before):
                if not page.add(place, session):
                    break
            return page.listed()
        # One of each tenant: there is one thread for all, and who floods it waits in a line of its own.
        async with self._searching.setdefault(owner.tenant, asyncio.Lock()):
            return await self._search(owner, command, before)

    async def _search(self, owner: Owner, command: SessionList, before: Place | None) -> SessionListed:
        page = _Page(command.limit)
        where = await self._matcher(owner, (command.query or "").casefold())
        num_looked = 0
        for place, session in self._store.owned(owner).last_used(archived=command.archived, before=before):
            num_chars, match = where(session)
            if match is not None and not page.add(place, session, match):
                break
            num_looked += num_chars + TITLE_CHARS
            if num_looked >= MAX_CHARS_AT_ONCE:
                num_looked = 0
                await asyncio.sleep(0)
        return page.listed()

    async def _matcher(self, owner: Owner, query: str) -> Callable[[Session], tuple[int, Match | None]]:
        """Return what tells where a session has a text, None where it has not, after how many characters of texts.

        Asked in the order of a list.
        """
        if self._recorder.is_kept:
            matches = await self._journal.find(owner.tenant, owner.user, query, MAX_FOUND)
            by_session = {match.session: match for match in matches}

            def kept(session: Session) -> tuple[int, Match | None]:
                titled = Match(session.id) if query in session.title.casefold() else None
                return 0, by_session.get(session.id) or titled

            return kept
        budget = MAX_SEARCHED_CHARS

        def in_memory(session: Session) -> tuple[int, Match | None]:
            nonlocal budget
            nodes = _nodes_within(session, budget)
            num_chars = sum(len(node.content) for node in nodes)
            budget -= num_chars
            for node in reversed(nodes):
                if query in node.content.casefold():
                    return num_chars, Match(session.id, node.id, passage(node.content, [query]))
            return num_chars, Match(session.id) if query in session.title.casefold() else None

        return in_memory


class _Page:
    """One page of a list.

    Args:
        limit: How many sessions it takes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: list[SessionInfo] = []
        self._passages: list[Passage] = []
        self._last: Place = (math.inf, "")
        self._has_more = False

    def add(self, place: Place, session: Session, match: Match | None = None) -> bool:
        """Take a session; False where there is no room, and it begins the next page."""
        if len(self._sessions) == self._limit:
            self._has_more = True
            return False
        self._sessions.append(session.info())
        self._last = place
        if match is not None and match.message is not None:
            self._passages.append(Passage(session=session.id, item=match.message, text=match.passage))
        return True

    def listed(self) -> SessionListed:
        """Return the page, with where the next one begins if there is one."""
        when, name = self._last
        cursor = f"{when!r}~{name}" if self._has_more else None
        return SessionListed(sessions=self._sessions, next_cursor=cursor, passages=self._passages)


def _nodes_within(session: Session, max_chars: int) -> list[Node]:
    """Return a session's messages, as many as have `max_chars` characters together."""
    nodes = []
    for node in session.conversation:
        max_chars -= len(node.content)
        if max_chars < 0:
            break
        nodes.append(node)
    return nodes


def _parse_cursor(cursor: str | None) -> Place | None:
    if cursor is None:
        return None
    updated_at, _, session_id = cursor.partition("~")
    try:
        when = float(updated_at)
    except ValueError:
        when = math.nan
    if not math.isfinite(when):
        raise InvalidRequest(f"{cursor[:64]!r} is no cursor of a list", param="cursor")
    return when, session_id
