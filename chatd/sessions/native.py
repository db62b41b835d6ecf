"""The native door: sessions that their owners see, name and keep. `SessionManager` says what each verb promises."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any

import msgspec

from chatd.engine.messages import Forked, RequestClass, Tier
from chatd.errors import Conflict, InvalidRequest
from chatd.journal.records import (
    Change,
    MessageRecord,
    SaveAnswer,
    SaveMessage,
    SaveSession,
    SessionRecord,
    ShareMessages,
)
from chatd.protocol import (
    BranchSelect,
    Event,
    Item,
    ItemAdded,
    Message,
    MessageEdit,
    Params,
    ResponseContinue,
    ResponseCreated,
    ResponseRegenerate,
    Role,
    SessionClosed,
    SessionCreate,
    SessionCreated,
    SessionFork,
    SessionTier,
    SessionUpdate,
    SessionUpdated,
    UserMessage,
)
from chatd.sessions.attachments import Attachments
from chatd.sessions.conversation import MESSAGE_OVERHEAD_BYTES, Conversation, Node, Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.events import Subscriber
from chatd.sessions.limits import SessionLimits
from chatd.sessions.recorder import Receipt, Recorder
from chatd.sessions.restoring import response_of
from chatd.sessions.session import Session, title_of
from chatd.sessions.stateless import check_messages
from chatd.sessions.store import SessionStore
from chatd.sessions.stored import headed, message_record, session_record
from chatd.sessions.tokenizer import check_size
from chatd.sessions.turn import Turn
from chatd.sessions.turns import AlsoKept, Begun, TurnRunner, check_free

MAX_SELECTED_BYTES = 2**18
"""Of the answer to `branch.select`, above which it is not kept."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asked for something, and how.

    Attributes:
        subscriber: The connection; it gets the answer, attached or not.
        key_id: Whose usage it is.
        request_class: Place of an answer in the schedule.
        receipt: Has the answer kept, for when the command comes again.
    """

    subscriber: Subscriber | None = None
    key_id: str = ""
    request_class: RequestClass = RequestClass.INTERACTIVE
    receipt: Receipt | None = None


class NativeDoor:
    """Carries out what owners do with their sessions.

    Each change is checked, made durable, and then has its effect and is told, all under the session's lock.

    Args:
        runner: Runs the turns.
        requests: Lets a session share what another one holds.
        store: Has the sessions.
        recorder: Makes changes durable.
        attachments: Knows who listens.
        limits: Bounds.
        new_id: Makes ids with a prefix.
        clock: Gives Unix seconds.
    """

    def __init__(
        self,
        runner: TurnRunner,
        requests: EngineRequests,
        store: SessionStore,
        recorder: Recorder,
        attachments: Attachments,
        limits: SessionLimits,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._store = store
        self._recorder = recorder
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
        self._check_params(command.params)
        with self._store.opening(owner):
            self._store.check_text_room(owner, [system or "", *(message.content for message in messages)])
            session = self._store.make(owner, Conversation(system))
            session.params = command.params
            session.metadata = dict(command.metadata)
            session.context_policy = command.context_policy or self._limits.context_policy
            session.title = command.title or ""
            for message in messages:
                self._add_message(session, self._new_id("msg"), message, session.conversation.head)
            if self._recorder.is_kept:
                added = [SaveMessage(session.id, self._record_of(node)) for node in session.conversation.path()]
                answer = SessionCreated(session=session.info(), head_seq=0, re=command.id)
                await self._save(session, [self._saved(session), *added, *self._kept(receipt, owner, answer)])
            self._store.add(session)
        return session

    async def update(self, session: Session, command: SessionUpdate, re: str | None, asked: Asked) -> None:
        """Change what the command names; see `SessionManager.update`."""
        session.check_writer(asked.subscriber)
        async with self._changing(session):
            if command.system is not None:
                check_free(session)
                check_size((command.system,), self._limits.max_content_bytes)
                self._store.check_text_room(session.owner, [command.system], session)
            if command.params is not None:
                self._check_params(command.params)
            named = ("title", "system", "params", "metadata", "context_policy", "archived", "pinned")
            changes = {name: value for name in named if (value := getattr(command, name)) is not None}
            record = self._record(session, **changes)
            if self._recorder.keeps(session):
                info = msgspec.structs.replace(session.info(), **changes)
                event = SessionUpdated(session=session.id, seq=0, ts=self._clock(), info=info, re=re)
                await self._save(session, [SaveSession(record), *self._kept(asked.receipt, session.owner, event)])
            session.take(record)
            session.emit_updated(re, asked.subscriber)

    async def close(self, session: Session, command_id: str | None, asked: Asked) -> None:
        """Release a session's KV and keep its text; see `SessionManager.close`."""
        session.check_writer(asked.subscriber)
        is_closed = False
        while not is_closed:
            while (turn := session.turn) is not None:
                self._runner.cancel(turn)
                await turn.ended.wait()
            async with self._changing(session):
                if session.turn is not None:
                    continue  # It began while the lock was waited for.
                if self._recorder.keeps(session):
                    answer = SessionClosed(session=session.id, re=command_id)
                    kept = self._kept(asked.receipt, session.owner, answer)
                    await self._save(session, [self._saved(session, closed=True), *kept])
                self._attachments.close(session, command_id, asked.subscriber)
                if not session.closed:
                    self._store.close(session)
                is_closed = True
        self._store.make_room(session.owner)

    async def fork(self, session: Session, command: SessionFork, asked: Asked) -> tuple[Session, Forked]:
        """Open a session with the first messages of another one; see `SessionManager.fork`."""
        session.check_writer(asked.subscriber)
        owner = session.owner
        async with self._changing(session):
            source = session.conversation
            node = source.head if command.at is None else self._item(session, command.at, "at")
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
                    if self._recorder.keeps(fork):
                        answer = self.created(fork, forked, command.id)
                        ids = tuple(shared.id for shared in conversation.path())
                        shares = ShareMessages(fork.id, ids)
                        kept = self._kept(asked.receipt, owner, answer)
                        # The messages as this vocabulary has them, where the journal does not have them so yet.
                        source_too = [self._saved(session)] if session.recoded else []
                        await self._save(session, [*source_too, self._saved(fork), shares, *kept])
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

    async def user_message(self, session: Session, command: UserMessage, asked: Asked) -> None:
        """Add a message and start its answer; see `SessionManager.user_message`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changing(session):
            head = session.conversation.head
            parent = head if command.parent is None else self._item(session, command.parent, "parent")
            await self._say(session, "user", parent, command, asked)

    async def edit(self, session: Session, command: MessageEdit, asked: Asked) -> None:
        """Put a message beside another one; see `SessionManager.edit`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changing(session):
            node = self._item(session, command.item, "item")
            if node.role != "user" and command.respond:
                raise InvalidRequest(
                    f"{node.id} is the {node.role}'s, and an answer follows the user's messages only",
                    param="respond",
                    hint="edit it with respond: false",
                )
            await self._say(session, node.role, node.parent, command, asked)

    async def _say(
        self, session: Session, role: Role, parent: Node | None, command: UserMessage | MessageEdit, asked: Asked
    ) -> None:
        """Add a message after `parent`, with its answer where the command wants one."""
        check_free(session)
        self._check_text(session, command.content)
        if session.closed:
            self._store.check_room(session.owner)
        message = Message(role=role, content=command.content)
        title = None if session.title else title_of(command.content)

        def kept(node_id: str, head: str, num_items: int, num_tokens: int) -> list[Change]:
            """Return what is durable together with the message."""
            item = Item(
                id=node_id,
                role=role,
                content=command.content,
                status="completed",
                parent=None if parent is None else parent.id,
                siblings=session.conversation.siblings_after(parent),
            )
            event = ItemAdded(session=session.id, seq=0, ts=self._clock(), item=item, re=command.id)
            num_bytes = session.num_bytes + MESSAGE_OVERHEAD_BYTES + getsizeof(command.content)
            length = {"head": head, "num_items": num_items, "num_tokens": num_tokens, "num_bytes": num_bytes}
            used = self._used(session, **length, **({"title": title} if title else {}))
            return [used, *self._kept(asked.receipt, session.owner, event)]

        depth, num_tokens = (0, 0) if parent is None else (parent.depth, parent.num_tokens)
        if not command.respond:
            if command.params is not None:
                self._check_params(command.params)
            node_id = self._new_id("msg")
            if self._recorder.keeps(session):
                record = message_record(
                    node_id, role, command.content, None if parent is None else parent.id, self._clock()
                )
                added = SaveMessage(session.id, record)
                await self._save(session, [added, *kept(node_id, node_id, depth + 1, num_tokens)])
            self._add_message(session, node_id, message, parent, re=command.id, sender=asked.subscriber)
            self._entitle(session, title)
            self._reopen(session)
            return

        def on_accepted(turn: Turn, added: Sequence[Node]) -> None:
            session.emit_way_to(parent, turn.previous_head)
            for node in added:
                session.emit_item(node, command.id, asked.subscriber)
                turn.given_title = self._entitle(session, title)
            session.emit_created(turn)
            self._reopen(session)

        params = (command.params or Params()).over(session.params)
        await self._begin(
            session,
            [message],
            parent,
            params,
            asked,
            on_accepted,
            lambda begun: kept(begun.messages[0][0], begun.answer_id, depth + 2, begun.num_tokens),
        )

    async def regenerate(self, session: Session, command: ResponseRegenerate, asked: Asked) -> None:
        """Start another answer to what was answered; see `SessionManager.regenerate`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changing(session):
            check_free(session)
            node = session.conversation.head if command.item is None else self._item(session, command.item, "item")
            answered = node.parent if node is not None and node.role == "assistant" else node
            if answered is None or answered.role != "user":
                raise InvalidRequest("there is no message of the user to answer", param="item")
            self._check_text(session, "")
            if session.closed:
                self._store.check_room(session.owner)
            own = command.params or Params()
            params = msgspec.structs.replace(own.over(session.params), seed=own.seed)

            await self._answer_again(session, answered, params, command.id, asked)

    async def go_on(self, session: Session, command: ResponseContinue, asked: Asked) -> None:
        """Go on from an answer that was cut short; see `SessionManager.go_on`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changing(session):
            check_free(session)
            node = session.conversation.head if command.item is None else self._item(session, command.item, "item")
            if node is None or node.role != "assistant" or node.parent is None:
                raise InvalidRequest("there is no answer to go on from", param="item")
            if node.status != "incomplete" or not node.is_answer:
                why = "is complete" if node.status == "completed" else "has no tokens any more"
                raise Conflict(
                    f"answer {node.id} {why}", code="not_continuable", param="item", hint="regenerate it instead"
                )
            self._check_text(session, node.content)
            if session.closed:
                self._store.check_room(session.owner)
            params = Params(max_tokens=command.max_tokens or session.params.max_tokens)
            await self._answer_again(session, node.parent, params, command.id, asked, goes_on=node)

    async def _answer_again(
        self,
        session: Session,
        answered: Node,
        params: Params,
        command_id: str | None,
        asked: Asked,
        goes_on: Node | None = None,
    ) -> None:
        """Start another answer to a message."""

        def kept(begun: Begun) -> list[Change]:
            item = Item(
                id=begun.answer_id,
                role="assistant",
                content=begun.text,
                status="in_progress",
                parent=answered.id,
                siblings=session.conversation.siblings_after(answered),
                context_from=begun.prompt.context_from,
            )
            response = response_of(begun.answer_id)
            event = ResponseCreated(
                session=session.id, seq=0, ts=self._clock(), response=response, item=item, re=command_id
            )
            used = self._used(session, head=begun.answer_id, num_items=answered.depth + 1, num_tokens=begun.num_tokens)
            return [used, *self._kept(asked.receipt, session.owner, event)]

        def on_accepted(turn: Turn, _added: Sequence[Node]) -> None:
            session.emit_way_to(answered, turn.previous_head)
            session.emit_created(turn, command_id, asked.subscriber)
            self._reopen(session)

        await self._begin(session, [], answered, params, asked, on_accepted, kept, goes_on)

    async def _begin(
        self,
        session: Session,
        messages: Sequence[Message],
        parent: Node | None,
        params: Params,
        asked: Asked,
        on_accepted: Callable[[Turn, Sequence[Node]], None],
        also_kept: AlsoKept,
        goes_on: Node | None = None,
    ) -> None:
        is_recoded = bool(session.recoded)
        await self._runner.begin(
            session,
            messages,
            parent=parent,
            params=params,
            sink=session,
            request_class=asked.request_class,
            on_accepted=on_accepted,
            also_kept=also_kept,
            key_id=asked.key_id,
            goes_on=goes_on,
        )
        if is_recoded:
            session.tell(SessionTier(session=session.id, tier=str(session.latest.tier), why="vocabulary"))

    async def select_branch(self, session: Session, command: BranchSelect, asked: Asked) -> None:
        """Make a message the head; see `SessionManager.select_branch`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changing(session):
            check_free(session)
            leaf, shown = self._item(session, command.leaf, "leaf"), session.conversation.head
            if self._recorder.keeps(session):
                event = session.branch_event(shown, leaf, seq=0, re=command.id)
                record = headed(self._record(session, updated_at=self._clock()), leaf)
                kept = self._kept(asked.receipt, session.owner, event)
                # It may have all of the conversation, and to be done again does no harm.
                kept = [answer for answer in kept if len(answer.event) <= MAX_SELECTED_BYTES]
                await self._save(session, [SaveSession(record), *kept])
            session.conversation.select(leaf)
            session.updated_at = self._clock()
            session.emit_branch(shown, leaf, command.id, asked.subscriber)
            session.emit_usage()

    def cancel(self, session: Session, subscriber: Subscriber | None) -> None:
        """End the answer in progress; see `SessionManager.cancel`."""
        session.check_writer(subscriber)
        if session.turn is None:
            raise Conflict(f"session {session.id} has no answer in progress", code="not_responding")
        self._runner.cancel(session.turn)

    # What is kept.

    @contextlib.asynccontextmanager
    async def _changing(self, session: Session) -> AsyncIterator[None]:
        """Keep everybody else from changing a session, and have its messages in memory."""
        async with session.lock:
            session.check_there()
            await self._store.loader.load(session)
            yield

    async def _save(self, session: Session, changes: Sequence[Change]) -> None:
        await self._recorder.save(session, changes)

    def _record(self, session: Session, **changes: Any) -> SessionRecord:
        return session_record(session, model=self._runner.model.id, **changes)

    def _saved(self, session: Session, **changes: Any) -> SaveSession:
        return SaveSession(self._record(session, **changes))

    def _used(self, session: Session, **changes: Any) -> SaveSession:
        """Return a session that is used now, so it is open, with these changes."""
        return self._saved(session, closed=False, updated_at=self._clock(), **changes)

    def _kept(self, receipt: Receipt | None, owner: Owner, answer: Event) -> list[SaveAnswer]:
        return [] if receipt is None else [receipt.of(owner, answer, self._clock())]

    def _record_of(self, node: Node) -> MessageRecord:
        parent = None if node.parent is None else node.parent.id
        return message_record(node.id, node.role, node.content, parent, self._clock())

    # Parts.

    def _item(self, session: Session, item_id: str, param: str) -> Node:
        """Return the message that a command names."""
        node = session.conversation.get(item_id)
        if node is None:
            raise InvalidRequest(f"{item_id[:64]!r} is no message of this session", param=param)
        return node

    def _reopen(self, session: Session) -> None:
        """Note that a session is used, also one that was closed."""
        session.closed = False
        session.updated_at = self._clock()
        self._store.make_room(session.owner, session)

    def _add_message(
        self,
        session: Session,
        node_id: str,
        message: Message,
        parent: Node | None,
        *,
        re: str | None = None,
        sender: Subscriber | None = None,
    ) -> None:
        session.emit_way_to(parent, session.conversation.head)
        node = session.conversation.add_message(node_id, message.role, message.content, parent)
        session.updated_at = self._clock()
        session.emit_item(node, re, sender)

    def _entitle(self, session: Session, title: str | None) -> str | None:
        """Give a session that has no title one from its first words, and return it."""
        if not title:
            return None
        session.title = title
        session.emit_updated()
        return title

    def _check_text(self, session: Session, content: str) -> None:
        """Refuse a message that is too large, or would make its session or its owner's sessions so."""
        check_size((content,), self._limits.max_content_bytes)
        held = session.conversation.num_bytes
        if held + len(content) > self._limits.max_session_bytes:
            raise InvalidRequest(
                f"the session has {held} bytes of messages, the limit is {self._limits.max_session_bytes}",
                code="session_too_large",
                param="content",
                hint="start a new session",
            )
        self._store.check_text_room(session.owner, [content], session)

    def _check_params(self, params: Params) -> None:
        """Refuse parameters that no prompt could use."""
        self._runner.model.resolve(params, 0)
