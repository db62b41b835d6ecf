"""What sessions change, made durable: the one place that commits to the journal. Knows no engine and no client.

A change is durable before anybody is told of it. What the journal refused although it has happened all the same (a turn
that failed for want of room is gone from the conversation) is owed: it goes in with the next commit that is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from chatd.errors import StorageError
from chatd.journal.no_journal import NoJournal
from chatd.journal.records import (
    Change,
    CountUsage,
    RemoveMessages,
    SaveAnswer,
    SaveMessage,
    SaveSession,
    ShareMessages,
    written_bytes,
)
from chatd.protocol import Event, encode
from chatd.sessions.conversation import Owner
from chatd.sessions.ports import Journal
from chatd.sessions.session import Session

PAY_AFTER_S = 1.0
"""How long what nobody waits for may take to be kept."""

MAX_FAILED = 8
"""Of what is owed so many sessions' are tried in vain with one commit, and then the rest with the next."""

LARGE_BYTES = 2**17
"""To write; above it what one session writes waits for what its tenant's other sessions do."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A command whose answer is kept together with its effect.

    Attributes:
        command: Its id.
        body: Digest of all of it.
    """

    command: str
    body: bytes

    def of(self, owner: Owner, answer: Event, at: float) -> SaveAnswer:
        """Return the change that keeps an answer."""
        return SaveAnswer(owner.tenant, owner.user, self.command, self.body, encode(answer).encode(), at)


@dataclass(frozen=True, slots=True, eq=False)
class _Debt:
    """Changes that go together, and of which session they are; None where of none."""

    session: str | None
    changes: Sequence[Change]


def session_of(change: Change) -> str | None:
    """Return the name of the session that a change is of."""
    match change:
        case SaveSession(session=record):
            return record.id
        case SaveMessage(session=session) | ShareMessages(session=session) | RemoveMessages(session=session):
            return session
        case _:
            return None


def _merged(debts: Sequence[_Debt]) -> list[_Debt]:
    """Return debts with one for the usage of each tenant, key and day: however long it is owed, it takes no more."""
    merged: list[_Debt] = []
    place_of: dict[tuple[str, str, date], int] = {}
    for debt in debts:
        match debt.changes:
            case [CountUsage() as more]:
                place = place_of.setdefault((more.tenant, more.key_id, more.day), len(merged))
                if place < len(merged):
                    (known,) = merged[place].changes
                    assert isinstance(known, CountUsage), "usage is merged with something else"
                    merged[place] = _Debt(None, [_sum(known, more)])
                    continue
        merged.append(debt)
    return merged


def _sum(a: CountUsage, b: CountUsage) -> CountUsage:
    return CountUsage(
        a.tenant,
        a.key_id,
        a.day,
        a.input_tokens + b.input_tokens,
        a.cached_tokens + b.cached_tokens,
        a.output_tokens + b.output_tokens,
        a.requests + b.requests,
    )


