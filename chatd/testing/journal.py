"""A journal in memory that can be told to fail, and that another manager can start from: a crash without files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from chatd.errors import StorageError
from chatd.journal.passages import has_words, passage, words_of
from chatd.journal.records import (
    ID_TYPE,
    Change,
    CountUsage,
    Erased,
    EraseSession,
    Match,
    MessageRecord,
    RemoveMessages,
    SaveAnswer,
    SaveMessage,
    SaveSession,
    SessionRecord,
    ShareMessages,
)


class MemoryJournal:
    """As `sessions.ports.Journal`, in dictionaries.

    Attributes:
        error: Raised by every commit while it is set.
        before_commit: Called with the changes of each commit before they take effect; may raise `StorageError`.
    """

    def __init__(self) -> None:
        self.crash = ""
        self.error: StorageError | None = None
        self.before_commit: Callable[[Sequence[Change]], None] | None = None
        self.commits: list[list[Change]] = []
        self.usage: list[CountUsage] = []
        self._sessions: dict[str, SessionRecord] = {}
        self._messages: dict[str, MessageRecord] = {}
        self._members: dict[str, list[str]] = {}
        self._answers: dict[tuple[str, str, str], SaveAnswer] = {}

    def note_crashes(self, *, is_counted: bool) -> None:
        """Forget the crash that was found, where it is counted."""
        if is_counted:
            self.crash = ""

    async def commit(self, changes: Sequence[Change]) -> None:
        """Take all changes, or none."""
        if self.error is not None:
            raise self.error
        if self.before_commit is not None:
            self.before_commit(changes)
        self.commits.append(list(changes))
        for change in changes:
            self._apply(change)

    def append_tokens(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Note tokens of an answer in flight."""
        record = self._messages.get(message)
        if record is not None and record.status == "in_progress" and start <= len(record.ids) and self.error is None:
            kept = record.ids[:start]
            kept.extend(ids)
            self._messages[message] = msgspec.structs.replace(record, ids=kept)

    async def erase(self, session: str) -> Erased:
        """Remove a session."""
        members = self._members.get(session, [])
        records = [self._messages[message] for message in members]
        title = self._sessions[session].title if session in self._sessions else ""
        await self.commit([EraseSession(session)])
        gone = [record for record in records if record.id not in self._messages]
        all_ids = [ids for record in gone for ids in (record.prompt_ids, record.ids)]
        return Erased(
            messages=len(gone),
            shared_messages=len(records) - len(gone),
            tokens=sum(map(len, all_ids)),
            num_bytes=sum(len(text.encode()) for text in (title, *(record.content for record in gone)))
            + sum(ids.itemsize * len(ids) for ids in all_ids),
        )

    async def erase_tenant(self, tenant: str) -> tuple[int, Erased]:
        """Remove all that there is of a tenant."""
        names = [record.id for record in self._sessions.values() if record.tenant == tenant]
        gone = [await self.erase(name) for name in names]
        self._answers = {key: answer for key, answer in self._answers.items() if answer.tenant != tenant}
        self.usage = [count for count in self.usage if count.tenant != tenant]
        return len(gone), Erased(
            messages=sum(erased.messages for erased in gone),
            shared_messages=0,
            tokens=sum(erased.tokens for erased in gone),
            num_bytes=sum(erased.num_bytes for erased in gone),
        )

    async def message(self, message: str) -> tuple[str, str, MessageRecord] | None:
        """Return whose a message is, and the message."""
        record = self._messages.get(message)
        for session, members in self._members.items():
            if message in members and record is not None:
                return self._sessions[session].tenant, self._sessions[session].user, record
        return None

    async def sessions(self) -> list[SessionRecord]:
        """Return every session."""
        return list(self._sessions.values())

    async def in_flight(self) -> list[tuple[str, str]]:
        """Return every answer that has not ended."""
        return [
            (session, message)
            for session, members in self._members.items()
            for message in members
            if self._messages[message].status == "in_progress"
        ]

    async def messages(self, session: str) -> list[MessageRecord]:
        """Return a session's messages."""
        return [self._messages[message] for message in self._members.get(session, ())]

    async def search(self, tenant: str, user: str, query: str, limit: int) -> list[str]:
        """Return the ids of what `find` finds."""
        return [match.session for match in await self.find(tenant, user, query, limit)]

    async def find(self, tenant: str, user: str, query: str, limit: int) -> list[Match]:
        """Return an owner's sessions that have the words of the query."""
        words = words_of(query)
        found = []
        for record in self._sessions.values():
            if (record.tenant, record.user) != (tenant, user) or not words:
                continue
            messages = [self._messages[message] for message in reversed(self._members.get(record.id, ()))]
            having = next((message for message in messages if has_words(message.content, words)), None)
            if having is not None:
                found.append(Match(record.id, having.id, passage(having.content, words)))
            elif has_words(record.title, words):
                found.append(Match(record.id))
        return found[:limit]

    async def answers(self, since: float) -> list[SaveAnswer]:
        """Return the kept answers."""
        return [answer for answer in self._answers.values() if answer.at >= since]

    def _apply(self, change: Change) -> None:
        match change:
            case SaveSession(session=record):
                self._sessions[record.id] = record
                self._members.setdefault(record.id, [])
            case SaveMessage(session=session, message=message):
                # Its own copy, as a database has it.
                own = msgspec.structs.replace(message, ids=message.ids[:], prompt_ids=message.prompt_ids[:])
                assert own.ids.typecode == own.prompt_ids.typecode == ID_TYPE, "ids of another type"
                self._messages[own.id] = own
                self._add(session, own.id)
            case ShareMessages(session=session, messages=ids):
                for message_id in ids:
                    self._add(session, message_id)
            case RemoveMessages(session=session, messages=ids):
                for message_id in ids:
                    with suppress(ValueError):
                        self._members[session].remove(message_id)
                self._forget_unused(ids)
            case SaveAnswer():
                self._answers[change.tenant, change.user, change.command] = change
            case CountUsage():
                self.usage.append(change)
            case EraseSession(session=session):
                self._sessions.pop(session, None)
                self._forget_unused(self._members.pop(session, []))

    def _add(self, session: str, message: str) -> None:
        assert message in self._messages, f"message {message} is not known"
        members = self._members[session]
        if message not in members:
            members.append(message)

    def _forget_unused(self, ids: Sequence[str]) -> None:
        used = {message for members in self._members.values() for message in members}
        for message_id in ids:
            if message_id not in used:
                self._messages.pop(message_id, None)


class Killed(BaseException):
    """Ends whatever a daemon was doing when it was killed."""


class JournalHandle:
    """One daemon's hold on a journal: once it is cut, as by `kill -9`, nothing of that daemon gets there any more.

    Args:
        journal: Outlives the daemon.
        cut_at: The commit at which the daemon is killed, from 1; 0 for none.
        takes_effect: That commit is durable, though nobody was told.
    """

    def __init__(self, journal: MemoryJournal, *, cut_at: int = 0, takes_effect: bool = False) -> None:
        self.is_cut = False
        self.num_commits = 0
        self._journal = journal
        self._cut_at = cut_at
        self._takes_effect = takes_effect

    async def commit(self, changes: Sequence[Change]) -> None:
        """Commit, unless the daemon is killed; as if it took a while."""
        await asyncio.sleep(0)
        if self.is_cut:
            raise Killed
        self.num_commits += 1
        is_last = self.num_commits == self._cut_at
        if not is_last or self._takes_effect:
            await self._journal.commit(changes)
        if is_last:
            self.is_cut = True
            raise Killed

    def append_tokens(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Note tokens of an answer in flight."""
        if not self.is_cut:
            self._journal.append_tokens(message, start, ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)
