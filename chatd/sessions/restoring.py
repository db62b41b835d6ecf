"""Answers that go on: when an engine died under them, and when the whole daemon did.

A turn whose engine is gone waits for the next one and is submitted again with what was delivered of its answer, or with
what the journal has of it. It keeps its ids, seed, parameters and stop strings, so it ends as it would have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from chatd.engine.messages import FinishReason, RequestClass
from chatd.engine.sampling import SamplingParams
from chatd.errors import EngineError, Unavailable
from chatd.journal.records import MessageRecord, SaveMessage
from chatd.protocol import Params, ResponsePreempted, ResponseQueued
from chatd.sessions.deaths import DeathCount
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session
from chatd.sessions.turn import AnswerText, Turn
from chatd.sessions.turn_ends import TurnEnds

RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Restorer:
    """Turns that no engine has.

    Args:
        requests: What the engine is given.
        recorder: Makes durable what a turn has been through.
        ends: Ends those that are over.
        model: Gives the limits as they are now.
        text_of: Makes text of a turn's tokens, from the first.
        monotonic: Gives seconds for timings.
    """

    def __init__(
        self,
        requests: EngineRequests,
        recorder: Recorder,
        ends: TurnEnds,
        model: Callable[[], ModelProfile],
        text_of: Callable[[Turn, SamplingParams], AnswerText],
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._recorder = recorder
        self._ends = ends
        self._model = model
        self._text_of = text_of
        self._monotonic = monotonic
        self._waiting: list[Turn] = []
        self._held: set[Turn] = set()
        self._retry: asyncio.TimerHandle | None = None

    def interrupt(self, turn: Turn, reason: str, *, was_running: bool) -> None:
        """Have a turn whose engine died wait for the next one; one that was in too many deaths fails.

        Args:
            turn: Which.
            reason: Of the death.
            was_running: It may have been why.
        """
        assert turn.text is not None, "a turn without an answer is in flight"
        self._requests.forget(turn)
        may_go_on = turn.deaths.on_death(len(turn.text.ids), was_running=was_running)
        if not may_go_on:
            error = EngineError(
                f"{turn.deaths.num_deaths} engines ended while they computed this answer: {reason}",
                code="engine_died",
            )
            self._ends.fail(turn, error)
            return
        if turn.beam is not None and turn.text.ids:
            # Nothing says any more why its best sequence ended.
            self._ends.fail(turn, EngineError(f"the engine ended while it searched for this answer: {reason}"))
            return
        if turn.record is not None and was_running:
            turn.record = msgspec.structs.replace(turn.record, num_deaths=turn.deaths.num_deaths)
            so_far = msgspec.structs.replace(turn.record, ids=turn.text.ids[:])
            self._recorder.owe([SaveMessage(turn.session.id, so_far)], at_once=True)
        turn.session.listeners.tell(ResponsePreempted(session=turn.session.id))
        self.wait(turn)

    def wait(self, turn: Turn) -> None:
        """Have a turn wait for an engine that takes it."""
        turn.is_interrupted, turn.is_running = True, False
        self._waiting.append(turn)
        latest = turn.session.latest
        latest.prefill, latest.queued = None, {"position": len(self._waiting), "why": "restore"}
        turn.session.listeners.tell(ResponseQueued(session=turn.session.id, position=len(self._waiting), why="restore"))
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self.resume)

    def release(self, turn: Turn) -> None:
        """Let a turn go on that was held."""
        self._held.discard(turn)
        self.resume()

    def resume(self) -> None:
        """Submit what waits, in order; what no engine takes goes on waiting."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if turn.is_ending:
                self._held.discard(turn)
                continue
            if turn in self._held:
                self._waiting.append(turn)
                continue
            end = _end_of(turn)
            if end is not None:
                self._ends.finish(turn, end, None)
                continue
            try:
                self._requests.submit(turn)
            except Unavailable:
                self.wait(turn)
            except Exception as error:
                # Those behind it go on all the same.
                _log.exception("an answer of %s could not go on", turn.session.id)
                self._ends.fail(turn, EngineError(f"the answer could not go on: {type(error).__name__}"))

    def take_up(self, session: Session, record: MessageRecord, *, is_held: bool = False) -> Turn:
        """Go on with an answer that the journal has in progress, for nobody in particular.

        One that is held is submitted when it is released.
        """
        answer, sampling = session.conversation.get(record.id), record.sampling
        assert answer is not None and sampling is not None, f"{record.id} is no answer of {session.id}"  # noqa: PT018
        room = self._model().context - answer.num_tokens
        turn = Turn(
            session,
            session,
            response_of(record.id),
            Params(stop=record.stop_strings, max_tokens=sampling.max_tokens if sampling.max_tokens < room else None),
            RequestClass(record.request_class),
            accepted_at=self._monotonic(),
            answer=answer,
            # The message that it answers was acknowledged: if it fails, it alone goes.
            first_node=answer,
            previous_head=answer.parent,
            key_id=record.key_id,
            record=msgspec.structs.replace(record, ids=record.ids[:0]),
            num_inherited=record.num_inherited,
            deaths=DeathCount(record.num_deaths, len(record.ids)),
        )
        turn.text = self._text_of(turn, sampling)
        delta = turn.text.push(record.ids)
        if delta is not None:
            answer.append_text(delta.text)
        session.turn = turn
        self._ends.num_by_owner[session.owner] += 1
        if is_held:
            self._held.add(turn)
        self.wait(turn)
        return turn


def answer_of(response: str) -> str:
    """Return the id of the answer that a response makes."""
    return f"msg{response.removeprefix('resp')}"


def response_of(answer: str) -> str:
    """Return the response that makes an answer; so it has its name after a restart too."""
    return f"resp{answer.removeprefix('msg')}"


def _end_of(turn: Turn) -> FinishReason | None:
    """Return why an answer is over whose end was not told."""
    assert turn.text is not None and turn.answer is not None, "a turn without an answer waits"  # noqa: PT018
    sampling, ids = turn.answer.sampling, turn.text.ids
    assert sampling is not None, "an answer without its parameters"
    if turn.text.is_stopped:
        return FinishReason.STOP_STRING
    if len(ids) and ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.MAX_OUTPUT_TOKENS if len(ids) >= sampling.max_tokens else None
