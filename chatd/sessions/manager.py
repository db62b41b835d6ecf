"""All conversations of a daemon: who owns them, what the doors may do with them, and what the engine says of them.

Everything here runs on the event loop and nothing blocks it; templates and tokenizers run in threads. The order for a
connection that attaches:

```
attached = manager.attach(session, subscriber, command)     held: nothing is delivered yet
send(attached)
manager.start(session, subscriber)                          what it missed, then everything as it happens
```
"""

from __future__ import annotations

import asyncio
import builtins
import secrets
import time
from collections.abc import Callable, Sequence

from chatd.engine.client import EngineEvent
from chatd.engine.messages import EngineStats, Forked, RequestClass, WatchPool
from chatd.engine.plan import RequestId
from chatd.journal.no_journal import NoJournal
from chatd.protocol import (
    AttachRole,
    BranchSelect,
    Item,
    MessageEdit,
    ResponseContinue,
    ResponseRegenerate,
    SessionAttach,
    SessionAttached,
    SessionClosed,
    SessionCreate,
    SessionCreated,
    SessionErased,
    SessionFork,
    SessionInfo,
    SessionList,
    SessionListed,
    SessionUpdate,
    UserMessage,
)
from chatd.sessions.attachments import Attachments
from chatd.sessions.choices import Choices
from chatd.sessions.completion import Completion, CompletionDelta, CompletionRequest
from chatd.sessions.conversation import Owner, Subscriber
from chatd.sessions.drafts import Drafts, OnCharged
from chatd.sessions.engine_events import EngineEvents, LeaseHolder, LeaseSessions, PoolListener
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.erasing import Eraser
from chatd.sessions.idle_policy import IdlePolicy
from chatd.sessions.inspections import Inspections
from chatd.sessions.limits import SessionLimits
from chatd.sessions.listing import SessionLists
from chatd.sessions.logs import log_of
from chatd.sessions.model_profile import ModelProfile, draw_seed
from chatd.sessions.native import NativeDoor
from chatd.sessions.native_turns import NativeTurns
from chatd.sessions.operator_door import OperatorDoor
from chatd.sessions.owner_changes import Asked, OwnerChanges
from chatd.sessions.ports import ChatEncoder, EngineGateway, Journal, Vocabulary
from chatd.sessions.public_prompts import PublicPrompt, PublicPrompts
from chatd.sessions.recorder import Receipt, Recorder
from chatd.sessions.recovery import Recovery, Restored
from chatd.sessions.session import Session, date_of
from chatd.sessions.stateless import StatelessDoor
from chatd.sessions.stats import SessionStats, TurnObserver
from chatd.sessions.store import SessionStore
from chatd.sessions.tokenizer import check_size
from chatd.sessions.turn import Turn
from chatd.sessions.turns import TurnRunner

__all__ = [
    "Choices",
    "Completion",
    "CompletionDelta",
    "CompletionRequest",
    "LeaseHolder",
    "LeaseSessions",
    "ModelProfile",
    "Owner",
    "PublicPrompt",
    "Receipt",
    "Restored",
    "Session",
    "SessionLimits",
    "SessionManager",
    "Subscriber",
    "TurnObserver",
]

SWEEP_INTERVAL_S = 30.0
DRAIN_CANCEL_S = 1.0
"""How long a draining daemon waits for the engine to end what was cancelled."""


