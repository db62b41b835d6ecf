"""What owners say in their sessions, and what is answered. `SessionManager` says what each verb promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getsizeof

import msgspec

from chatd.errors import Conflict, InvalidRequest
from chatd.journal.records import Change, SaveMessage
from chatd.protocol import (
    Item,
    ItemAdded,
    Message,
    MessageEdit,
    Params,
    ResponseContinue,
    ResponseCreated,
    ResponseRegenerate,
    Role,
    SessionTier,
    UserMessage,
)
from chatd.sessions.conversation import MESSAGE_OVERHEAD_BYTES
from chatd.sessions.events import Subscriber
from chatd.sessions.limits import SessionLimits
from chatd.sessions.logs import Node
from chatd.sessions.owner_changes import Asked, OwnerChanges
from chatd.sessions.restoring import response_of
from chatd.sessions.session import Session
from chatd.sessions.store import SessionStore
from chatd.sessions.stored import message_record
from chatd.sessions.tokenizer import check_size
from chatd.sessions.turn import Turn
from chatd.sessions.turns import AlsoKept, Begun, TurnRunner, check_free
from chatd.titles import title_of


class NativeTurns:
    """Adds messages to sessions and starts answers.

    Args:
        changes: How sessions are changed.
        runner: Runs the turns.
        store: Knows how much an owner may have.
        limits: Bounds.
        new_id: Makes ids with a prefix.
        clock: Gives Unix seconds.
    """

    def __init__(
        self,
        changes: OwnerChanges,
        runner: TurnRunner,
        store: SessionStore,
        limits: SessionLimits,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._changes = changes
        self._runner = runner
        self._store = store
        self._limits = limits
        self._new_id = new_id
        self._clock = clock

    async def user_message(self, session: Session, command: UserMessage, asked: Asked) -> None:
        """Add a message and start its answer; see `SessionManager.user_message`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changes.changing(session):
            parent = self._changes.item_or_head(session, command.parent, "parent")
            await self._say(session, "user", parent, command, asked)

    async def edit(self, session: Session, command: MessageEdit, asked: Asked) -> None:
        """Put a message beside another one; see `SessionManager.edit`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changes.changing(session):
            node = self._changes.item(session, command.item, "item")
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
        self._check_room(session, command.content)
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
            used = self._changes.used(session, **length, **({"title": title} if title else {}))
            return [used, *self._changes.kept(asked.receipt, session.owner, event)]

        depth, num_tokens = (0, 0) if parent is None else (parent.depth, parent.num_tokens)
        if not command.respond:
            if command.params is not None:
                self._changes.check_params(command.params)
            node_id = self._new_id("msg")
            if self._changes.keeps(session):
                record = message_record(
                    node_id, role, command.content, None if parent is None else parent.id, self._clock()
                )
                added = SaveMessage(session.id, record)
                await self._changes.save(session, [added, *kept(node_id, node_id, depth + 1, num_tokens)])
            self._changes.add_message(session, node_id, message, parent, re=command.id, sender=asked.subscriber)
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
        async with self._changes.changing(session):
            check_free(session)
            node = self._changes.item_or_head(session, command.item, "item")
            answered = node.parent if node is not None and node.role == "assistant" else node
            if answered is None or answered.role != "user":
                raise InvalidRequest("there is no message of the user to answer", param="item")
            self._check_room(session, "")
            own = command.params or Params()
            params = msgspec.structs.replace(own.over(session.params), seed=own.seed)

            await self._answer_again(session, answered, params, command.id, asked)

    async def go_on(self, session: Session, command: ResponseContinue, asked: Asked) -> None:
        """Go on from an answer that was cut short; see `SessionManager.go_on`."""
        session.check_writer(asked.subscriber)
        check_free(session)
        async with self._changes.changing(session):
            check_free(session)
            node = self._changes.item_or_head(session, command.item, "item")
            if node is None or node.role != "assistant" or node.parent is None:
                raise InvalidRequest("there is no answer to go on from", param="item")
            if node.status != "incomplete" or not node.is_answer:
                why = "is complete" if node.status == "completed" else "has no tokens any more"
                raise Conflict(
                    f"answer {node.id} {why}", code="not_continuable", param="item", hint="regenerate it instead"
                )
            self._check_room(session, node.content)
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
            used = self._changes.used(
                session, head=begun.answer_id, num_items=answered.depth + 1, num_tokens=begun.num_tokens
            )
            return [used, *self._changes.kept(asked.receipt, session.owner, event)]

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
            session.listeners.tell(SessionTier(session=session.id, tier=str(session.latest.tier), why="vocabulary"))

    def cancel(self, session: Session, subscriber: Subscriber | None) -> None:
        """End the answer in progress; see `SessionManager.cancel`."""
        session.check_writer(subscriber)
        if session.turn is None:
            raise Conflict(f"session {session.id} has no answer in progress", code="not_responding")
        self._runner.cancel(session.turn)

    def _reopen(self, session: Session) -> None:
        """Note that a session is used, also one that was closed."""
        session.closed = False
        session.updated_at = self._clock()
        self._store.make_room(session.owner, session)

    def _entitle(self, session: Session, title: str | None) -> str | None:
        """Give a session that has no title one from its first words, and return it."""
        if not title:
            return None
        session.title = title
        session.emit_updated()
        return title

    def _check_room(self, session: Session, content: str) -> None:
        """Refuse a message that is too large, or for which its session or its owner has no room."""
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
        if session.closed:
            self._store.check_room(session.owner)
