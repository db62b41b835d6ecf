"""How the turns in flight get on: takes in what the engine says of each, from its first token to its last.

An end is only noticed here; `turn_ends` brings it about, and `restoring` what comes after the death of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatd.engine.messages import Beams, Done, FinishReason
from chatd.engine.plan import RequestId
from chatd.engine.pulse import NO_SUSPECT, NOT_KNOWN
from chatd.errors import ChatdError, EngineError, Unavailable
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.recorder import Recorder
from chatd.sessions.restoring import Restorer
from chatd.sessions.searches import BeamResults
from chatd.sessions.stats import SessionStats
from chatd.sessions.turn import TokenLogprobs, Turn
from chatd.sessions.turn_ends import TurnEnds
from chatd.sessions.turn_reports import error_of


class TurnProgress:
    """The turns in flight, as the engine gets on with them.

    Args:
        requests: What the engine was given.
        recorder: Has the journal know tokens.
        ends: Ends turns.
        searches: Take what a search found.
        restorer: Goes on with turns whose engine is gone.
        stats: Counted into.
        monotonic: Gives seconds for timings.
    """

    def __init__(
        self,
        requests: EngineRequests,
        recorder: Recorder,
        ends: TurnEnds,
        searches: BeamResults,
        restorer: Restorer,
        stats: SessionStats,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._recorder = recorder
        self._ends = ends
        self._searches = searches
        self._restorer = restorer
        self._stats = stats
        self._monotonic = monotonic

    def on_tokens(self, request: RequestId, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Take the new tokens of one request."""
        turn = self._requests.turn_of(request)
        if turn is None or turn.decided is not None or turn.is_ending:
            return
        text, answer = turn.text, turn.answer
        assert text is not None and answer is not None, "tokens for a turn without an answer"  # noqa: PT018
        now = self._monotonic()
        if turn.first_token_at is None:
            turn.first_token_at = now
            turn.session.latest.prefill = None
            for observer in self._ends.observers:
                observer.first_token(turn.session.owner, now - turn.accepted_at)
        else:
            for observer in self._ends.observers:
                observer.next_tokens(turn.session.owner, len(ids), now - turn.last_token_at)
        turn.last_token_at = now
        start = len(text.ids)
        delta = text.push(ids, logprobs)
        if turn.record is not None:
            # Fewer than came where a stop string ends among them.
            self._recorder.note_tokens(answer.id, start, text.ids[start:])
        if text.is_stopped:
            turn.decided = FinishReason.STOP_STRING
            self._requests.finish(turn, answer.num_tokens + len(text.ids))
        if delta is not None:
            self._ends.deliver(turn, answer, delta)

    def on_beams(self, found: Beams) -> None:
        """Take what a search found: the best sequence is the answer."""
        turn = self._requests.turn_of(found.request)
        if turn is None or turn.decided is not None or turn.is_ending:
            return
        self.on_tokens(found.request, found.sequences[0].ids, None)
        self._searches.take(turn, found)

    def on_done(self, done: Done) -> None:
        """End the turn of a request."""
        turn = self._requests.turn_of(done.request)
        if turn is None or turn.is_ending:
            return
        if done.reason is FinishReason.FAILED and turn.decided is None:
            self._ends.fail(turn, error_of(done))
        else:
            self._ends.finish(turn, turn.decided or done.reason, done)

    def on_lease_lost(self, request: RequestId) -> None:
        """Send the whole log, or end a turn that was cancelled meanwhile."""
        turn = self._requests.turn_of(request)
        if turn is None or turn.is_ending:
            return
        self._stats.lease_misses += 1
        if turn.decided is not None:
            self._requests.lose(turn.session)
            self._ends.finish(turn, turn.decided, None)
        elif turn.base_len == 0:
            self._ends.fail(turn, EngineError("the engine lost a lease that it was given whole"))
        else:
            try:
                self._requests.submit(turn, whole=True)
            except Unavailable as error:
                self._ends.fail(turn, error)

    def fail_request(self, request: RequestId, error: ChatdError) -> None:
        """End a turn whose messages could not be handled; the engine is told to stop."""
        turn = self._requests.turn_of(request)
        if turn is not None:
            self._requests.cancel(turn)
            self._ends.fail(turn, error)

    def interrupt(self, reason: str, alone: int) -> None:
        """Have the turns of an engine that is gone wait for the next one; those that were to end, end.

        Args:
            reason: For those that end.
            alone: As for `TurnRunner.on_died`.
        """
        for turn in self._requests.turns():
            if turn.is_ending:
                continue
            if turn.decided is not None:
                self._ends.finish(turn, turn.decided, None)
            else:
                self._restorer.interrupt(turn, reason, was_running=_may_be_why(turn, alone))


def _may_be_why(turn: Turn, alone: int) -> bool:
    """Return whether what was computed of a turn may be why an engine died."""
    if not turn.is_running or alone == NOT_KNOWN or turn.text is None:
        return turn.is_running
    # A suspect has steps of its own: it is the only one in them, and in no others.
    return not turn.deaths.is_suspect(len(turn.text.ids)) if alone == NO_SUSPECT else turn.request == alone
