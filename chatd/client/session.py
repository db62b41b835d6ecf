"""Sessions and turns as an app sees them, over a connection that may be lost and come back."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from chatd.client.errors import error_from
from chatd.client.queue import EventQueue
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
    ResponseCompleted,
    ResponseContinue,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseRegenerate,
    SessionAttach,
    SessionAttached,
    SessionCreated,
    SessionDetach,
    SessionDetached,
    SessionInfo,
    SessionUpdated,
    Snapshot,
    Timings,
    TranscriptEvent,
    Usage,
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


class Turn:
    """One message and the answer to it; `async for` yields the session's events until the answer ends.

    Attributes:
        message: The user's message, once the daemon has it; None where an answer is regenerated or goes on.
        item: The finished answer.
        usage: Tokens of the answer.
        timings: Where its time went.
        reason: Why it ended.
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        command: UserMessage | MessageEdit | ResponseRegenerate | ResponseContinue,
    ) -> None:
        self._connection = connection
        self._session = session
        self._command = command
        self._parts: list[str] = []
        self._answer_id: str | None = None
        self._begun: Item | None = None
        self._attached: SessionAttached | None = None
        self._again = ""
        """What was shown of the answer and is still to come again."""
        self.message: Item | None = None
        self.item: Item | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.reason: str | None = None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._parts)

    async def send(self) -> Item:
        """Send it and return the message, or the empty answer of a regeneration, once the daemon has it.

        For those who follow the session's events: the answer comes there. Iterate the turn or send it, not both.
        """
        await self._begin()
        assert self._begun is not None
        return self._begun

    async def cancel(self) -> None:
        """End the answer; the iteration then ends too."""
        await self._session.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        with self._session._listen() as queue:
            first_seq = await self._begin()
            while self.reason is None:
                event = await queue.get()
                if isinstance(event, SessionAttached):
                    if queue.holds(self._outdates):
                        continue  # It shows the session before this turn, or before another snapshot.
                    # A restarted daemon counts anew.
                    first_seq = event.head_seq + 1
                    for repaired in self._after_snapshot(event):
                        yield repaired
                elif self._concerns(event, first_seq):
                    for new in self._once(event):
                        yield new

    async def _begin(self) -> int:
        """Send the command; return the `seq` from which on events may be about this turn."""
        ask, session = self._connection._ask, self._session.id
        if isinstance(self._command, ResponseRegenerate | ResponseContinue):
            created, _ = await ask(self._command, ResponseCreated, session=session)
            self._begun = created.item
            self._answer_id = created.item.id
            self._parts = [created.item.content] if created.item.content else []
            return created.seq
        added, _ = await ask(self._command, ItemAdded, session=session)
        self._begun = self.message = added.item
        return added.seq

    def _outdates(self, event: Event) -> bool:
        """Return whether a snapshot that came before an event says nothing of this turn any more."""
        if isinstance(event, ItemAdded | ResponseCreated):
            return self._begun is not None and event.item.id == self._begun.id
        return isinstance(event, SessionAttached)

    def _concerns(self, event: Event, first_seq: int) -> bool:
        """Note what a live event says about this turn; False for a transcript event of another."""
        if not isinstance(event, _TRANSCRIPT):
            return True
        if event.seq < first_seq:
            return False
        match event:
            case ResponseCreated(item=item) if self.message and item.parent in (self.message.id, None):
                self._answer_id = self._answer_id or item.id
            case ResponseCreated(item=item) if item.id == self._answer_id:
                pass
            case OutputTextDelta(item_id=item_id) if item_id == self._answer_id:
                pass
            case ResponseCompleted(item=item) | ResponseIncomplete(item=item) if item.id == self._answer_id:
                self._finish(item, event.reason, event.usage, event.timings)
            case ResponseFailed(item_id=item_id, error=error) if self._answer_id in (item_id, None):
                raise error_from(error)
            case ItemAdded() | SessionUpdated():
                pass
            case _:
                return False
        return True

    def _once(self, event: Event) -> Iterator[Event]:
        """Pass on an event of this turn without the text that was shown before the daemon started anew.

        Where the answer becomes another one than was shown, the snapshot comes again with what it is now.
        """
        if isinstance(event, OutputTextDelta):
            again, delta = self._again, event.delta
            if again.startswith(delta):
                self._again = again[len(delta) :]
                if again:
                    return
            elif delta.startswith(again):
                self._again, delta = "", delta[len(again) :]
            else:
                yield self._replaced(self.text[: -len(again)] + delta)
                return
            self._parts.append(delta)
            yield event if delta is event.delta else msgspec.structs.replace(event, delta=delta)
            return
        if isinstance(event, ResponseCompleted | ResponseIncomplete) and self._again and event.item is self.item:
            yield self._replaced(event.item.content)
        yield event

    def _replaced(self, text: str) -> Event:
        """Note that the answer so far is another one than was shown, and return what shows it."""
        attached = self._attached
        assert attached is not None and attached.snapshot is not None, "an answer is replaced without a snapshot"  # noqa: PT018
        self._again, self._parts = "", [text]
        items = [
            msgspec.structs.replace(item, content=text) if item.id == self._answer_id else item
            for item in attached.snapshot.items
        ]
        return msgspec.structs.replace(attached, snapshot=msgspec.structs.replace(attached.snapshot, items=items))

    def _finish(self, item: Item, reason: str, usage: Usage | None, timings: Timings | None) -> None:
        self.item, self.reason, self.usage, self.timings = item, reason, usage, timings

    def _after_snapshot(self, event: SessionAttached) -> Iterator[Event]:
        """Turn a snapshot into the events that this turn missed, or pass it on where it replaces what was said."""
        snapshot = event.snapshot
        if snapshot is None or (self.message is None and self._answer_id is None):
            return
        answer = next(
            (item for item in snapshot.items if item.id == self._answer_id)
            if self._answer_id
            else (item for item in snapshot.items if item.role == "assistant" and self._follows(item)),
            None,
        )
        if answer is None:
            if self._answer_id is None and snapshot.response is not None:
                return
            raise EngineError("the daemon restarted and lost this turn", code="turn_lost", hint="say it again")
        self._answer_id = answer.id
        text = self.text
        self._attached, self._again = event, ""
        if text.startswith(answer.content) and answer.status == "in_progress":
            # The daemon lost the last moment of what it had sent; it comes again.
            self._again = text[len(answer.content) :]
        elif not answer.content.startswith(text):
            yield self._replaced(answer.content)
        elif len(answer.content) > len(text):
            rest = answer.content[len(text) :]
            self._parts.append(rest)
            yield OutputTextDelta(
                session=self._session.id,
                seq=event.head_seq,
                ts=snapshot.session.updated_at,
                item_id=answer.id,
                delta=rest,
                n_tokens=0,
            )
        if answer.status == "in_progress":
            return
        yield self._ended(event, snapshot, answer)

    def _follows(self, item: Item) -> bool:
        return self.message is not None and item.parent == self.message.id

    def _ended(self, event: SessionAttached, snapshot: Snapshot, answer: Item) -> Event:
        usage = answer.usage or Usage.of(0, 0, 0)
        timings = answer.timings or Timings(queue_ms=0, ttft_ms=0, prefill_tok_s=0, decode_tok_s=0, preemptions=0)
        reason = answer.reason or ("stop" if answer.status == "completed" else "cancelled")
        self._finish(answer, reason, usage, timings)
        kind = ResponseCompleted if answer.status == "completed" else ResponseIncomplete
        return kind(
            session=self._session.id,
            seq=event.head_seq,
            ts=snapshot.session.updated_at,
            response=snapshot.response or "",
            item=answer,
            reason=cast(Any, reason),
            usage=usage,
            timings=timings,
        )
