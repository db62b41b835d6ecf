"""Which sessions there are: by name and owner, by lease, and how many. Starts no turn and knows no connection.

A session that the journal keeps is never forgotten here; only its messages are left to the journal while nobody uses
them. Without a journal the closed ones go, the longest unused first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from sys import getsizeof

from chatd.engine.messages import LeaseId
from chatd.errors import RateLimited
from chatd.journal.records import SessionRecord
from chatd.sessions.conversation import Conversation, Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.events import EventRing
from chatd.sessions.leases import Lease
from chatd.sessions.limits import SessionLimits
from chatd.sessions.loading import SessionLoader
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.owned import OwnedSessions
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session, unknown_session


class SessionStore:
    """All sessions of a daemon.

    Args:
        requests: Releases leases.
        journal: Has messages that are not in memory.
        recorder: Says which sessions the journal keeps.
        model: Gives the limits of the served model as they are now.
        limits: Bounds.
        new_id: Makes ids with a prefix.
        clock: Gives Unix seconds.

    Attributes:
        by_lease: Every session, those of stateless requests too, by its lease.
        loader: Has the messages of a session in memory.
    """

    def __init__(
        self,
        requests: EngineRequests,
        journal: Journal,
        recorder: Recorder,
        model: Callable[[], ModelProfile],
        limits: SessionLimits,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self.by_lease: dict[LeaseId, Session] = {}
        self.loader = SessionLoader(journal, recorder, model)
        self._recorder = recorder
        self._num_opening: Counter[Owner] = Counter()
        self._by_owner: dict[Owner, OwnedSessions] = {}
        self._requests = requests
        self._model = model
        self._limits = limits
        self._new_id = new_id
        self._clock = clock
        self._last_lease = 0

    async def resolve(self, owner: Owner, session_id: str, *, with_messages: bool = True) -> Session:
        """Return an owner's session, with its messages: the one place where a name becomes a session.

        Args:
            owner: Whose.
            session_id: Its name.
            with_messages: Have them in memory; otherwise a damaged session is returned as well.

        Raises:
            NotFound: Unknown, or somebody else's; the same words for both.
            StorageError: The journal cannot be read.
        """
        session = self._named(owner, session_id)
        if with_messages and not session.is_loaded:
            await self.loader.load(session)
            self.make_room(owner, session)
            session = self._named(owner, session_id)
        return session

    def find(self, session_id: str) -> Session | None:
        """Return the session of this name, whoever has it: for the operator alone."""
        found = (owned.by_name.get(session_id) for owned in self._by_owner.values())
        return next((session for session in found if session is not None), None)

    def all(self) -> list[Session]:
        """Return every session that its owner sees, of all owners: for the operator alone."""
        return [session for owned in self._by_owner.values() for session in owned]

    def owned(self, owner: Owner) -> OwnedSessions:
        """Return an owner's sessions."""
        return self._by_owner.get(owner) or OwnedSessions()

    def _named(self, owner: Owner, session_id: str) -> Session:
        session = self.owned(owner).by_name.get(session_id)
        if session is None:
            raise unknown_session(session_id)
        return session

    def check_room(self, owner: Owner) -> None:
        """Refuse another open session.

        Raises:
            RateLimited: `too_many_sessions`.
        """
        # An archived one is bounded with all that are kept, where they are.
        owned = self.owned(owner)
        num_open = owned.num_open - (owned.num_archived_open if self._recorder.is_kept else 0)
        num_open += self._num_opening[owner]
        if num_open >= self._limits.max_sessions_per_user:
            raise RateLimited(
                f"{num_open} sessions are open, the limit is {self._limits.max_sessions_per_user}",
                code="too_many_sessions",
                hint="archive, close or erase a session that is no longer needed",
            )

    def check_text_room(
        self, owner: Owner, texts: Iterable[str], session: Session | None = None, *, num_bytes: int = 0
    ) -> None:
        """Refuse texts that do not fit beside what an owner's sessions have to have in memory, or have in the journal.

        Args:
            session: Where the texts go; None for a new session.
            num_bytes: Of messages that a new session begins with.

        Raises:
            RateLimited: `too_much_text`.
        """
        owned = self.owned(owner)
        num_new = sum(map(getsizeof, texts)) + num_bytes
        held, limit = owned.num_bytes + num_new, self._limits.max_text_bytes_per_user
        if held > limit:  # Else it fits whatever may be left to the journal, and nobody need look at each session.
            in_memory = owned.in_memory.values()
            held = sum(other.num_bytes if other is session else self._num_held_bytes(other) for other in in_memory)
            held += owned.resting_bytes + num_new
        if held > limit:
            raise RateLimited(
                f"open sessions would have {held} bytes of text, the limit is {limit}"
                " (sessions.max_text_bytes_per_user)",
                code="too_much_text",
                hint="archive, close or erase a session that is no longer needed",
            )

        if not self._recorder.is_kept:
            return
        kept = owned.num_kept_bytes + num_new
        limit = self._limits.max_kept_bytes_per_user
        if kept > limit:
            raise RateLimited(
                f"sessions would have {kept} bytes of text in the journal, the limit is {limit}"
                " (sessions.max_kept_bytes_per_user)",
                code="too_much_text",
                hint="erase a session that is no longer needed",
            )

    def _num_held_bytes(self, session: Session) -> int:
        """Return how much of a session whose messages are in memory has to stay there."""
        if self._recorder.keeps(session):
            return session.num_system_bytes if self.loader.can_unload(session) else session.num_bytes
        return 0 if session.closed else session.num_bytes

    def make_room(self, owner: Owner, used: Session | None = None) -> None:
        """Keep an owner's messages in memory within bounds: those of sessions that are not used go.

        With a journal they are left to it; without one closed sessions are forgotten, also where they are too many.

        Args:
            used: Not this one's.
        """
        owned, limits = self.owned(owner), self._limits
        if self._recorder.is_kept:
            if owned.num_bytes <= limits.max_text_bytes_per_user:
                return
            in_memory = owned.in_memory.values()
            idle = [session for session in in_memory if session is not used and self.loader.can_unload(session)]
            for session in sorted(idle, key=lambda session: session.updated_at):
                if owned.num_bytes <= limits.max_text_bytes_per_user:
                    break
                self.loader.unload(session)
            return
        if (
            owned.num_closed <= limits.max_closed_sessions_per_user
            and owned.num_bytes <= limits.max_text_bytes_per_user
        ):
            return
        closed = sorted(
            (session for session in owned if session.closed and session.turn is None),
            key=lambda session: session.updated_at,
        )
        for num_left, session in zip(range(len(closed), 0, -1), closed, strict=True):
            if num_left <= limits.max_closed_sessions_per_user and owned.num_bytes <= limits.max_text_bytes_per_user:
                break
            self.drop(session)

    @contextlib.contextmanager
    def opening(self, owner: Owner) -> Iterator[None]:
        """Have room for one more open session, which `make` makes and `add` shows to its owner.

        Raises:
            RateLimited: `too_many_sessions`.
        """
        self.check_room(owner)
        num_kept, limit = len(self.owned(owner)) + self._num_opening[owner], self._limits
        if self._recorder.is_kept and num_kept >= limit.max_kept_sessions_per_user:
            raise RateLimited(
                f"{num_kept} sessions are kept, the limit is {limit.max_kept_sessions_per_user}",
                code="too_many_sessions",
                hint="erase a session that is no longer needed",
            )
        self._num_opening[owner] += 1
        try:
            yield
        finally:
            self._num_opening[owner] -= 1
            if not self._num_opening[owner]:
                del self._num_opening[owner]

    def make(self, owner: Owner, conversation: Conversation) -> Session:
        """Make a session that nobody sees before `add`."""
        return self._make(owner, conversation, hidden=False)

    def add(self, session: Session) -> None:
        """Let a session's owner see it."""
        self.by_lease[session.lease.id] = session
        self._by_owner.setdefault(session.owner, OwnedSessions()).add(session)
        self.make_room(session.owner, session)

    def add_stored(self, record: SessionRecord) -> Session:
        """Have a session that the journal has, without its messages."""
        session = self._make(Owner(record.tenant, record.user), None, hidden=False, session_id=record.id)
        session.unload(record)
        session.take(record)
        self.by_lease[session.lease.id] = session
        self._by_owner.setdefault(session.owner, OwnedSessions()).add(session)
        return session

    def open_hidden(self, owner: Owner, conversation: Conversation) -> Session:
        """Make a session for stateless requests; no name leads to it."""
        session = self._make(owner, conversation, hidden=True)
        self.by_lease[session.lease.id] = session
        return session

    def close(self, session: Session) -> None:
        """Give up an idle session's KV and keep its text, for as long as `make_room` leaves it."""
        self._release(session)
        session.closed = True

    def release(self, session: Session) -> None:
        """Give up an idle session's KV, where an engine has any."""
        if self._requests.holds(session):
            self._release(session)

    def drop(self, session: Session) -> None:
        """Forget an idle session."""
        self._release(session)
        del self.by_lease[session.lease.id]
        if not session.hidden:
            owned = self._by_owner[session.owner]
            owned.remove(session)
            if not len(owned):
                del self._by_owner[session.owner]

    def sweep(self) -> None:
        """Drop events that are too old to be replayed, and the messages of sessions that have none left."""
        now = self._clock()
        for session in self.by_lease.values():
            session.ring.expire(now)
            if session.is_loaded and not len(session.ring) and self.loader.can_unload(session):
                self.loader.unload(session)

    def _release(self, session: Session) -> None:
        """Give up an idle session's lease; its next turn is under a new one."""
        del self.by_lease[session.lease.id]
        self._requests.release(session, self.new_lease())
        self.by_lease[session.lease.id] = session

    def _make(
        self, owner: Owner, conversation: Conversation | None, *, hidden: bool, session_id: str | None = None
    ) -> Session:
        limits = self._limits
        session = Session(
            session_id or self._new_id("ses"),
            owner,
            conversation,
            Lease(self.new_lease()),
            EventRing(max_events=limits.replay_events, max_bytes=limits.replay_bytes, ttl_s=limits.replay_ttl_s),
            model_id=self._model().id,
            context_max=lambda: self._model().context,
            clock=self._clock,
            hidden=hidden,
        )
        session.vocabulary = self._model().vocabulary
        return session

    def new_lease(self) -> LeaseId:
        """Return an id that no lease had."""
        self._last_lease += 1
        return LeaseId(self._last_lease)
