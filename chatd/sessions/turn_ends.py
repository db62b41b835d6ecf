"""How a turn ends: its answer is committed, or it is rolled back; made durable first, and then told.

From the moment an end is decided the turn is `is_ending`: what the engine says of it is about nothing any more. The
session stays busy until the end is durable, and whoever reads it sees an answer in progress.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from chatd.engine.messages import Done, FinishReason
from chatd.errors import ChatdError, EngineError, StorageError
from chatd.journal.records import (
    ID_TYPE,
    Change,
    CountUsage,
    MessageRecord,
    RemoveMessages,
    SaveMessage,
    SaveSession,
)
from chatd.protocol import ItemStatus, Timings, Usage
from chatd.sessions.conversation import Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.logs import Node
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.ports import ChatEncoder
from chatd.sessions.recorder import Recorder
from chatd.sessions.stats import SessionStats, TurnObserver
from chatd.sessions.stored import headed, session_record
from chatd.sessions.turn import TextDelta, Turn, TurnEnd
from chatd.sessions.turn_reports import timings_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ending:
    """What an answer is once it has ended.

    Attributes:
        reason: Of the protocol.
        status: "completed", or "incomplete".
        usage: Of the tokens that are kept.
        timings: Where the time went.
        prompt_ids: Without what history does not keep.
        ids: As later prompts have them.
        num_held: Ids of the log that the lease holds of these.
        is_as_computed: Whether `ids` are the ids that were computed.
    """

    reason: str
    status: ItemStatus
    usage: Usage
    timings: Timings
    prompt_ids: array[int]
    ids: array[int]
    num_held: int
    is_as_computed: bool


class TurnEnds:
    """Ends turns.

    Args:
        requests: What the engine was given.
        encoder: Knows what later prompts have of an answer.
        recorder: Makes ends durable.
        model: Gives the limits as they are now.
        stats: Counted into.
        clock: Gives Unix seconds.
        on_ended: Called with every turn that ended once it was submitted, and whether its answer was committed.

    Attributes:
        observers: Told of every end.
        num_by_owner: Turns that have not ended.
    """

    def __init__(
        self,
        requests: EngineRequests,
        encoder: ChatEncoder,
        recorder: Recorder,
        model: Callable[[], ModelProfile],
        stats: SessionStats,
        *,
        clock: Callable[[], float],
        on_ended: Callable[[Turn, bool], None],
    ) -> None:
        self.observers: list[TurnObserver] = []
        self.num_by_owner: Counter[Owner] = Counter()
        self._requests = requests
        self._encoder = encoder
        self._recorder = recorder
        self._model = model
        self._stats = stats
        self._clock = clock
        self._on_ended = on_ended

    def finish(self, turn: Turn, reason: FinishReason, done: Done | None) -> None:
        """Commit an answer, then say so; one that cannot be kept is rolled back."""
        if turn.is_ending:
            return
        text, answer = turn.text, turn.answer
        assert text is not None and answer is not None, "a turn without an answer is finished"  # noqa: PT018
        delta = text.flush()
        if delta is not None:
            self.deliver(turn, answer, delta)
        ending = self._ending_of(turn, FinishReason.STOP_STRING if text.is_stopped else reason, done)
        turn.is_ending = True

        def changes() -> list[Change]:
            assert turn.record is not None, "an answer that is not kept"
            now = self._clock()
            session = session_record(
                turn.session,
                model=self._model().id,
                updated_at=now,
                num_tokens=answer.num_tokens_before + len(ending.prompt_ids) + len(ending.ids),
            )
            return [
                SaveMessage(turn.session.id, _ended(turn.record, ending, answer.content)),
                SaveSession(session),
                self._usage_of(turn, ending.usage),
            ]

        def then(failure: StorageError | None) -> None:
            if failure is not None:
                self._recorder.owe(self._rollback(turn))
                self._failed(turn, failure)
            else:
                self._or_fail(turn, lambda: self._finished(turn, ending))

        if turn.session.hidden:
            self._recorder.owe([self._usage_of(turn, ending.usage)])
        self._recorder.end(turn.session, changes, then)

    def fail(self, turn: Turn, error: ChatdError) -> None:
        """Roll back to the last committed turn and say why."""
        if turn.ended.is_set() or (turn.is_ending and self._recorder.keeps(turn.session)):
            return
        turn.is_ending = True

        def then(failure: StorageError | None) -> None:
            if failure is not None:
                self._recorder.owe(self._rollback(turn))
            self._failed(turn, error)

        self._recorder.end(turn.session, lambda: self._rollback(turn), then)

    def free(self, turn: Turn) -> None:
        """Let the session have its next turn."""
        session = turn.session
        assert session.turn is turn, "a turn ends that is not the session's"
        session.turn = None
        session.latest.queued = session.latest.prefill = None
        self.uncount(session.owner, 1)
        self._requests.forget(turn)
        turn.ended.set()

    def uncount(self, owner: Owner, count: int) -> None:
        """Take so many turns off an owner's."""
        self.num_by_owner[owner] -= count
        if self.num_by_owner[owner] <= 0:
            del self.num_by_owner[owner]

    def deliver(self, turn: Turn, answer: Node, delta: TextDelta) -> None:
        """Pass on more of an answer."""
        answer.append_text(delta.text)
        self._stats.deltas += 1
        turn.sink.on_delta(turn, delta)

    def is_foreign_stop(self, token_id: int) -> bool:
        """Return whether an id ends an answer but has no place in a conversation of this template."""
        return token_id in self._encoder.stop_token_ids and token_id != self._encoder.turn_end_id

    def name_of(self, turn: Turn, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int) -> str:
        """Return what the protocol calls an end."""
        if reason is FinishReason.MAX_OUTPUT_TOKENS and self._model().ends_by_context(
            turn.params, num_prompt_tokens, num_output_tokens
        ):
            return str(FinishReason.CONTEXT)
        if reason is FinishReason.CANCELLED and turn.cancel_reason is not None:
            return turn.cancel_reason
        return str(reason)

    def _ending_of(self, turn: Turn, reason: FinishReason, done: Done | None) -> _Ending:
        answer, text = turn.answer, turn.text
        assert text is not None and answer is not None, "a turn without an answer is finished"  # noqa: PT018
        if reason is FinishReason.STOP and text.ids and self.is_foreign_stop(text.ids[-1]):
            text.ids.pop()
        # What it goes on from was asked for, and charged, before.
        num_prompt_tokens, num_output = answer.num_tokens + turn.num_inherited, len(text.ids) - turn.num_inherited
        completed = reason in (FinishReason.STOP, FinishReason.STOP_STRING)
        num_cached = min(done.num_cached_tokens if done is not None else turn.num_cached_tokens, num_prompt_tokens)
        prompt_ids, ids = answer.prompt_ids, text.ids
        num_held = answer.num_tokens + len(ids)
        # What was cut short may go on, so it keeps its thoughts until something else is said.
        settled = self._encoder.settle(text.ids) if completed else None
        if settled is not None:
            # History has no thoughts, so what comes after them is computed again.
            prompt_ids = prompt_ids[: len(prompt_ids) - settled.num_prompt_ids]
            ids = array(ID_TYPE, settled.ids)
            num_held = answer.num_tokens_before + len(prompt_ids)
        return _Ending(
            reason=self.name_of(turn, reason, num_prompt_tokens, num_output),
            status="completed" if completed else "incomplete",
            usage=Usage.of(num_prompt_tokens, num_cached, num_output),
            timings=timings_of(turn, done.timings if done is not None else None),
            prompt_ids=prompt_ids,
            ids=ids,
            num_held=num_held,
            is_as_computed=settled is None,
        )

    def _finished(self, turn: Turn, ending: _Ending) -> None:
        """Let an answer that is durable be committed, and tell."""
        session, answer = turn.session, turn.answer
        assert answer is not None, "a turn without an answer is finished"
        session.conversation.end_answer(
            answer, status=ending.status, reason=ending.reason, usage=ending.usage, timings=ending.timings
        )
        answer.prompt_ids, answer.ids = ending.prompt_ids, ending.ids
        if session.lease.node is answer and session.lease.num_tokens:  # None of a lease that was lost meanwhile.
            session.lease.num_tokens = ending.num_held
        self.free(turn)
        if not ending.is_as_computed:
            self._requests.ahead.compute_ahead(session)
        stats, usage = self._stats, ending.usage
        stats.turns_ended[ending.reason] += 1
        stats.prompt_tokens += usage.input_tokens
        stats.cached_tokens += usage.cached_tokens
        stats.output_tokens += usage.output_tokens
        for observer in self.observers:
            observer.turn_ended(session.owner, ending.reason, usage, ending.timings)
        self._on_ended(turn, True)
        end = TurnEnd(ending.reason, ending.status == "completed", usage, ending.timings, others=turn.others)
        turn.sink.on_end(turn, end)

    def _failed(self, turn: Turn, error: ChatdError) -> None:
        """Take a turn out again whose end is kept as far as can be, and tell."""
        if turn.ended.is_set():
            return
        session = turn.session
        assert turn.first_node is not None, "a turn without a message fails"
        self._requests.roll_back(turn)
        try:
            session.conversation.remove_from(turn.first_node, turn.previous_head)
        finally:
            self.free(turn)
        self._stats.turns_ended["failed"] += 1
        for observer in self.observers:
            observer.turn_ended(session.owner, "failed", None, None)
        self._on_ended(turn, False)
        turn.sink.on_end(turn, TurnEnd("failed", completed=False, error=error))

    def _or_fail(self, turn: Turn, finish: Callable[[], None]) -> None:
        """End a turn as it should, or else somehow: the session is free afterwards."""
        if not self._recorder.keeps(turn.session):
            finish()  # Whoever handles the engine's messages handles this as well.
            return
        try:
            finish()
        except Exception:
            _log.exception("a turn could not be ended as it should")
            if not turn.ended.is_set():
                self._recorder.owe(self._rollback(turn))
                self._failed(turn, EngineError("the answer could not be delivered", code="internal_error"))

    def _rollback(self, turn: Turn) -> list[Change]:
        """Return what takes a turn out of the journal."""
        session = turn.session
        assert turn.first_node is not None, "a turn without a message fails"
        removed, node = [], turn.answer
        while node is not None and node is not turn.first_node.parent:
            removed.append(node.id)
            node = node.parent
        head = turn.first_node.parent if turn.previous_head is None else turn.previous_head
        record = headed(session_record(session, model=self._model().id, updated_at=self._clock()), head)
        if turn.given_title is not None and turn.given_title == session.title:
            record = msgspec.structs.replace(record, title="")
        return [SaveSession(record), RemoveMessages(session.id, tuple(removed))]

    def _usage_of(self, turn: Turn, usage: Usage) -> CountUsage:
        day = datetime.fromtimestamp(self._clock(), UTC).date()
        tenant = turn.session.owner.tenant
        others = sum(len(other.answer.ids) for other in turn.others)
        # The samples of one request have one prompt.
        num_input, num_cached = (0, 0) if turn.sample_of is not None else (usage.input_tokens, usage.cached_tokens)
        return CountUsage(tenant, turn.key_id, day, num_input, num_cached, usage.output_tokens + others)


def _ended(record: MessageRecord, ending: _Ending, content: str) -> MessageRecord:
    return msgspec.structs.replace(
        record,
        content=content,
        status=ending.status,
        reason=ending.reason,
        usage=ending.usage,
        timings=ending.timings,
        prompt_ids=ending.prompt_ids,
        ids=ending.ids,
    )
