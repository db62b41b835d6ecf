"""Type-ahead: what a person types is computed before it is sent, when nothing else wants the machine.

Of each session there is one draft, the latest. It is in no log, no event and no journal; what was computed of it is
forgotten in every tier when it changes, when it is taken back, or when nobody has typed for a while. The message that
is sent finds what it has in common with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from chatd.engine.messages import Done, FinishReason
from chatd.errors import ChatdError, Conflict
from chatd.protocol import PrefillState
from chatd.sessions.context_policy import ContextMaker
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.events import Subscriber
from chatd.sessions.session import Session

INTERVAL_S = 0.1
"""A draft is given to the engine no more often than this; of what is typed meanwhile the latest counts."""

KEPT_S = 60.0
"""After so long without a change a draft is taken back."""

MAX_DRAFTS_PER_USER = 8
"""Sessions of one user with a draft; the longest unchanged is taken back for another one."""

_log = logging.getLogger(__name__)

OnCharged = Callable[[int], None]


@dataclass(slots=True, eq=False)
class _Draft:
    """What is being typed in one session.

    Attributes:
        session: Where.
        subscriber: Who types.
        content: The latest.
        charge: Told of tokens that were computed.
        changed_at: When, in monotonic seconds.
        given: What the engine was given last, and how many tokens that has; None where it has nothing.
        is_computed: All of that.
    """

    session: Session
    subscriber: Subscriber
    content: str
    charge: OnCharged
    changed_at: float
    given: tuple[str, int] | None = None
    is_computed: bool = False

    @property
    def num_tokens(self) -> int:
        """Of what the engine was given."""
        return 0 if self.given is None else self.given[1]

    def state(self, re: str | None = None) -> PrefillState:
        """Return what its writer is told."""
        is_latest = self.given is not None and self.given[0] == self.content
        return PrefillState(
            session=self.session.id, tokens=self.num_tokens, computed=is_latest and self.is_computed, re=re
        )


class Drafts:
    """All drafts.

    Args:
        contexts: Makes their ids.
        requests: Has them computed.
        monotonic: Gives seconds.
    """

    def __init__(self, contexts: ContextMaker, requests: EngineRequests, monotonic: Callable[[], float]) -> None:
        self._contexts = contexts
        self._requests = requests
        self._monotonic = monotonic
        self._drafts: dict[str, _Draft] = {}  # by session, the longest unchanged first
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._encoding = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._drafts)

    def change(self, session: Session, content: str, subscriber: Subscriber, charge: OnCharged, re: str | None) -> None:
        """Take what a session's next message is as far as it was typed, and answer; nothing of it takes it back.

        Raises:
            PermissionDenied: `observer`.
            Conflict: `not_attached`: drafts go with the connection that types.
        """
        session.check_writer(subscriber)
        if session.listeners.role_of(subscriber) is None:
            raise Conflict(
                f"this connection is not attached to session {session.id}",
                code="not_attached",
                hint="attach first: a draft is kept for as long as its writer is there",
            )
        if not content:
            self.take_back(session)
            subscriber.deliver(PrefillState(session=session.id, tokens=0, computed=False, re=re))
            return
        draft = self._drafts.pop(session.id, None)
        if draft is None:
            draft = _Draft(session, subscriber, content, charge, self._monotonic())
        draft.subscriber, draft.content, draft.charge = subscriber, content, charge
        draft.changed_at = self._monotonic()
        self._drafts[session.id] = draft
        self._limit(session)
        subscriber.deliver(draft.state(re))
        self.resume(session)

    def resume(self, session: Session) -> None:
        """Go on with a session's draft now that the session is free."""
        draft = self._drafts.get(session.id)
        if draft is not None and session.id not in self._tasks and self._is_due(draft):
            task = asyncio.get_running_loop().create_task(self._compute(draft), name="type-ahead")
            self._tasks[session.id] = task
            task.add_done_callback(lambda done: self._on_task_done(session, done))

    def renew(self, session: Session) -> None:
        """Compute a session's draft anew: what it goes on from is another context now."""
        draft = self._drafts.get(session.id)
        if draft is not None:
            draft.given, draft.is_computed = None, False
            self.resume(session)

    def forget(self, session: Session) -> None:
        """Note that a session's next turn has begun: what it had no use for of the draft is given up already."""
        self._drafts.pop(session.id, None)

    def take_back(self, session: Session) -> None:
        """Have nothing of a session's draft left."""
        self._drafts.pop(session.id, None)
        if session.turn is None:
            self._requests.ahead.take_back_draft(session)

    def take_back_of(self, subscriber: Subscriber, session: Session | None = None) -> None:
        """Take back what a connection has typed that left a session, or all of them."""
        for draft in list(self._drafts.values()):
            if draft.subscriber is subscriber and session in (None, draft.session):
                self.take_back(draft.session)

    def sweep(self) -> None:
        """Take back what nobody has changed for long."""
        oldest = self._monotonic() - KEPT_S
        for draft in [draft for draft in self._drafts.values() if draft.changed_at <= oldest]:
            self.take_back(draft.session)
            draft.subscriber.deliver(PrefillState(session=draft.session.id, tokens=0, computed=False))

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _limit(self, session: Session) -> None:
        own = [draft for draft in self._drafts.values() if draft.session.owner == session.owner]
        for draft in own[: max(0, len(own) - MAX_DRAFTS_PER_USER)]:
            self.take_back(draft.session)

    async def _compute(self, draft: _Draft) -> None:
        """Give the engine a draft, and again for as long as it changes."""
        session = draft.session
        while self._is_due(draft):
            # One at a time: threads are for what is sent, and in turn, so nobody's drafts wait for ever.
            async with self._encoding:
                if not self._is_due(draft):
                    return
                conversation, content = session.conversation, draft.content
                head, system = conversation.head, conversation.system
                node, ids = await self._contexts.draft(session.context_policy, system, head, content, date=session.date)
            if not self._is_due(draft) or (conversation.head, conversation.system) != (head, system):
                continue
            if draft.content == content:
                draft.given, draft.is_computed = (content, len(ids)), False

                def on_done(done: Done | None, given: tuple[str, int] = draft.given) -> None:
                    self._on_computed(draft, given, done)

                if not self._requests.ahead.compute_draft(session, node, ids, on_done):
                    return
                draft.subscriber.deliver(draft.state())
            await asyncio.sleep(INTERVAL_S)

    def _is_due(self, draft: _Draft) -> bool:
        """Return whether the latest of a draft is not with the engine, and may be."""
        is_latest = draft.given is not None and draft.given[0] == draft.content
        session = draft.session
        is_open = self._drafts.get(session.id) is draft and session.turn is None and not session.is_erasing
        return is_open and not is_latest

    def _on_computed(self, draft: _Draft, given: tuple[str, int], done: Done | None) -> None:
        if done is None or done.reason is FinishReason.FAILED:
            if draft.given == given:
                draft.given = None
            return
        draft.charge(done.timings.num_prefill_tokens)
        if draft.given == given and done.reason is FinishReason.COMPUTED:
            draft.is_computed = True
            if self._drafts.get(draft.session.id) is draft:
                draft.subscriber.deliver(draft.state())

    def _on_task_done(self, session: Session, task: asyncio.Task[None]) -> None:
        self._tasks.pop(session.id, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            if not task.cancelled():
                self.resume(session)  # It may be another draft than the one that the task was for.
            return
        # What can never be sent is refused when it is, and then its writer is told why.
        if not isinstance(error, ChatdError):
            # Without its text, which is nobody's business.
            _log.error("a draft could not be computed (%s)", type(error).__name__)
        self.take_back(session)