class SessionManager:
    """All conversations of a daemon.

    Args:
        engine: `engine.client.EngineClient`.
        encoder: `sessions.prompt_encoder.PromptEncoder`.
        model: Limits and defaults; `self.model` is what holds once the engine is ready.
        limits: Bounds.
        vocabulary: `sessions.tokenizer.ChatTokenizer`.
        boot: Names this start of the daemon; a client that saw another one is given a snapshot.
        clock: Gives Unix seconds.
        monotonic: Gives seconds for timings.
        new_id: Makes ids with a prefix.
        draw: Makes seeds.
        journal: Keeps sessions beyond the daemon's end; `restore` takes up what it has.

    Attributes:
        operator: What only an operator may do.
    """

    def __init__(
        self,
        engine: EngineGateway,
        encoder: ChatEncoder,
        model: ModelProfile,
        limits: SessionLimits,
        *,
        vocabulary: Vocabulary,
        boot: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        new_id: Callable[[str], str] | None = None,
        draw: Callable[[], int] = draw_seed,
        journal: Journal | None = None,
    ) -> None:
        journal = journal or NoJournal()
        self.boot = boot
        self.limits = limits
        self.stats = SessionStats()
        self._engine = engine
        self._requests = EngineRequests(engine)
        self._recorder = Recorder(journal)
        new_id = new_id or _random_id
        self._runner = TurnRunner(
            self._requests,
            encoder,
            vocabulary,
            model,
            limits,
            self.stats,
            self._recorder,
            new_id=new_id,
            clock=clock,
            monotonic=monotonic,
            on_ended=self._on_turn_ended,
            draw=draw,
        )
        self._store = SessionStore(
            self._requests, journal, self._recorder, lambda: self.model, limits, new_id=new_id, clock=clock
        )
        self._lists = SessionLists(self._store, journal, self._recorder)
        self._attachments = Attachments(self._requests, boot)
        changes = OwnerChanges(self._recorder, self._store.loader, lambda: self.model, clock)
        self._native = NativeDoor(
            changes,
            self._runner,
            self._requests,
            self._store,
            self._attachments,
            limits,
            new_id=new_id,
            clock=clock,
        )
        self._native_turns = NativeTurns(changes, self._runner, self._store, limits, new_id=new_id, clock=clock)
        self._drafts = Drafts(self._runner.contexts, self._requests, monotonic)
        self._eraser = Eraser(
            self._runner, self._requests, self._store, self._attachments, self._recorder, journal, clock=clock
        )
        self._idle = IdlePolicy(
            self._store,
            limits,
            archive=lambda session: self.update(session, SessionUpdate(session=session.id, archived=True)),
            erase=self.erase,
            clock=clock,
        )
        self._recovery = Recovery(journal, self._recorder, self._store, self._runner, clock)
        self._door = StatelessDoor(self._runner, self._requests, self._store, limits, self.stats)
        self.operator = OperatorDoor(
            self._eraser,
            self._requests,
            self._store,
            self._door,
            self._recorder,
            journal,
            clock=clock,
            on_erased=self._drafts.forget,
        )
        self.public_prompts = PublicPrompts(
            encoder,
            self._requests,
            lambda: self.model,
            self._store.new_lease,
            today=lambda: date_of(clock()),
            monotonic=monotonic,
        )
        inspections = Inspections(engine, monotonic)
        self.inspect_blocks = inspections.ask
        self._events = EngineEvents(
            self._runner,
            self._requests,
            self._store.by_lease,
            self.public_prompts,
            inspections,
            self._idle.release_in_s,
        )
        self._clock = clock
        if engine.ready is not None:
            self._runner.on_ready(engine.ready)

    @property
    def model(self) -> ModelProfile:
        """Limits and defaults of the served model."""
        return self._runner.model

    @property
    def is_ready(self) -> bool:
        """True while an engine serves."""
        return self._runner.is_ready

    @property
    def num_in_flight(self) -> int:
        """Answers in progress, waiting ones included."""
        return self._runner.num_in_flight

    def add_observer(self, observer: TurnObserver) -> None:
        """Tell `observer` of every turn from now on."""
        self._runner.observers.append(observer)

    # The engine.

    async def run(self) -> None:
        """Take in what the engine says until cancelled, or until the engine is closed."""
        sweeper = asyncio.create_task(self._sweep_forever(), name="session sweeper")
        try:
            async for batch in self._engine.batches():
                self.on_engine_messages(batch)
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
            await self._drafts.close()

    def on_engine_messages(self, batch: Sequence[EngineEvent]) -> None:
        """Take in what one read brought."""
        self._events.take(batch)

    async def share_prompts(self, prompts: Sequence[PublicPrompt]) -> builtins.list[str]:
        """Have system prompts computed for all tenants; return what a person at the terminal should know.

        Raises:
            ConfigError: A prompt cannot be shared.
        """
        return await self.public_prompts.share(prompts)

    @property
    def engine_stats(self) -> EngineStats | None:
        """The engine's own counters, as it last told them."""
        return self._events.engine_stats

    @property
    def lease_sessions(self) -> LeaseSessions:
        """A live view of who holds which lease."""
        return self._events.lease_sessions

    def watch_pool(self, interval_s: float, *, with_map: bool = False, with_leases: bool = False) -> None:
        """Ask the engine for pool frames, no more often than every `interval_s`; 0 stops them."""
        self._requests.tell(WatchPool(interval_s, with_map, with_leases))

    def add_pool_listener(self, listener: PoolListener) -> Callable[[], None]:
        """Call `listener` with every pool frame; returns what removes it."""
        return self._events.add_pool_listener(listener)

    # Sessions.

    async def restore(self) -> Restored:
        """Take up every session that the journal has, and go on with the answers that were in progress.

        Raises:
            StorageError: The journal cannot be read.
        """
        return await self._recovery.restore()

    async def resolve(self, owner: Owner, session_id: str, *, with_messages: bool = True) -> Session:
        """Return an owner's session, with its messages: the one place where a name becomes a session.

        Whoever reads it does so at once; who awaits anything in between may find its messages gone to the journal.
        Without its messages it may be erased only, so that a damaged one can be.

        Raises:
            NotFound: Unknown, or somebody else's; the same words for both.
            StorageError: The journal cannot be read.
        """
        return await self._store.resolve(owner, session_id, with_messages=with_messages)

    async def create(self, owner: Owner, command: SessionCreate, *, receipt: Receipt | None = None) -> Session:
        """Open a session.

        Everything that changes a session is durable when it returns, together with its `receipt` where there is one,
        and told to nobody before.

        Raises:
            RateLimited: `too_many_sessions`, or `too_much_text`.
            InvalidRequest: A content is too large (`content_too_large`), or there are two system prompts.
            StorageError: It cannot be kept; nothing has changed. So for all that change something.
        """
        return await self._native.create(owner, command, receipt)

    async def fork(
        self,
        session: Session,
        command: SessionFork,
        subscriber: Subscriber | None = None,
        *,
        receipt: Receipt | None = None,
    ) -> tuple[Session, Forked]:
        """Open a session with the messages of another one up to `at`; return it, and what KV the two share now.

        The messages are shared, and so are the blocks; each session goes on by itself, also when the other is closed.

        Raises:
            Conflict: `session_busy`: what `at` names, or the head without it, is an answer in progress.
            InvalidRequest: `at` is no message of the session.
            PermissionDenied: The sender is an observer.
            RateLimited: `too_many_sessions`, or `too_much_text`.
        """
        return await self._native.fork(session, command, Asked(subscriber, receipt=receipt))

    def forked(self, fork: Session, forked: Forked, re: str | None) -> SessionCreated:
        """Return the answer to the fork that made a session."""
        return self._native.created(fork, forked, re)

    def created(
        self,
        session: Session,
        subscriber: Subscriber,
        *,
        re: str | None = None,
        role: AttachRole = "writer",
    ) -> SessionCreated:
        """Attach the connection that created a session; call `start` once the frame is sent.

        The messages that it brought along follow as `item.added`, unless they are more than the ring holds.
        """
        return self._attachments.created(session, subscriber, role, re)

    async def list(self, owner: Owner, command: SessionList) -> SessionListed:
        """Return an owner's sessions, last used first; `query` is looked for in titles and texts.

        The journal searches the texts it has. Without one, no more than `MAX_SEARCHED_CHARS` of those last used are
        looked at, so that the loop goes on.

        Raises:
            InvalidRequest: The cursor is none of ours.
            StorageError: The journal cannot be read.
        """
        return await self._lists.list(owner, command)

    def info(self, session: Session) -> SessionInfo:
        """Return a session as a list shows it."""
        return session.info()

    def items(self, session: Session) -> builtins.list[Item]:
        """Return the messages on the path to the head, an answer in progress included."""
        return [session.conversation.item_of(node) for node in session.conversation.path()]

    def attach(self, session: Session, subscriber: Subscriber, command: SessionAttach) -> SessionAttached:
        """Attach a connection, held until `start`.

        What it missed is replayed exactly where the client saw this `boot` and the ring still has all events after
        `after_seq`; otherwise the frame has a snapshot at `head_seq`, and events after that follow.
        """
        return self._attachments.attach(session, subscriber, command)

    def start(self, session: Session, subscriber: Subscriber) -> None:
        """Deliver what a connection missed while it was held, and from now on every event as it happens."""
        session.listeners.start(subscriber)

    def detach(self, session: Session, subscriber: Subscriber) -> None:
        """Deliver no more of a session's events; an answer in progress goes on."""
        self._drafts.take_back_of(subscriber, session)
        self._attachments.detach(session, subscriber)

    def detach_all(self, subscriber: Subscriber) -> None:
        """Detach a connection that is gone from everything."""
        self._drafts.take_back_of(subscriber)
        self._attachments.detach_all(subscriber)

    async def update(
        self,
        session: Session,
        command: SessionUpdate,
        *,
        re: str | None = None,
        subscriber: Subscriber | None = None,
        receipt: Receipt | None = None,
    ) -> None:
        """Change what the command names and tell everybody attached, and the sender with `re`.

        Raises:
            Conflict: `system` after the first message, or while an answer is in progress.
            InvalidRequest: A parameter is out of range, or the system prompt is too large.
            PermissionDenied: The sender is an observer.
            RateLimited: `too_much_text`.
        """
        await self._native.update(session, command, re, Asked(subscriber, receipt=receipt))
        if command.system is not None:
            self._drafts.renew(session)

    async def close(
        self,
        session: Session,
        *,
        re: str | None = None,
        subscriber: Subscriber | None = None,
        receipt: Receipt | None = None,
    ) -> SessionClosed:
        """Release a session's KV and keep its text; an answer in progress is cancelled first. Everybody is detached.

        The sender gets `session.closed` with `re`, attached or not.

        Raises:
            PermissionDenied: The sender is an observer.
        """
        closed = await self._native.close(session, re, Asked(subscriber, receipt=receipt))
        self._drafts.forget(session)
        return closed

    async def erase(
        self,
        session: Session,
        *,
        re: str | None = None,
        subscriber: Subscriber | None = None,
        receipt: Receipt | None = None,
    ) -> SessionErased:
        """Remove a session from every tier and the journal; an answer in progress is cancelled first.

        What forks have of it, messages and blocks, stays theirs. Everybody attached is told and detached; the sender
        gets `session.erased` with `re`, attached or not.

        Raises:
            PermissionDenied: The sender is an observer.
            Unavailable: `engine_unavailable`: what an engine has cannot be removed without one.
            StorageError: The journal takes nothing; the session is there, and its KV is computed anew.
        """
        erased = await self._eraser.erase(session, re, subscriber, receipt)
        self._drafts.forget(session)
        return erased

    # Turns.

    def prefill(
        self,
        session: Session,
        content: str | None,
        subscriber: Subscriber,
        *,
        charge: OnCharged = lambda _num_tokens: None,
        re: str | None = None,
    ) -> None:
        """Have what a person types computed ahead, at the lowest priority; no content takes it back.

        The latest counts, and nothing of it is kept anywhere. `prefill.state` goes to `subscriber`, with `re` now, and
        again when it is computed; `charge` is told how many tokens that took.

        Raises:
            PermissionDenied: The sender is an observer.
            Conflict: `not_attached`.
            InvalidRequest: `content_too_large`.
        """
        check_size((content or "",), self.limits.max_content_bytes)
        self._drafts.change(session, content or "", subscriber, charge, re)

    async def user_message(
        self,
        session: Session,
        command: UserMessage,
        subscriber: Subscriber | None = None,
        *,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        key_id: str = "",
        receipt: Receipt | None = None,
    ) -> None:
        """Add a message and, unless `respond` is false, start its answer; returns when it is on its way.

        `item.added` goes to everybody attached and, with `re`, to the sender. Nothing has changed where this raises.

        Raises:
            Conflict: `session_busy`.
            PermissionDenied: The sender is an observer.
            Unavailable: `engine_unavailable`.
            RateLimited: `too_many_turns`, `too_much_text`, or `too_many_sessions` where the session was closed.
            InvalidRequest: The content or the session is too large (`content_too_large`, `session_too_large`), a
                parameter is out of range, or `parent` is no message of the session.
            ContextLengthExceeded: It can never fit.
        """
        await self._native_turns.user_message(session, command, Asked(subscriber, key_id, request_class, receipt))
        self._drafts.forget(session)

    async def edit(
        self,
        session: Session,
        command: MessageEdit,
        subscriber: Subscriber | None = None,
        *,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        key_id: str = "",
        receipt: Receipt | None = None,
    ) -> None:
        """Put a message beside another one of the same role, and answer it unless `respond` is false.

        Everything else is as for `user_message`; an `item` that is not the user's wants `respond` false
        (InvalidRequest).
        """
        await self._native_turns.edit(session, command, Asked(subscriber, key_id, request_class, receipt))
        self._drafts.renew(session)

    async def regenerate(
        self,
        session: Session,
        command: ResponseRegenerate,
        subscriber: Subscriber | None = None,
        *,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        key_id: str = "",
        receipt: Receipt | None = None,
    ) -> None:
        """Answer a message once more: the one that `item` answers or is, else that of the last answer.

        The seed is a fresh one unless it is given. `response.created` goes to everybody attached and, with `re`, to the
        sender. Raises as `user_message`; InvalidRequest too where there is nothing to answer.
        """
        await self._native_turns.regenerate(session, command, Asked(subscriber, key_id, request_class, receipt))
        self._drafts.renew(session)

    async def go_on(
        self,
        session: Session,
        command: ResponseContinue,
        subscriber: Subscriber | None = None,
        *,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        key_id: str = "",
        receipt: Receipt | None = None,
    ) -> None:
        """Go on from an answer that was cut short, beside it: what `item` names, else the last one.

        The new answer begins with the tokens of that one and has its parameters, seed and positions, so it becomes what
        one longer run would have made. `response.created` has the text so far, and `usage` what comes now. Raises as
        `regenerate`, and Conflict `not_continuable` for an answer that is complete.
        """
        await self._native_turns.go_on(session, command, Asked(subscriber, key_id, request_class, receipt))
        self._drafts.renew(session)

    async def select_branch(
        self,
        session: Session,
        command: BranchSelect,
        subscriber: Subscriber | None = None,
        *,
        receipt: Receipt | None = None,
    ) -> None:
        """Make a message the head: the conversation is the path to it, and goes on from there.

        `branch.selected` goes to everybody attached and, with `re`, to the sender.

        Raises:
            Conflict: `session_busy`.
            InvalidRequest: `leaf` is no message of the session.
            PermissionDenied: The sender is an observer.
        """
        await self._native.select_branch(session, command, Asked(subscriber, receipt=receipt))
        self._drafts.renew(session)

    async def cancel(self, session: Session, subscriber: Subscriber | None = None) -> None:
        """End the answer in progress; `response.incomplete` follows, with what there is of it.

        Raises:
            Conflict: `not_responding`.
            PermissionDenied: The sender is an observer.
        """
        self._native_turns.cancel(session, subscriber)

    def answering_keys(self) -> set[str]:
        """Return the keys that asked for the answers in progress."""
        return {session.turn.key_id for session in self._store.all() if session.turn is not None}

    def end_answers_of(self, key_id: str, owner: Owner | None = None) -> int:
        """End the answers in progress that a key asked for which is gone, as cancelled; return how many.

        Those of stateless requests are their readers'.

        Args:
            key_id: The key.
            owner: Whose key it is now, where there is one: what it asked for as that owner's goes on.
        """
        turns = [session.turn for session in self._store.all() if session.owner != owner]
        gone = [turn for turn in turns if turn is not None and turn.key_id == key_id and not turn.is_ending]
        for turn in gone:
            self._runner.cancel(turn)
        return len(gone)

    async def complete(self, owner: Owner, request: CompletionRequest) -> Completion:
        """Answer a stateless request that wants one answer; see `choose`.

        Raises:
            ChatdError: As `choose`.
        """
        assert request.num_choices == 1, f"{request.num_choices} answers are wanted"
        return (await self.choose(owner, request)).completions[0]

    async def choose(self, owner: Owner, request: CompletionRequest) -> Choices:
        """Answer a stateless request from the longest known part of its history, with as many answers as it wants.

        Raises:
            Unavailable: `engine_unavailable`.
            RateLimited: `too_many_turns`.
            InvalidRequest: Messages or parameters are wrong or too large.
            ContextLengthExceeded: It can never fit.
        """
        return await self._door.choose(owner, request)

    def log_of_request(self, request: RequestId) -> tuple[str, builtins.list[int]]:
        """Return the tenant and ids of a request in flight, for checks: the engine holds exactly these (I25)."""
        computation = self._requests.ahead.computation_of(request)
        if computation is not None:
            return computation.tenant, [*computation.log()]
        turn = self._requests.turn_of(request)
        assert turn is not None, f"request {request} is not in flight"
        ids = log_of(turn.answer)
        return turn.session.owner.tenant, [*ids, *(turn.text.ids if turn.text is not None else ())]

    async def drain(self, timeout_s: float) -> None:
        """Wait until every answer in progress has ended; those that have not go on after a restart.

        Without a journal, and for stateless requests, they end as `draining`.
        """
        turns = [session.turn for session in self._store.by_lease.values() if session.turn is not None]
        await _wait_for_ends(turns, timeout_s)
        late = [turn for turn in turns if not turn.ended.is_set() and not self._recorder.keeps(turn.session)]
        for turn in late:
            self._runner.cancel(turn, "draining")
        await _wait_for_ends(late, DRAIN_CANCEL_S)

    async def settle(self) -> None:
        """Return when what was begun is durable, as far as the journal takes it: before that is closed."""
        await self._recovery.close()
        await self._recorder.settle()

    def _on_turn_ended(self, turn: Turn, committed: bool) -> None:
        session = turn.session
        session.updated_at = self._clock()
        if session.hidden:
            self._door.on_ended(turn, committed=committed)
        else:
            if len(session.listeners):
                self._requests.retain(session)
            self._drafts.resume(session)

    def sweep(self) -> None:
        """Drop events that are too old to be replayed, and drafts that nobody changes any more."""
        self._store.sweep()
        self._drafts.sweep()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.sweep()
            await self._idle.sweep()
            await self.public_prompts.renew()


async def _wait_for_ends(turns: Sequence[Turn], timeout_s: float) -> None:
    waiting = [asyncio.create_task(turn.ended.wait()) for turn in turns if not turn.ended.is_set()]
    if not waiting:
        return
    _, late = await asyncio.wait(waiting, timeout=timeout_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


def _random_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
