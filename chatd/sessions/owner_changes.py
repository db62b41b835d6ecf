"""How a session is changed for its owner: under its lock, checked, made durable, and only then with effect and told.

The verbs are in `native` and `native_turns`; this is what they have in common.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chatd.engine.messages import RequestClass
from chatd.errors import InvalidRequest
from chatd.journal.records import Change, SaveAnswer, SaveSession, SessionRecord
from chatd.protocol import Event, Message, Params
from chatd.sessions.conversation import Owner
from chatd.sessions.events import Subscriber
from chatd.sessions.loading import SessionLoader
from chatd.sessions.logs import Node
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.recorder import Receipt, Recorder
from chatd.sessions.session import Session
from chatd.sessions.stored import session_record


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


class OwnerChanges:
    """Changes sessions for their owners.

    Args:
        recorder: Makes changes durable.
        loader: Has messages in memory.
        model: Gives the served model.
        clock: Gives Unix seconds.
    """

    def __init__(
        self, recorder: Recorder, loader: SessionLoader, model: Callable[[], ModelProfile], clock: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._loader = loader
        self._model = model
        self._clock = clock

    @contextlib.asynccontextmanager
    async def changing(self, session: Session) -> AsyncIterator[None]:
        """Keep everybody else from changing a session, and have its messages in memory."""
        async with session.lock:
            session.check_there()
            await self._loader.load(session)
            yield

    def keeps(self, session: Session) -> bool:
        """Return whether a session is in the journal, so that its changes are made durable first."""
        return self._recorder.keeps(session)

    async def save(self, session: Session, changes: Sequence[Change]) -> None:
        """Make changes of a session durable that have its record among them; see `Recorder.save`."""
        await self._recorder.save(session, changes)

    def record(self, session: Session, **changes: Any) -> SessionRecord:
        """Return a session as the journal has it, with these changes."""
        return session_record(session, model=self._model().id, **changes)

    def saved(self, session: Session, **changes: Any) -> SaveSession:
        """Return the change that keeps a session, with these changes."""
        return SaveSession(self.record(session, **changes))

    def used(self, session: Session, **changes: Any) -> SaveSession:
        """Return a session that is used now, so it is open, with these changes."""
        return self.saved(session, closed=False, updated_at=self._clock(), **changes)

    def kept(self, receipt: Receipt | None, owner: Owner, answer: Event) -> list[SaveAnswer]:
        """Return the change that keeps the answer to a command, where it has a receipt."""
        return [] if receipt is None else [receipt.of(owner, answer, self._clock())]

    def item(self, session: Session, item_id: str, param: str) -> Node:
        """Return the message that a command names."""
        node = session.conversation.get(item_id)
        if node is None:
            raise InvalidRequest(f"{item_id[:64]!r} is no message of this session", param=param)
        return node

    def item_or_head(self, session: Session, item_id: str | None, param: str) -> Node | None:
        """As `item`; the head where a command names none."""
        return session.conversation.head if item_id is None else self.item(session, item_id, param)

    def add_message(
        self,
        session: Session,
        node_id: str,
        message: Message,
        parent: Node | None,
        *,
        re: str | None = None,
        sender: Subscriber | None = None,
    ) -> None:
        """Add a message that nothing answers, and tell."""
        session.emit_way_to(parent, session.conversation.head)
        node = session.conversation.add_message(node_id, message.role, message.content, parent)
        session.updated_at = self._clock()
        session.emit_item(node, re, sender)

    def check_params(self, params: Params) -> None:
        """Refuse parameters that no prompt could use."""
        self._model().resolve(params, 0)
