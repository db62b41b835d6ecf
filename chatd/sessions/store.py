"""Which sessions there are: by name and owner, by lease, and how many. Starts no turn and knows no connection."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable
from sys import getsizeof

from chatd.engine.messages import LeaseId
from chatd.errors import InvalidRequest, NotFound, RateLimited
from chatd.protocol import SessionInfo, SessionList, SessionListed
from chatd.sessions.conversation import Conversation, Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.events import EventRing
from chatd.sessions.limits import SessionLimits
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.session import Lease, Session

MAX_SEARCHED_CHARS = 4 * 2**20


class SessionStore:
    """All sessions of a daemon.

    Args:
        requests: Releases leases.
        model: Gives the limits of the served model as they are now.
        limits: Bounds.
        new_id: Makes ids with a prefix.
        clock: Gives Unix seconds.

    Attributes:
        by_lease: Every session, those of stateless requests too, by its lease.
    """

    def __init__(
        self,
        requests: EngineRequests,
        model: Callable[[], ModelProfile],
        limits: SessionLimits,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self.by_lease: dict[LeaseId, Session] = {}
        self._by_owner: dict[Owner, dict[str, Session]] = {}
        self._requests = requests
        self._model = model
        self._limits = limits
        self._new_id = new_id
        self._clock = clock
        self._last_lease = 0

    def resolve(self, owner: Owner, session_id: str) -> Session:
        """Return an owner's session: the one place where a name becomes a session.

        Raises:
            NotFound: Unknown, or somebody else's; the same words for both.
        """
        session = self._by_owner.get(owner, {}).get(session_id)
        if session is None:
            raise NotFound(f"session {session_id[:64]!r} is not known", param="session")
        return session

    def list(self, owner: Owner, command: SessionList) -> SessionListed:
        """Return an owner's sessions, last used first; see `SessionManager.list`."""
        before = _parse_cursor(command.cursor)
        query = command.query.casefold() if command.query else None
        found: list[SessionInfo] = []
        budget = MAX_SEARCHED_CHARS
        ordered = sorted(
            self._by_owner.get(owner, {}).values(), key=lambda session: (session.updated_at, session.id), reverse=True
        )
        for session in ordered:
            if session.archived != command.archived:
                continue
            if before is not None and (session.updated_at, session.id) >= before:
                continue
            if query is not None and query not in session.title.casefold():
                texts = _texts_within(session, budget)
                budget -= sum(map(len, texts))
                if not any(query in text.casefold() for text in texts):
                    continue
            if len(found) == command.limit:
                last = self._by_owner[owner][found[-1].id]
                return SessionListed(sessions=found, next_cursor=f"{last.updated_at!r}~{last.id}")
            found.append(session.info())
        return SessionListed(sessions=found)

    def check_room(self, owner: Owner) -> None:
        """Refuse another open session.

        Raises:
            RateLimited: `too_many_sessions`.
        """
        num_open = sum(not session.closed for session in self._by_owner.get(owner, {}).values())
        if num_open >= self._limits.max_sessions_per_user:
            raise RateLimited(
                f"{num_open} sessions are open, the limit is {self._limits.max_sessions_per_user}",
                code="too_many_sessions",
                hint="close a session that is no longer needed",
            )

    def check_text_room(
        self, owner: Owner, texts: Iterable[str], session: Session | None = None, *, num_bytes: int = 0
    ) -> None:
        """Refuse texts that do not fit beside an owner's open sessions; closed ones make room, see `trim_closed`.

        Args:
            session: Where the texts go; None for a new session.
            num_bytes: Of messages that a new session begins with.

        Raises:
            RateLimited: `too_much_text`.
        """
        owned = self._by_owner.get(owner, {}).values()
        held = sum(other.num_bytes for other in owned if not other.closed or other is session)
        held += sum(map(getsizeof, texts)) + num_bytes
        limit = self._limits.max_text_bytes_per_user
        if held > limit:
            raise RateLimited(
                f"open sessions would have {held} bytes of text, the limit is {limit}"
                " (sessions.max_text_bytes_per_user)",
                code="too_much_text",
                hint="close a session that is no longer needed",
            )

    def trim_closed(self, owner: Owner) -> None:
        """Forget closed sessions that are too many or whose text has no room, the longest unused first."""
        owned = self._by_owner.get(owner, {}).values()
        closed = sorted(
            (session for session in owned if session.closed and session.turn is None),
            key=lambda session: session.updated_at,
        )
        num_bytes = sum(session.num_bytes for session in owned)
        for num_left, session in zip(range(len(closed), 0, -1), closed, strict=True):
            if (
                num_left <= self._limits.max_closed_sessions_per_user
                and num_bytes <= self._limits.max_text_bytes_per_user
            ):
                break
            num_bytes -= session.num_bytes
            self.drop(session)

    def open(self, owner: Owner, conversation: Conversation) -> Session:
        """Make a session that its owner sees."""
        session = self._make(owner, conversation, hidden=False)
        self._by_owner.setdefault(owner, {})[session.id] = session
        return session

    def open_hidden(self, owner: Owner, conversation: Conversation) -> Session:
        """Make a session for stateless requests; no name leads to it."""
        return self._make(owner, conversation, hidden=True)

    def close(self, session: Session) -> None:
        """Give up an idle session's KV and keep its text, while there are not too many closed ones."""
        self._release(session)
        session.closed = True
        self.trim_closed(session.owner)

    def drop(self, session: Session) -> None:
        """Forget an idle session."""
        self._release(session)
        del self.by_lease[session.lease.id]
        if not session.hidden:
            owned = self._by_owner[session.owner]
            del owned[session.id]
            if not owned:
                del self._by_owner[session.owner]

    def sweep(self) -> None:
        """Drop events that are too old to be replayed."""
        now = self._clock()
        for session in self.by_lease.values():
            session.ring.expire(now)

    def _release(self, session: Session) -> None:
        """Give up an idle session's lease; its next turn is under a new one."""
        del self.by_lease[session.lease.id]
        self._requests.release(session, self.new_lease())
        self.by_lease[session.lease.id] = session

    def _make(self, owner: Owner, conversation: Conversation, *, hidden: bool) -> Session:
        limits = self._limits
        session = Session(
            self._new_id("ses"),
            owner,
            conversation,
            Lease(self.new_lease()),
            EventRing(max_events=limits.replay_events, max_bytes=limits.replay_bytes, ttl_s=limits.replay_ttl_s),
            model_id=self._model().id,
            context_max=lambda: self._model().context,
            clock=self._clock,
            hidden=hidden,
        )
        self.by_lease[session.lease.id] = session
        return session

    def new_lease(self) -> LeaseId:
        """Return an id that no lease had."""
        self._last_lease += 1
        return LeaseId(self._last_lease)


def _texts_within(session: Session, max_chars: int) -> builtins.list[str]:
    """Return a session's messages, as many as have `max_chars` characters together."""
    texts = []
    for node in session.conversation:
        max_chars -= len(node.content)
        if max_chars < 0:
            break
        texts.append(node.content)
    return texts


def _parse_cursor(cursor: str | None) -> tuple[float, str] | None:
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
