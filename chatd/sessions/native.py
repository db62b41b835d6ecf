"""The native door: sessions that their owners see, name and keep. `SessionManager` says what each verb promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatd.engine.messages import RequestClass
from chatd.errors import Conflict, InvalidRequest, PermissionDenied
from chatd.protocol import Message, Params, SessionCreate, SessionUpdate, UserMessage
from chatd.sessions.attachments import Attachments
from chatd.sessions.conversation import Conversation, Node, Owner
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
        store: Has the sessions.
        attachments: Knows who listens.
        limits: Bounds.
        new_id: Makes ids with a prefix.
        clock: Gives Unix seconds.
    """

    def __init__(
        self,
        runner: TurnRunner,
        store: SessionStore,
        attachments: Attachments,
        limits: SessionLimits,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
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
            if session.conversation.head is not None:
                raise Conflict("system cannot change after the first message", code="system_fixed")
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

    async def user_message(
        self, session: Session, command: UserMessage, subscriber: Subscriber | None, request_class: RequestClass
    ) -> None:
        """Add a message and start its answer; see `SessionManager.user_message`."""
        _check_writer(session, subscriber)
        check_free(session)
        self._check_text(session, command.content)
        parent = session.conversation.head
        if command.parent is not None:
            parent = session.conversation.get(command.parent)
            if parent is None:
                raise InvalidRequest(f"{command.parent[:64]!r} is no message of this session", param="parent")
        if session.closed:
            self._store.check_room(session.owner)
        message = Message(role="user", content=command.content)
        if not command.respond:
            if command.params is not None:
                self._check_params(command.params)
            node = self._add_message(session, message, parent, re=command.id, sender=subscriber)
            self._entitle(session, node)
            session.closed = False
            self._store.trim_closed(session.owner)
            return

        def on_accepted(turn: Turn, added: Sequence[Node]) -> None:
            session.closed = False
            session.updated_at = self._clock()
            for node in added:
                session.emit_item(node, command.id, subscriber)
                turn.given_title = self._entitle(session, node)
            session.emit_created(turn)
            self._store.trim_closed(session.owner)

        await self._runner.begin(
            session,
            [message],
            parent=parent,
            params=command.params or Params(),
            sink=session,
            request_class=request_class,
            on_accepted=on_accepted,
        )

    def cancel(self, session: Session, subscriber: Subscriber | None) -> None:
        """End the answer in progress; see `SessionManager.cancel`."""
        _check_writer(session, subscriber)
        if session.turn is None:
            raise Conflict(f"session {session.id} has no answer in progress", code="not_responding")
        self._runner.cancel(session.turn)

    def _add_message(
        self,
        session: Session,
        message: Message,
        parent: Node | None,
        *,
        re: str | None = None,
        sender: Subscriber | None = None,
    ) -> Node:
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
