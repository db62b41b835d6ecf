"""The native door: sessions that their owners see, name and keep. `SessionManager` says what each verb promises.

What is said in them is in `native_turns`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from chatd.engine.messages import Forked, Tier
from chatd.errors import Conflict, InvalidRequest
from chatd.journal.records import MessageRecord, SaveMessage, SaveSession, ShareMessages
from chatd.protocol import (
    BranchSelect,
    SessionClosed,
    SessionCreate,
    SessionCreated,
    SessionFork,
    SessionUpdate,
    SessionUpdated,
)
from chatd.sessions.attachments import Attachments
from chatd.sessions.conversation import Conversation, Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.limits import SessionLimits
from chatd.sessions.logs import Node
from chatd.sessions.owner_changes import Asked, OwnerChanges
from chatd.sessions.recorder import Receipt
from chatd.sessions.session import Session
from chatd.sessions.stateless import check_messages
from chatd.sessions.store import SessionStore
from chatd.sessions.stored import headed, message_record
from chatd.sessions.tokenizer import check_size
from chatd.sessions.turns import TurnRunner, check_free

MAX_SELECTED_BYTES = 2**18
"""Of the answer to `branch.select`, above which it is not kept."""


class NativeDoor:
    """Carries out what owners do with their sessions.

    Args:
        changes: How sessions are changed.
        runner: Ends the answer in progress.
        requests: Lets a session share what another one holds.
        store: Has the sessions.
        attachments: Knows who listens.
        limits: Bounds.
        new_id: Makes ids with a prefix.
        clock: Gives Unix seconds.
    """

    def __init__(
        self,
        changes: OwnerChanges,
        runner: TurnRunner,
        requests: EngineRequests,
        store: SessionStore,
        attachments: Attachments,
        limits: SessionLimits,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._changes = changes
        self._runner = runner
        self._requests = requests
        self._store = store
        self._attachments = attachments
        self._limits = limits
        self._new_id = new_id
        self._clock = clock

    async def create(self, owner: Owner, command: SessionCreate, receipt: Receipt | None) -> Session:
        """Open a session; see `SessionManager.create`."""
        messages = list(command.messages)
        system = command.system
        if messages:
            check_messages(messages, self._limits)
        if messages and messages[0].role == "system":
            if system is not None:
                raise InvalidRequest("system is given twice, as a field and as the first message", param="system")
            system = messages.pop(0).content
        if system is not None:
            check_size((system,), self._limits.max_content_bytes)
        self._changes.check_params(command.params)
        with self._store.opening(owner):
            self._store.check_text_room(owner, [system or "", *(message.content for message in messages)])
            session = self._store.make(owner, Conversation(system))
            session.params = command.params
            session.metadata = dict(command.metadata)
            session.context_policy = command.context_policy or self._limits.context_policy
            session.title = command.title or ""
            for message in messages:
                self._changes.add_message(session, self._new_id("msg"), message, session.conversation.head)
            if self._changes.keeps(session):
                added = [SaveMessage(session.id, self._record_of(node)) for node in session.conversation.path()]
                answer = SessionCreated(session=session.info(), head_seq=0, re=command.id)
                await self._changes.save(
                    session, [self._changes.saved(session), *added, *self._changes.kept(receipt, owner, answer)]
                )
            self._store.add(session)
        return session

    async def update(self, session: Session, command: SessionUpdate, re: str | None, asked: Asked) -> None:
        """Change what the command names; see `SessionManager.update`."""
        session.check_writer(asked.subscriber)
        async with self._changes.changing(session):
            if command.system is not None:
                check_free(session)
                check_size((command.system,), self._limits.max_content_bytes)
                self._store.check_text_room(session.owner, [command.system], session)
            if command.params is not None:
                self._changes.check_params(command.params)
            named = ("title", "system", "params", "metadata", "context_policy", "archived", "pinned")
            changes = {name: value for name in named if (value := getattr(command, name)) is not None}
            record = self._changes.record(session, **changes)
            if self._changes.keeps(session):
                info = msgspec.structs.replace(session.info(), **changes)
                event = SessionUpdated(session=session.id, seq=0, ts=self._clock(), info=info, re=re)
                await self._changes.save(
                    session, [SaveSession(record), *self._changes.kept(asked.receipt, session.owner, event)]
                )
            session.take(record)
            session.emit_updated(re, asked.subscriber)

    async def close(self, session: Session, command_id: str | None, asked: Asked) -> SessionClosed:
        """Release a session's KV and keep its text; see `SessionManager.close`."""
        session.check_writer(asked.subscriber)
        while True:
            while (turn := session.turn) is not None:
                self._runner.cancel(turn)
                await turn.ended.wait()
            async with self._changes.changing(session):
                if session.turn is None:  # Else it began while the lock was waited for.
                    closed = await self._close(session, command_id, asked)
                    break
        self._store.make_room(session.owner)
        return closed

    async def _close(self, session: Session, command_id: str | None, asked: Asked) -> SessionClosed:
        held, shared = session.latest.blocks_held, session.latest.blocks_shared
        closed = SessionClosed(session=session.id, blocks=held, shared_blocks=shared, re=command_id)
        if self._changes.keeps(session):
            kept = self._changes.kept(asked.receipt, session.owner, closed)
            await self._changes.save(session, [self._changes.saved(session, closed=True), *kept])
        self._attachments.close(session, closed, asked.subscriber)
        if not session.closed:
            self._store.close(session)
        return closed

    async def fork(self, session: Session, command: SessionFork, asked: Asked) -> tuple[Session, Forked]:
        """Open a session with the first messages of another one; see `SessionManager.fork`."""
        session.check_writer(asked.subscriber)
        owner = session.owner
        async with self._changes.changing(session):
            source = session.conversation
            node = self._changes.item_or_head(session, command.at, "at")
            if node is not None and node.status == "in_progress":
                raise Conflict(
                    f"session {session.id} has an answer in progress, and only what has ended can be shared",
                    code="session_busy",
                    param="at",
                    hint="name a message before the answer as at, or wait for its end",
                )
            with self._store.opening(owner):
                conversation = Conversation(source.system, node)
                self._store.check_text_room(owner, [source.system or ""], num_bytes=conversation.num_bytes)
                fork = self._store.make(owner, conversation)
                fork.title = session.title if command.title is None else command.title
                fork.context_policy = session.context_policy
                fork.params, fork.metadata, fork.date = session.params, dict(session.metadata), session.date
                for shared in conversation.path():
                    fork.emit_item(shared)
                forked = Forked(fork.lease.id, 0, 0)
                try:
                    if node is not None:
                        forked = await self._requests.fork(session, node, fork)
                    if self._changes.keeps(fork):
                        answer = self.created(fork, forked, command.id)
                        ids = tuple(shared.id for shared in conversation.path())
                        shares = ShareMessages(fork.id, ids)
                        kept = self._changes.kept(asked.receipt, owner, answer)
                        # The messages as this vocabulary has them, where the journal does not have them so yet.
                        source_too = [self._changes.saved(session)] if session.recoded else []
                        await self._changes.save(session, [*source_too, self._changes.saved(fork), shares, *kept])
                except BaseException:
                    self._requests.release(fork, self._store.new_lease())
                    raise
                self._store.add(fork)
        if forked.num_blocks:
            fork.latest.tier = Tier.DEVICE
            fork.latest.blocks_held = fork.latest.blocks_shared = forked.num_blocks
        return fork, forked

    def created(self, fork: Session, forked: Forked, re: str | None) -> SessionCreated:
        """Return the answer to a fork."""
        return SessionCreated(
            session=fork.info(),
            shared_tokens=forked.num_tokens,
            shared_blocks=forked.num_blocks,
            copies_on_write=int(forked.num_tokens % self._runner.model.block_size > 0),
            re=re,
        )

    async def select_branch(self, session: Session, command: BranchSelect, asked: Asked) -> None:
        """Make a message the head; see `SessionManager.select_branch`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changes.changing(session):
            check_free(session)
            leaf, shown = self._changes.item(session, command.leaf, "leaf"), session.conversation.head
            if self._changes.keeps(session):
                event = session.branch_event(shown, leaf, seq=0, re=command.id)
                record = headed(self._changes.record(session, updated_at=self._clock()), leaf)
                kept = self._changes.kept(asked.receipt, session.owner, event)
                # It may have all of the conversation, and to be done again does no harm.
                kept = [answer for answer in kept if len(answer.event) <= MAX_SELECTED_BYTES]
                await self._changes.save(session, [SaveSession(record), *kept])
            session.conversation.select(leaf)
            session.updated_at = self._clock()
            session.emit_branch(shown, leaf, command.id, asked.subscriber)
            session.emit_usage()

    def _record_of(self, node: Node) -> MessageRecord:
        parent = None if node.parent is None else node.parent.id
        return message_record(node.id, node.role, node.content, parent, self._clock())
