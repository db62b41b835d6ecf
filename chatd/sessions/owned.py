"""One owner's sessions, how much they have and in which order they were used, without a look at each of them.

A session says when anything of that has changed, so a count, or a page of a list, costs the same with ten sessions and
with thousands.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from chatd.sessions.session import Session

Place = tuple[float, str]
"""Where a session stands in a list: when it was last used, and its name."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a session is counted as.

    Attributes:
        num_bytes: In memory.
        num_kept_bytes: In the journal.
        is_resting: Its messages are in the journal only.
        is_open: It is not closed.
        is_archived: It is in the list of those.
        place: In that list.
    """

    num_bytes: int
    num_kept_bytes: int
    is_resting: bool
    is_open: bool
    is_archived: bool
    place: Place


class OwnedSessions:
    """An owner's sessions by name.

    Attributes:
        by_name: All of them.
        in_memory: Those whose messages are in memory.
        num_bytes: Memory of all messages and system prompts, about.
        num_kept_bytes: What the journal has of them, where it keeps them.
        resting_bytes: Of `num_bytes`, that of sessions whose messages are in the journal only.
        num_open: Sessions that are not closed, archived ones too.
        num_archived_open: Of those, the archived ones.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Session] = {}
        self.in_memory: dict[str, Session] = {}
        self.num_bytes = self.num_kept_bytes = self.resting_bytes = 0
        self.num_open = self.num_archived_open = 0
        self._counted: dict[str, _Counted] = {}
        self._places: tuple[list[Place], list[Place]] = ([], [])  # Of those in use, and of the archived ones.

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[Session]:
        return iter(self.by_name.values())

    @property
    def num_closed(self) -> int:
        """Sessions that are closed."""
        return len(self.by_name) - self.num_open

    def add(self, session: Session) -> None:
        """Take a session in, and count it whenever it changes."""
        self.by_name[session.id] = session
        session.on_changed = self._count
        self._count(session)

    def remove(self, session: Session) -> None:
        """Let go of a session."""
        del self.by_name[session.id]
        session.on_changed = None
        self._uncount(session)
        self.in_memory.pop(session.id, None)

    def last_used(self, *, archived: bool, before: Place | None = None) -> Iterator[tuple[Place, Session]]:
        """Yield sessions with their places, last used first, as they are now; those that go meanwhile are left out.

        Args:
            archived: Those that are archived, else the others.
            before: Only those that stand after this place in the list.
        """
        places = self._places[archived]
        end = len(places) if before is None else bisect_left(places, before)
        # A copy: the caller may await between two of them.
        for place in reversed(places[:end]):
            session = self.by_name.get(place[1])
            if session is not None and session.archived == archived:
                yield place, session

    def _count(self, session: Session) -> None:
        counted = _Counted(
            session.num_bytes,
            session.num_kept_bytes,
            not session.is_loaded,
            not session.closed,
            session.archived,
            (session.updated_at, session.id),
        )
        if counted == self._counted.get(session.id):
            return
        self._uncount(session)
        self._counted[session.id] = counted
        insort(self._places[counted.is_archived], counted.place)
        self._add(counted, 1)
        if counted.is_resting:
            self.in_memory.pop(session.id, None)
        else:
            self.in_memory[session.id] = session

    def _uncount(self, session: Session) -> None:
        counted = self._counted.pop(session.id, None)
        if counted is not None:
            places = self._places[counted.is_archived]
            del places[bisect_left(places, counted.place)]
            self._add(counted, -1)

    def _add(self, counted: _Counted, sign: int) -> None:
        self.num_bytes += sign * counted.num_bytes
        self.num_kept_bytes += sign * counted.num_kept_bytes
        if counted.is_resting:
            self.resting_bytes += sign * counted.num_bytes
        if counted.is_open:
            self.num_open += sign
            self.num_archived_open += sign * counted.is_archived
