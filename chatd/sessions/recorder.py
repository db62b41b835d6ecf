"""What sessions change, made durable: the one place that commits to the journal. Knows no engine and no client.

A change is durable before anybody is told of it. What the journal refused although it has happened all the same (a turn
that failed for want of room is gone from the conversation) is owed: it goes in with the next commit that is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from chatd.errors import StorageError
from chatd.journal.no_journal import NoJournal
from chatd.journal.records import Change, SaveAnswer, SaveMessage
from chatd.protocol import Event, encode
from chatd.sessions.conversation import Owner
from chatd.sessions.ports import Journal
from chatd.sessions.session import Session

PAY_AFTER_S = 1.0
"""How long what nobody waits for may take to be kept."""

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


class Recorder:
    """Commits for all sessions.

    Args:
        journal: Where to.
    """

    def __init__(self, journal: Journal) -> None:
        self.is_kept = not isinstance(journal, NoJournal)
        """False where everything ends with the daemon."""
        self._journal = journal
        self._owed: list[Change] = []
        self._paying = asyncio.Lock()
        self._payment: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_owed(self) -> int:
        """Changes that have happened and are not durable."""
        return len(self._owed)

    def keeps(self, session: Session) -> bool:
        """Return whether a session is in the journal; those of stateless requests are not."""
        return self.is_kept and not session.hidden

    async def save(self, session: Session, changes: Sequence[Change]) -> None:
        """Make changes of a session durable that have its record among them; see `commit`."""
        recoded = list(session.recoded)
        await self.commit([*(SaveMessage(session.id, message) for message in recoded), *changes])
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
                await self._commit([*owed, *changes])
            except BaseException:
                self._owed = owed + self._owed
                self._pay_soon()
                raise

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
        if self.is_kept:
            self._owed += changes
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
            _log.warning("the journal takes nothing, %d changes wait: %s", len(self._owed), error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="journal")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a change could not be made durable", exc_info=task.exception())
