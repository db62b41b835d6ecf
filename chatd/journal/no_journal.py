"""A journal that keeps nothing, for a daemon whose conversations end with it."""

from __future__ import annotations

from collections.abc import Sequence

from chatd.journal.records import Change, Erased, Match, MessageRecord, SaveAnswer, SessionRecord


class NoJournal:
    """Takes every change and forgets it; as `sessions.ports.Journal`."""

    crash = ""

    def note_crashes(self, *, is_counted: bool) -> None:
        """Do nothing."""

    async def commit(self, changes: Sequence[Change]) -> None:
        """Return at once."""

    def append_tokens(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Do nothing."""

    async def erase(self, session: str) -> Erased:
        """Return that nothing was removed."""
        return Erased(messages=0, shared_messages=0, tokens=0, num_bytes=0)

    async def erase_tenant(self, tenant: str) -> tuple[int, Erased]:
        """Return that nothing was removed."""
        return 0, Erased(messages=0, shared_messages=0, tokens=0, num_bytes=0)

    async def message(self, message: str) -> tuple[str, str, MessageRecord] | None:
        """Return nothing."""
        return None

    async def sessions(self) -> list[SessionRecord]:
        """Return nothing."""
        return []

    async def in_flight(self) -> list[tuple[str, str]]:
        """Return nothing."""
        return []

    async def messages(self, session: str) -> list[MessageRecord]:
        """Return nothing."""
        return []

    async def find(self, tenant: str, user: str, query: str, limit: int) -> list[Match]:
        """Return nothing."""
        return []

    async def answers(self, since: float) -> list[SaveAnswer]:
        """Return nothing."""
        return []
