"""The native door: sessions that their owners see, name and keep. `SessionManager` says what each verb promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from chatd.engine.messages import Forked, RequestClass, Tier
from chatd.errors import Conflict, InvalidRequest, PermissionDenied
from chatd.protocol import (
    BranchSelect,
    Message,
    MessageEdit,
    Params,
    ResponseRegenerate,
    Role,
    SessionCreate,
    SessionFork,
    SessionUpdate,
    UserMessage,
)
from chatd.sessions.attachments import Attachments
from chatd.sessions.conversation import Conversation, Node, Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.events import Subscriber
from chatd.sessions.limits import SessionLimits
from chatd.sessions.session import Session, title_of
from chatd.sessions.stateless import check_messages
from chatd.sessions.store import SessionStore
from chatd.sessions.tokenizer import check_size
from chatd.sessions.turn import Turn
from chatd.sessions.turns import TurnRunner, check_free


class NativeDoor:
    """Carries out what owners do with their sessions.

    Args:
        runner: Runs the turns.
        requests: Lets a session share what another one holds.
        store: Has the sessions.
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
        attachments: Attachments,
        limits: SessionLimits,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._store = store
        self._attachments = attachments
        self._limits = limits
        self._new_id = new_id
        self._clock = clock

    def create(self, owner: Owner, command: SessionCreate) -> Session:
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
        self._store.check_room(owner)
        self._store.check_text_room(owner, [system or "", *(message.content for message in messages)])
        session = self._store.open(owner, Conversation(system))
        session.params = command.params
        session.metadata = dict(command.metadata)
        session.context_policy = command.context_policy or self._limits.context_policy
        session.title = command.title or ""
        for message in messages:
            self._add_message(session, message, session.conversation.head)
        self._store.trim_closed(owner)
        return session

    def update(
        self, session: Session, command: SessionUpdate, *, re: str | None, subscriber: Subscriber | None
    ) -> None:
        """Change what the command names; see `SessionManager.update`."""
        _check_writer(session, subscriber)
        if command.system is not None:
            check_free(session)
            check_size((command.system,), self._limits.max_content_bytes)
            self._store.check_text_room(session.owner, [command.system], session)
        if command.params is not None:
            self._check_params(command.params)
        if command.system is not None:
            session.conversation.system = command.system
        if command.params is not None:
            session.params = command.params
        if command.title is not None:
            session.title = command.title
        if command.metadata is not None:
            session.metadata = dict(command.metadata)
        if command.context_policy is not None:
            session.context_policy = command.context_policy
        if command.archived is not None:
            session.archived = command.archived
        if command.pinned is not None:
            session.pinned = command.pinned
        session.emit_updated(re, subscriber)

    async def close(self, session: Session, *, re: str | None, subscriber: Subscriber | None) -> None:
        """Release a session's KV and keep its text; see `SessionManager.close`."""
        _check_writer(session, subscriber)
        while session.turn is not None:
            turn = session.turn
            self._runner.cancel(turn)
            await turn.ended.wait()
        self._attachments.close(session, re, subscriber)
        if not session.closed:
            self._store.close(session)

    async def fork(
        self, session: Session, command: SessionFork, subscriber: Subscriber | None
    ) -> tuple[Session, Forked]:
        """Open a session with the first messages of another one; see `SessionManager.fork`."""
        _check_writer(session, subscriber)
        source = session.conversation
        node = source.head if command.at is None else self._item(session, command.at, "at")
        if node is not None and node.status == "in_progress":
            raise Conflict(
                f"session {session.id} has an answer in progress, and only what has ended can be shared",
                code="session_busy",
                param="at",
                hint="name a message before the answer as at, or wait for its end",
            )
        owner = session.owner
        self._store.check_room(owner)
        conversation = Conversation(source.system, node)
        self._store.check_text_room(owner, [source.system or ""], num_bytes=conversation.num_bytes)
        fork = self._store.open(owner, conversation)
        fork.title = session.title if command.title is None else command.title
        fork.context_policy = session.context_policy
        fork.params, fork.metadata, fork.date = session.params, dict(session.metadata), session.date
        for shared in conversation.path():
            fork.emit_item(shared)
        self._store.trim_closed(owner)
        if node is None:
            return fork, Forked(fork.lease.id, 0, 0)
        try:
            forked = await self._requests.fork(session, node, fork)
        except BaseException:
            self._store.drop(fork)
            raise
        if forked.num_blocks:
            fork.latest.tier = Tier.DEVICE
            fork.latest.blocks_held = fork.latest.blocks_shared = forked.num_blocks
        return fork, forked

    async def user_message(
        self, session: Session, command: UserMessage, subscriber: Subscriber | None, request_class: RequestClass
    ) -> None:
        """Add a message and start its answer; see `SessionManager.user_message`."""
        _check_writer(session, subscriber)
        parent = session.conversation.head if command.parent is None else self._item(session, command.parent, "parent")
        await self._say(session, "user", parent, command, subscriber, request_class)

    async def edit(
        self, session: Session, command: MessageEdit, subscriber: Subscriber | None, request_class: RequestClass
    ) -> None:
        """Put a message beside another one; see `SessionManager.edit`."""
        _check_writer(session, subscriber)
        check_free(session)
        node = self._item(session, command.item, "item")
        if node.role != "user" and command.respond:
            raise InvalidRequest(
                f"{node.id} is the {node.role}'s, and an answer follows the user's messages only",
                param="respond",
                hint="edit it with respond: false",
            )
        await self._say(session, node.role, node.parent, command, subscriber, request_class)

    async def _say(
        self,
        session: Session,
        role: Role,
        parent: Node | None,
        command: UserMessage | MessageEdit,
        subscriber: Subscriber | None,
        request_class: RequestClass,
    ) -> None:
        """Add a message after `parent`, with its answer where the command wants one."""
        check_free(session)
        self._check_text(session, command.content)
        if session.closed:
            self._store.check_room(session.owner)
        message = Message(role=role, content=command.content)
        if not command.respond:
            if command.params is not None:
                self._check_params(command.params)
            node = self._add_message(session, message, parent, re=command.id, sender=subscriber)
            self._entitle(session, node)
            self._reopen(session)
            return

        def on_accepted(turn: Turn, added: Sequence[Node]) -> None:
            session.emit_way_to(parent, turn.previous_head)
            for node in added:
                session.emit_item(node, command.id, subscriber)
                turn.given_title = self._entitle(session, node)
            session.emit_created(turn)
            self._reopen(session)

        params = (command.params or Params()).over(session.params)
        await self._begin(session, [message], parent, params, request_class, on_accepted)

    async def regenerate(
        self, session: Session, command: ResponseRegenerate, subscriber: Subscriber | None, request_class: RequestClass
    ) -> None:
        """Start another answer to what was answered; see `SessionManager.regenerate`."""
        _check_writer(session, subscriber)
        check_free(session)
        node = session.conversation.head if command.item is None else self._item(session, command.item, "item")
        asked = node.parent if node is not None and node.role == "assistant" else node
        if asked is None or asked.role != "user":
            raise InvalidRequest("there is no message of the user to answer", param="item")
        self._check_text(session, "")
        if session.closed:
            self._store.check_room(session.owner)
        own = command.params or Params()
        params = msgspec.structs.replace(own.over(session.params), seed=own.seed)

        def on_accepted(turn: Turn, _added: Sequence[Node]) -> None:
            session.emit_way_to(asked, turn.previous_head)
            session.emit_created(turn, command.id, subscriber)
            self._reopen(session)

        await self._begin(session, [], asked, params, request_class, on_accepted)

    async def _begin(
        self,
        session: Session,
        messages: Sequence[Message],
        parent: Node | None,
        params: Params,
        request_class: RequestClass,
        on_accepted: Callable[[Turn, Sequence[Node]], None],
    ) -> None:
        await self._runner.begin(
            session,
            messages,
            parent=parent,
            params=params,
            sink=session,
            request_class=request_class,
            on_accepted=on_accepted,
        )

    def select_branch(self, session: Session, command: BranchSelect, subscriber: Subscriber | None) -> None:
        """Make a message the head; see `SessionManager.select_branch`."""
        _check_writer(session, subscriber)
        check_free(session)
        leaf, shown = self._item(session, command.leaf, "leaf"), session.conversation.head
        session.conversation.select(leaf)
        session.updated_at = self._clock()
        session.emit_branch(shown, leaf, command.id, subscriber)
        session.emit_usage()

    def cancel(self, session: Session, subscriber: Subscriber | None) -> None:
        """End the answer in progress; see `SessionManager.cancel`."""
        _check_writer(session, subscriber)
        if session.turn is None:
            raise Conflict(f"session {session.id} has no answer in progress", code="not_responding")
        self._runner.cancel(session.turn)

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
        self._store.trim_closed(session.owner)

    def _add_message(
        self,
        session: Session,
        message: Message,
        parent: Node | None,
        *,
        re: str | None = None,
        sender: Subscriber | None = None,
    ) -> Node:
        session.emit_way_to(parent, session.conversation.head)
        node = session.conversation.add_message(self._new_id("msg"), message.role, message.content, parent)
        session.updated_at = self._clock()
        session.emit_item(node, re, sender)
        return node

    def _entitle(self, session: Session, node: Node) -> str | None:
        """Give a session that has no title one from its first words, and return it."""
        title = title_of(node.content)
        if session.title or not title:
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


def _check_writer(session: Session, subscriber: Subscriber | None) -> None:
    if subscriber is not None and session.role_of(subscriber) == "observer":
        raise PermissionDenied("this connection is attached as an observer", code="observer")
