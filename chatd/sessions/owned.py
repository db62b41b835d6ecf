"""One owner's sessions, and how much they have, without a look at each: most are left to the journal at any time."""

from __future__ import annotations

from collections.abc import Iterator

from chatd.sessions.session import Session


class OwnedSessions:
    """An owner's sessions by name.

    Attributes:
        by_name: All of them.
        in_memory: Those whose messages are in memory.
        resting_bytes: Memory that the others take all the same.
        resting_kept_bytes: What the journal has of those.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Session] = {}
        self.in_memory: dict[str, Session] = {}
        self.resting_bytes = self.resting_kept_bytes = 0
        self._resting: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[Session]:
        return iter(self.by_name.values())

    def add(self, session: Session) -> None:
        """Take a session in, and count it whenever its messages come and go."""
        self.by_name[session.id] = session
        session.on_moved = self._count
        self._count(session)

    def remove(self, session: Session) -> None:
        """Let go of a session."""
        del self.by_name[session.id]
        session.on_moved = None
        self._uncount(session)
        self.in_memory.pop(session.id, None)

    @property
    def num_bytes(self) -> int:
        """Memory of all messages and system prompts, about."""
        return self.resting_bytes + sum(session.num_bytes for session in self.in_memory.values())

    def _count(self, session: Session) -> None:
        self._uncount(session)
        if session.is_loaded:
            self.in_memory[session.id] = session
            return
        self.in_memory.pop(session.id, None)
        counted = self._resting[session.id] = session.num_bytes, session.num_kept_bytes
        self.resting_bytes += counted[0]
        self.resting_kept_bytes += counted[1]

    def _uncount(self, session: Session) -> None:
        num_bytes, num_kept_bytes = self._resting.pop(session.id, (0, 0))
        self.resting_bytes -= num_bytes
        self.resting_kept_bytes -= num_kept_bytes
