"""Sessions as an app sees them, over a connection that may be lost and come back."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from chatd.client.queue import EventQueue
from chatd.client.turn import Turn
from chatd.errors import ChatdError, EngineError, Unavailable
from chatd.protocol import (
    AttachRole,
    BranchSelect,
    BranchSelected,
    Event,
    HistoryScope,
    Item,
    ItemAdded,
    MessageEdit,
    OutputTextDelta,
    Params,
    Prefill,
    PrefillState,
    ResponseCancel,
    ResponseContinue,
    ResponseRegenerate,
    SessionAttach,
    SessionAttached,
    SessionCreated,
    SessionDetach,
    SessionDetached,
    SessionInfo,
    SessionUpdated,
    Snapshot,
    TranscriptEvent,
    UserMessage,
)

if TYPE_CHECKING:
    from chatd.client.link import Connection

_TRANSCRIPT = TranscriptEvent.__args__


def new_id() -> str:
    """Return a fresh command id."""
    return str(uuid.uuid4())


class Session:
    """One conversation, attached over its client's connection.

    Attributes:
        id: Of the session.
        info: As the daemon last described it; None before the first description.
        seq: The last event of the transcript that arrived.
        snapshot: Of the last attachment that came with one.
        created: The daemon's answer where this client made the session; of a fork it says what is shared.
    """

    def __init__(self, connection: Connection, ident: str) -> None:
        self.id = ident
        self.info: SessionInfo | None = None
        self.seq = 0
        self.snapshot: Snapshot | None = None
        self.created: SessionCreated | None = None
        self._connection = connection
        self._boot = ""
        self._role: AttachRole = "writer"
        self._history: HistoryScope = "full"
        self._attached = False
        self._resyncing = False
        self._num_gaps = 0
        self._queues: list[EventQueue] = []

    def say(self, content: str, *, params: Params | None = None) -> Turn:
        """Say something; iterate the turn for its events. It is sent when the iteration begins."""
        return Turn(self._connection, self, UserMessage(id=new_id(), session=self.id, content=content, params=params))

    def edit(self, item: str, content: str, *, params: Params | None = None) -> Turn:
        """Say something else in the place of a message of the user's; iterate the turn for the answer to it."""
        command = MessageEdit(id=new_id(), session=self.id, item=item, content=content, params=params)
        return Turn(self._connection, self, command)

    def regenerate(self, item: str | None = None, *, params: Params | None = None) -> Turn:
        """Have another answer beside `item`, else beside the last one; iterate the turn for it."""
        command = ResponseRegenerate(id=new_id(), session=self.id, item=item, params=params)
        return Turn(self._connection, self, command)

    def continue_(self, item: str | None = None, *, max_tokens: int | None = None) -> Turn:
        """Go on from an answer that was cut short, `item` or the last one; iterate the turn for the rest of it.

        `Turn.text` is the whole answer.
        """
        command = ResponseContinue(id=new_id(), session=self.id, item=item, max_tokens=max_tokens)
        return Turn(self._connection, self, command)

    async def rewrite(self, item: str, content: str) -> Item:
        """Put another text beside any message, without an answer, and return it."""
        command = MessageEdit(id=new_id(), session=self.id, item=item, content=content, respond=False)
        added, _ = await self._connection._ask(command, ItemAdded, session=self.id)
        return added.item

    async def select_branch(self, leaf: str) -> BranchSelected:
        """Make the conversation the path to a message; return where that parts from what was shown, and its items."""
        command = BranchSelect(id=new_id(), session=self.id, leaf=leaf)
        selected, _ = await self._connection._ask(command, BranchSelected, session=self.id)
        return selected

    async def stream(self, content: str, *, params: Params | None = None) -> AsyncIterator[str]:
        """Say something and yield the answer's text as it comes.

        Raises:
            ChatdError: The turn was refused or failed, or a restarted daemon has another answer than was yielded; one
                that goes on where it was is one text.
        """
        turn = self.say(content, params=params)
        async for event in turn:
            if isinstance(event, OutputTextDelta):
                yield event.delta
            elif isinstance(event, SessionAttached) and turn.text:
                raise EngineError("the daemon restarted and lost a part of this answer", code="answer_replaced")

    async def send(self, content: str, *, params: Params | None = None) -> Item:
        """Say something and return the message once the daemon has it, for those who follow the session's events."""
        command = UserMessage(id=new_id(), session=self.id, content=content, params=params)
        added, _ = await self._connection._ask(command, ItemAdded, session=self.id)
        return added.item

    async def prefill(self, content: str | None) -> PrefillState:
        """Have what is being typed computed before it is sent; None takes it back.

        Returns what is computed by now; `PrefillState` comes to those who follow when there is more.
        """
        command = Prefill(id=new_id(), session=self.id, content=content)
        state, _ = await self._connection._ask(command, PrefillState, session=self.id)
        return state

    async def cancel(self) -> None:
        """End the answer in progress and return when it has ended; what is there is kept."""
        command = ResponseCancel(id=new_id(), session=self.id)
        await self._connection._ask(command, object, session=self.id, ends_with_response=True)

    async def detach(self) -> None:
        """Receive no more of this session's events."""
        await self._connection._ask(SessionDetach(id=new_id(), session=self.id), SessionDetached)
        error = Unavailable("this client detached from the session", code="detached")
        self._connection._drop_session(self.id, error)

    @contextlib.contextmanager
    def _listen(self) -> Iterator[EventQueue]:
        queue = EventQueue()
        self._queues.append(queue)
        try:
            yield queue
        finally:
            self._queues.remove(queue)

    def _begin(self, info: SessionInfo, head_seq: int) -> None:
        self.info = info
        self.seq = max(self.seq, head_seq)
        self._boot = self._connection.hello.boot
        self._attached = True

    def _resume_command(self, *, fresh: bool) -> SessionAttach:
        return SessionAttach(
            id=new_id(),
            session=self.id,
            after_seq=None if fresh else self.seq,
            boot=None if fresh else self._boot,
            role=self._role,
            history=self._history,
        )

    def _attached_again(self, event: SessionAttached) -> None:
        self._attached = True
        self._resyncing = False
        self._boot = self._connection.hello.boot
        if event.snapshot is not None:
            self.snapshot = event.snapshot
            self.info = event.snapshot.session
        if event.replay == "exact":
            return
        self.seq = event.head_seq
        for queue in self._queues:
            queue.put(event)
        if event.snapshot is not None and event.snapshot.response is None:
            self._connection._response_ended(self.id)

    def _deliver(self, event: Event) -> None:
        """Hand an event to everybody who follows, once and in order; a gap asks the daemon for what is missing."""
        if isinstance(event, _TRANSCRIPT):
            if self._resyncing or event.seq <= self.seq:
                return
            first = event.seq
            if isinstance(event, OutputTextDelta) and event.seq_from is not None:
                first = event.seq_from
            if first != self.seq + 1:
                self._num_gaps += 1
                self._connection._resync(self, fresh=first <= self.seq or self._num_gaps > 1)
                return
            self.seq = event.seq
            self._num_gaps = 0
            if isinstance(event, SessionUpdated):
                self.info = event.info
        for queue in self._queues:
            queue.put(event)

    def _fail(self, error: ChatdError) -> None:
        self._attached = False
        for queue in self._queues:
            queue.fail(error)
