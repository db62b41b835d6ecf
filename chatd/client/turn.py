"""One message and the answer to it, over a connection that may be lost and come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from chatd.client.errors import error_from
from chatd.errors import EngineError
from chatd.protocol import (
    Event,
    Item,
    ItemAdded,
    MessageEdit,
    OutputTextDelta,
    ResponseCompleted,
    ResponseContinue,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseRegenerate,
    SessionAttached,
    SessionUpdated,
    Snapshot,
    Timings,
    TranscriptEvent,
    Usage,
    UserMessage,
)

if TYPE_CHECKING:
    from chatd.client.link import Connection
    from chatd.client.session import Session

_TRANSCRIPT = TranscriptEvent.__args__


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
