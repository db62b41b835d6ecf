"""Removes a session: what an engine has of it in any tier, what the journal has, and the session itself.

In this order, so that what cannot be finished can be begun again: an engine that is not there refuses before anything
is lost, and a journal that takes nothing leaves a session whose KV is computed when it is used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from chatd.errors import DamagedRecord, StorageError
from chatd.journal.records import Erased
from chatd.protocol import EraseReceipt, SessionErased
from chatd.sessions.attachments import Attachments
from chatd.sessions.conversation import Conversation
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.events import Subscriber
from chatd.sessions.logs import last_answer, log_of
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Receipt, Recorder
from chatd.sessions.session import Session, unknown_session
from chatd.sessions.store import SessionStore
from chatd.sessions.turns import TurnRunner

_log = logging.getLogger(__name__)


class Eraser:
    """Erases sessions.

    Args:
        runner: Ends the answer in progress.
        requests: Have the engine forget.
        store: Has the sessions.
        attachments: Knows who listens.
        recorder: Commits for all sessions.
        journal: Forgets.
        clock: Gives Unix seconds.
    """

    def __init__(
        self,
        runner: TurnRunner,
        requests: EngineRequests,
        store: SessionStore,
        attachments: Attachments,
        recorder: Recorder,
        journal: Journal,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._store = store
        self._attachments = attachments
        self._recorder = recorder
        self._journal = journal
        self._clock = clock

    async def erase(
        self, session: Session, re: str | None, subscriber: Subscriber | None, receipt: Receipt | None
    ) -> SessionErased:
        """Remove a session; see `SessionManager.erase`."""
        session.check_writer(subscriber)
        async with contextlib.AsyncExitStack() as stack:
            if not await self.hold(session, stack):
                raise unknown_session(session.id)
            try:
                await self._store.loader.load(session)
            except DamagedRecord as error:
                # It goes all the same, but nobody knows the ids of which a tier may have KV.
                _log.error("a damaged session is erased: %s", error.message)
            return await self._erase(session, re, subscriber, receipt)

    async def hold(self, session: Session, stack: contextlib.AsyncExitStack) -> bool:
        """Keep everybody from a session until `stack` ends, with no answer in progress; False where it is gone."""
        while True:
            while (turn := session.turn) is not None:
                self._runner.cancel(turn)
                await turn.ended.wait()
            async with contextlib.AsyncExitStack() as own:
                await own.enter_async_context(session.lock)
                if session.is_erased:
                    return False
                if session.turn is None:  # Else it began while the lock was waited for.
                    session.is_erasing = True
                    own.callback(setattr, session, "is_erasing", False)
                    await stack.enter_async_context(own.pop_all())
                    return True

    def drop(self, session: Session, erased: SessionErased, sender: Subscriber | None = None) -> None:
        """Forget a session of which nothing is left elsewhere, and tell whoever is attached."""
        session.is_erased = True
        self._attachments.close(session, erased, sender)
        self._store.drop(session)

    async def _erase(
        self, session: Session, re: str | None, subscriber: Subscriber | None, receipt: Receipt | None
    ) -> SessionErased:
        owner = session.owner
        is_loaded = session.is_loaded
        gone = await self._requests.erase(session, logs_of(session.conversation) if is_loaded else ())
        kept = self._count(session) if is_loaded else Erased(messages=0, shared_messages=0, tokens=0, num_bytes=0)
        if self._recorder.keeps(session):
            # What is owed of it would be written after it is gone.
            owed = await self._recorder.forgive(session.id)
            try:
                kept = await self._journal.erase(session.id)
            except BaseException:
                self._recorder.owe(owed)
                raise
        session.is_erased = True
        erased = SessionErased(
            session=session.id,
            receipt=EraseReceipt(
                messages=kept.messages,
                shared_messages=kept.shared_messages,
                tokens=kept.tokens,
                blocks=gone.num_blocks,
                host_blocks=gone.num_host_blocks,
                disk_blocks=gone.num_disk_blocks,
                journal_bytes=kept.num_bytes,
            ),
            re=re,
        )
        if receipt is not None and self._recorder.keeps(session):
            answer = receipt.of(owner, erased, self._clock())
            try:
                await self._recorder.commit([answer])
            except StorageError:
                self._recorder.owe([answer])
        self.drop(session, erased, subscriber)
        return erased

    def _count(self, session: Session) -> Erased:
        """Return what goes with a session that no journal keeps."""
        others = [
            other.conversation
            for other in self._store.by_lease.values()
            if other is not session and other.owner == session.owner and other.is_loaded
        ]
        nodes = list(session.conversation)
        own = [node for node in nodes if not any(other.get(node.id) is node for other in others)]
        num_tokens = sum(len(node.prompt_ids) + len(node.ids) for node in own)
        return Erased(messages=len(own), shared_messages=len(nodes) - len(own), tokens=num_tokens, num_bytes=0)


def logs_of(conversation: Conversation) -> Iterator[Sequence[int]]:
    """Yield every log that a conversation's answers had: of each branch, and those that were put together anew.

    One at a time: together they may be far more than there is of the conversation, which its branches share.
    """
    followed = {node.parent for node in conversation}
    ends = [last_answer(node) for node in conversation if node not in followed]
    ends += [last_answer(node.parent) for node in conversation if node.log_system]
    for end in dict.fromkeys(ends):
        if end is not None:
            yield log_of(end)