class Recorder:
    """Commits for all sessions.

    Args:
        journal: Where to.
    """

    def __init__(self, journal: Journal) -> None:
        self.is_kept = not isinstance(journal, NoJournal)
        """False where everything ends with the daemon."""
        self._journal = journal
        self._owed: list[_Debt] = []
        self._large: dict[str, asyncio.Lock] = {}
        self._paying = asyncio.Lock()
        self._payment: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_owed(self) -> int:
        """Changes that have happened and are not durable."""
        return sum(len(debt.changes) for debt in self._owed)

    def owes(self, session: Session) -> bool:
        """Return whether the journal may lack something of a session."""
        return self._paying.locked() or any(debt.session == session.id for debt in self._owed)

    def keeps(self, session: Session) -> bool:
        """Return whether a session is in the journal; those of stateless requests are not."""
        return self.is_kept and not session.hidden

    async def save(self, session: Session, changes: Sequence[Change]) -> None:
        """Make changes of a session durable that have its record among them; see `commit`."""
        recoded = list(session.recoded)
        all_changes = [*(SaveMessage(session.id, message) for message in recoded), *changes]
        if sum(map(written_bytes, all_changes)) <= LARGE_BYTES:
            await self.commit(all_changes)
        else:
            # One of each tenant at a time: all others' wait behind it in the one queue that the journal has.
            async with self._large.setdefault(session.owner.tenant, asyncio.Lock()):
                await self.commit(all_changes)
        del session.recoded[: len(recoded)]

    async def commit(self, changes: Sequence[Change]) -> None:
        """Return when all changes are durable, and what is owed as well.

        A caller that is cancelled meanwhile is so once it is known how it went: no change is left in between.

        Raises:
            StorageError: Nothing was kept.
        """
        if not self._owed and not self._paying.locked():
            await self._commit(changes)
            return
        # One after the other, or what is owed could undo what came after it.
        async with self._paying:
            owed, self._owed = self._owed, []
            try:
                await self._commit([*(change for debt in owed for change in debt.changes), *changes])
            except Exception:
                self._owed = _merged(owed + self._owed)
                await self._commit_apart(changes)
            finally:
                self._pay_soon()

    async def _commit_apart(self, changes: Sequence[Change]) -> None:
        """Commit changes with what is owed of their sessions alone, where it failed with all of that.

        Of the rest, what is taken is no longer owed. What never is, as of a damaged session, hurts nobody else.
        """
        sessions = {session_of(change) for change in changes} - {None}
        own = [debt for debt in self._owed if debt.session in sessions]
        await self._commit([*(change for debt in own for change in debt.changes), *changes])
        failed: set[str | None] = set()
        left: list[_Debt] = []
        owed, self._owed = [debt for debt in self._owed if debt not in own], []
        for debt in owed:
            try:
                if debt.session in failed or len(failed) >= MAX_FAILED:
                    left.append(debt)
                else:
                    await self._commit(debt.changes)
            except Exception as error:
                _log.error("%d changes cannot be made durable: %s", len(debt.changes), error)
                failed.add(debt.session)
                left.append(debt)
        # Those that were not tried come first the next time; those of one session stay in order.
        tried = [debt for debt in left if debt.session in failed]
        self._owed = [debt for debt in left if debt.session not in failed] + tried + self._owed

    async def forgive(self, session: str) -> list[Change]:
        """Owe nothing more of a session, which is about to be erased; return what it was."""
        async with self._paying:
            gone = [debt for debt in self._owed if debt.session == session]
            self._owed = [debt for debt in self._owed if debt.session != session]
            return [change for debt in gone for change in debt.changes]

    async def forgive_tenant(self, tenant: str, sessions: Collection[str]) -> list[Sequence[Change]]:
        """As `forgive`, of all sessions of a tenant, and of its usage and kept answers."""

        def is_of(debt: _Debt) -> bool:
            if debt.session is not None:
                return debt.session in sessions
            return any(isinstance(c, SaveAnswer | CountUsage) and c.tenant == tenant for c in debt.changes)

        async with self._paying:
            gone = [debt.changes for debt in self._owed if is_of(debt)]
            self._owed = [debt for debt in self._owed if not is_of(debt)]
            return gone

    async def _commit(self, changes: Sequence[Change]) -> None:
        commit = asyncio.ensure_future(self._journal.commit(changes))
        was_cancelled = False
        while not commit.done():
            try:
                await asyncio.wait((commit,))
            except asyncio.CancelledError:
                was_cancelled = True
        if was_cancelled:
            task = asyncio.current_task()
            assert task is not None, "a commit outside of a task"
            task.uncancel()
            task.cancel()
        commit.result()

    def end(
        self, session: Session, changes: Callable[[], Sequence[Change]], then: Callable[[StorageError | None], None]
    ) -> None:
        """Make the end of a turn durable, then let it have its effect, with the error where it could not be kept.

        `changes` and `then` are called under the session's lock; at once where the session is not kept.
        """
        if not self.keeps(session):
            then(None)
        else:
            self._spawn(self._end(session, changes, then))

    async def _end(
        self, session: Session, changes: Callable[[], Sequence[Change]], then: Callable[[StorageError | None], None]
    ) -> None:
        async with session.lock:
            failure: StorageError | None = None
            try:
                await self.save(session, changes())
            except StorageError as error:
                failure = error
            except Exception as error:
                # Whatever it is: the turn ends, or its session would be busy for ever.
                _log.exception("the end of a turn could not be made durable")
                failure = StorageError(f"the end of the answer could not be kept: {type(error).__name__}")
            then(failure)

    def owe(self, changes: Sequence[Change], *, at_once: bool = False) -> None:
        """Have changes kept soon, or at once, that nobody waits for."""
        if self.is_kept and changes:
            self._owed.append(_Debt(next((session_of(change) for change in changes), None), list(changes)))
            if isinstance(changes[-1], CountUsage):
                self._owed = _merged(self._owed)
            if at_once:
                self._spawn(self._pay())
            else:
                self._pay_soon()

    def note_tokens(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Note tokens of an answer in flight, from position `start` of it."""
        self._journal.append_tokens(message, start, ids)

    async def settle(self) -> None:
        """Return when everything that was begun is over, and what is owed is kept where the journal takes it."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._payment is not None:
            self._payment.cancel()
            self._payment = None
        if self._owed:
            await self._pay()

    def _pay_soon(self) -> None:
        if self._payment is None and self._owed:
            self._payment = asyncio.get_running_loop().call_later(PAY_AFTER_S, self._begin_payment)

    def _begin_payment(self) -> None:
        self._payment = None
        if self._owed:
            self._spawn(self._pay())

    async def _pay(self) -> None:
        if not self._owed:
            return
        try:
            await self.commit(())
        except StorageError as error:
            _log.warning("the journal takes nothing, %d changes wait: %s", self.num_owed, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="journal")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a change could not be made durable", exc_info=task.exception())
