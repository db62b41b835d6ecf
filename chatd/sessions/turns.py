"""Runs turns: from a message to the one end of its answer.

A turn encodes what its messages add, submits it under the session's lease, and then only reacts to what the engine
says. The flag that keeps a second turn out is `Session.turn`: set before the first await, cleared on every exit.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from chatd.engine.messages import Beams, Done, FinishReason, Ready, RequestClass
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, check_beam_search
from chatd.errors import ChatdError, Conflict, EngineError, RateLimited, Unavailable
from chatd.protocol import Message, Params, Usage
from chatd.sessions.context_policy import ContextMaker, Prompt
from chatd.sessions.conversation import ID_TYPE, Node, Owner
from chatd.sessions.endings import error_of, timings_of
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.limits import SessionLimits
from chatd.sessions.model_profile import ModelProfile, draw_seed
from chatd.sessions.ports import ChatEncoder, Vocabulary
from chatd.sessions.session import Session
from chatd.sessions.stats import SessionStats, TurnObserver
from chatd.sessions.turn import AnswerText, OtherAnswer, TextDelta, TokenLogprobs, Turn, TurnEnd, TurnSink

_log = logging.getLogger(__name__)


class TurnRunner:
    """All turns in flight.

    Args:
        requests: What the engine was given.
        encoder: Makes prompts' ids; called in threads.
        vocabulary: Makes text of ids.
        model: Limits and defaults; replaced when the engine says what fits.
        limits: Bounds.
        stats: Counted into.
        new_id: Makes ids with a prefix.
        monotonic: Gives seconds for timings.
        on_ended: Called with every turn that ended once it was submitted, and whether its answer was committed.
    """

    def __init__(
        self,
        requests: EngineRequests,
        encoder: ChatEncoder,
        vocabulary: Vocabulary,
        model: ModelProfile,
        limits: SessionLimits,
        stats: SessionStats,
        *,
        new_id: Callable[[str], str],
        monotonic: Callable[[], float],
        on_ended: Callable[[Turn, bool], None],
        draw: Callable[[], int] = draw_seed,
    ) -> None:
        self.requests = requests
        self.model = model
        self.is_ready = False
        self.observers: list[TurnObserver] = []
        self._encoder = encoder
        self.contexts = ContextMaker(encoder, lambda: self.model)
        self._vocabulary = vocabulary
        self._limits = limits
        self._stats = stats
        self._new_id = new_id
        self._monotonic = monotonic
        self._on_ended = on_ended
        self._draw = draw
        self._num_by_owner: Counter[Owner] = Counter()

    @property
    def num_in_flight(self) -> int:
        """Turns that have not ended."""
        return self._num_by_owner.total()

    def check_ready(self) -> None:
        """Refuse work while no engine serves.

        Raises:
            Unavailable: `engine_unavailable`.
        """
        if not self.is_ready:
            raise Unavailable("the engine is loading or restarting", code="engine_unavailable", retry_after_ms=1000)

    async def begin(
        self,
        session: Session,
        messages: Sequence[Message],
        *,
        parent: Node | None,
        params: Params,
        sink: TurnSink,
        request_class: RequestClass,
        on_accepted: Callable[[Turn, Sequence[Node]], None],
        beam: BeamSearch | None = None,
        num_samples: int = 1,
    ) -> Turn:
        """Start the session's one turn: the messages are added after `parent`, and an answer is on its way.

        `params` are all there are: those of the session are not looked at. With `beam` the answer is searched for. Of
        `num_samples` answers this is the first; `begin_sample` must follow for each of the others.

        Returns when the request is submitted. `on_accepted` is called in the same step of the loop, before anything
        of the answer can come. Nothing has changed where this raises.

        Raises:
            Conflict: `session_busy`.
            Unavailable: `engine_unavailable`.
            RateLimited: The owner has too many turns in flight.
            InvalidRequest: A parameter is out of range, or the template has no place for the messages.
            ContextLengthExceeded: The prompt can never fit.
        """
        check_free(session)
        self.check_ready()
        owner = session.owner
        if self._num_by_owner[owner] + num_samples > self._limits.max_turns_per_user:
            raise RateLimited(
                f"{self._num_by_owner[owner]} answers are in progress, the limit is {self._limits.max_turns_per_user}",
                code="too_many_turns",
                retry_after_ms=1000,
            )
        turn = Turn(
            session,
            sink,
            self._new_id("resp"),
            params,
            request_class,
            accepted_at=self._monotonic(),
            previous_head=session.conversation.head,
            beam=beam,
        )
        session.turn = turn
        self._num_by_owner[owner] += num_samples
        try:
            prompt = await self.contexts.prompt(
                session.context_policy,
                session.conversation.system,
                parent,
                messages,
                date=session.date,
                max_tokens=params.max_tokens,
            )
            self._accept(turn, parent, messages, prompt, on_accepted)
        except BaseException:
            self._uncount(owner, num_samples - 1)
            self._free(turn)
            raise
        return turn

    def begin_sample(
        self,
        first: Turn,
        session: Session,
        params: Params,
        sink: TurnSink,
        on_accepted: Callable[[Turn, Sequence[Node]], None],
    ) -> Turn:
        """Start another answer to the prompt of a turn that was just begun, in a session that ends with its messages.

        Does not await, and encodes nothing.

        Raises:
            Unavailable: `engine_unavailable`.
            InvalidRequest: A parameter is out of range.
        """
        assert first.answer is not None, "a sample of a turn that was not accepted"
        turn = Turn(
            session,
            sink,
            self._new_id("resp"),
            params,
            first.request_class,
            accepted_at=first.accepted_at,
            previous_head=session.conversation.head,
            sample_of=first,
        )
        session.turn = turn
        try:
            self.requests.share_prompt(first.session, first.answer, session)
            self._accept(turn, first.answer.parent, [], Prompt.of(first.answer), on_accepted)
        except BaseException:
            self._free(turn)
            raise
        return turn

    def forgo_samples(self, owner: Owner, count: int) -> None:
        """Give up answers that were to follow a first one and will not begin."""
        self._uncount(owner, count)

    def _accept(
        self,
        turn: Turn,
        parent: Node | None,
        messages: Sequence[Message],
        prompt: Prompt,
        on_accepted: Callable[[Turn, Sequence[Node]], None],
    ) -> None:
        """Check that it fits, then change the conversation and submit; does not await."""
        conversation = turn.session.conversation
        num_prompt_tokens = prompt.num_tokens(parent)
        self.model.check_prompt(num_prompt_tokens)
        sampling = self.model.resolve(turn.params, num_prompt_tokens, draw=self._draw)
        if turn.beam is not None:
            check_beam_search(turn.beam, sampling, self.model.vocab_size)
        turn.text = AnswerText(
            self._vocabulary.detokenizer(), turn.params.stop, frozenset(sampling.stop_token_ids), self._token_text
        )
        added: list[Node] = []
        last = parent
        for message in messages:
            last = conversation.add_message(self._new_id("msg"), message.role, message.content, last)
            added.append(last)
        if added:
            prompt = prompt.named(added[0].id)
        turn.dropped = prompt.dropped
        answer = conversation.begin_answer(
            self._new_id("msg"),
            last,
            prompt.ids,
            sampling,
            turn.params.stop,
            log_system=prompt.log_system,
            context_from=prompt.context_from,
        )
        turn.answer, turn.first_node = answer, added[0] if added else answer
        if turn.decided is None:
            try:
                self.requests.submit(turn)
            except BaseException:
                conversation.remove_from(turn.first_node, turn.previous_head)
                raise
        self._stats.turns_started += 1
        for observer in self.observers:
            observer.turn_started(turn.session.owner)
        on_accepted(turn, added)
        if turn.decided is not None:
            self._finish(turn, turn.decided, None)

    def cancel(self, turn: Turn, reason: str | None = None) -> None:
        """End a turn as cancelled, or for `reason`, and keep what there is; does nothing to one that ends already."""
        if turn.decided is not None:
            return
        turn.decided, turn.cancel_reason = FinishReason.CANCELLED, reason
        self.requests.cancel(turn)

    # What the engine says.

    def on_ready(self, ready: Ready) -> None:
        """Take in what fits, and serve."""
        self.model = self.model.with_ready(ready)
        self.is_ready = True

    def on_died(self, reason: str) -> None:
        """End every turn in flight and forget what the engine held."""
        self.is_ready = False
        self.requests.on_died()
        error = EngineError(f"the engine ended while it computed this answer: {reason}")
        for turn in self.requests.turns():
            try:
                if turn.decided is not None:
                    self._finish(turn, turn.decided, None)
                else:
                    self.fail(turn, error)
            except Exception:
                _log.exception("a turn could not be ended as it should")
                with contextlib.suppress(Exception):
                    self.fail(turn, error)

    def on_tokens(self, request: RequestId, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Take the new tokens of one request."""
        turn = self.requests.turn_of(request)
        if turn is None or turn.decided is not None:
            return
        text, answer = turn.text, turn.answer
        assert text is not None and answer is not None, "tokens for a turn without an answer"  # noqa: PT018
        now = self._monotonic()
        if turn.first_token_at is None:
            turn.first_token_at = now
            turn.session.latest.prefill = None
            for observer in self.observers:
                observer.first_token(turn.session.owner, now - turn.accepted_at)
        else:
            for observer in self.observers:
                observer.next_tokens(turn.session.owner, len(ids), now - turn.last_token_at)
        turn.last_token_at = now
        delta = text.push(ids, logprobs)
        if text.is_stopped:
            turn.decided = FinishReason.STOP_STRING
            self.requests.finish(turn, answer.num_tokens + len(text.ids))
        if delta is not None:
            self._deliver(turn, answer, delta)

    def on_beams(self, found: Beams) -> None:
        """Take what a search found: the best sequence is the answer."""
        turn = self.requests.turn_of(found.request)
        if turn is None or turn.decided is not None:
            return
        best, *others = found.sequences
        self.on_tokens(found.request, best.ids, None)
        assert turn.answer is not None and turn.answer.sampling is not None, "a search without an answer"  # noqa: PT018
        hidden_ids = frozenset(turn.answer.sampling.stop_token_ids)
        for sequence in others:
            answer = AnswerText(self._vocabulary.detokenizer(), (), hidden_ids)
            deltas = (answer.push(sequence.ids), answer.flush())
            text = "".join(delta.text for delta in deltas if delta is not None)
            if sequence.reason is FinishReason.STOP and self._is_foreign_stop(answer.ids[-1]):
                answer.ids.pop()
            reason = self._name_of(turn, sequence.reason, turn.answer.num_tokens, len(answer.ids))
            turn.others.append(OtherAnswer(text, answer, reason))

    def keep_other(self, turn: Turn, other: OtherAnswer, session: Session) -> Node | None:
        """Commit an answer that a search found beside the one that was taken, in a session that ends with its messages.

        The session shares the prompt; what it lacks of the answer is computed when it is used.

        Returns:
            None where later prompts would have other ids of either answer than were computed.
        """
        best, conversation = turn.answer, session.conversation
        assert best is not None and turn.text is not None, "a search ended without an answer"  # noqa: PT018
        if best.ids is not turn.text.ids or self._encoder.settle(other.answer.ids) is not None:
            return None
        assert best.sampling is not None, "an answer without its parameters"
        assert best.usage is not None, "an answer in progress"
        assert best.timings is not None, "an answer in progress"
        num_prompt_tokens = best.num_tokens_before + len(best.prompt_ids)
        self.requests.share_prompt(turn.session, best, session)
        answer = conversation.begin_answer(
            self._new_id("msg"),
            best.parent,
            best.prompt_ids,
            best.sampling,
            best.stop_strings,
            log_system=best.log_system,
            context_from=best.context_from,
        )
        answer.append_text(other.text)
        completed = other.reason in (FinishReason.STOP, FinishReason.STOP_STRING)
        conversation.end_answer(
            answer,
            status="completed" if completed else "incomplete",
            reason=other.reason,
            usage=Usage.of(num_prompt_tokens, best.usage.cached_tokens, len(other.answer.ids)),
            timings=best.timings,
        )
        answer.ids = other.answer.ids
        return answer

    def on_done(self, done: Done) -> None:
        """End the turn of a request."""
        turn = self.requests.turn_of(done.request)
        if turn is None:
            return
        if done.reason is FinishReason.FAILED and turn.decided is None:
            self.fail(turn, error_of(done))
        else:
            self._finish(turn, turn.decided or done.reason, done)

    def on_lease_lost(self, request: RequestId) -> None:
        """Send the whole log, or end a turn that was cancelled meanwhile."""
        turn = self.requests.turn_of(request)
        if turn is None:
            return
        self._stats.lease_misses += 1
        if turn.decided is not None:
            self.requests.lose(turn.session)
            self._finish(turn, turn.decided, None)
        elif turn.base_len == 0:
            self.fail(turn, EngineError("the engine lost a lease that it was given whole"))
        else:
            try:
                self.requests.submit(turn, whole=True)
            except Unavailable as error:
                self.fail(turn, error)

    # How a turn ends.

    def fail(self, turn: Turn, error: ChatdError) -> None:
        """Roll back to the last committed turn and say why."""
        if turn.ended.is_set():
            return
        session = turn.session
        assert turn.first_node is not None, "a turn without a message fails"
        try:
            session.conversation.remove_from(turn.first_node, turn.previous_head)
        finally:
            self._free(turn)
        self._stats.turns_ended["failed"] += 1
        for observer in self.observers:
            observer.turn_ended(session.owner, "failed", None, None)
        self._on_ended(turn, False)
        turn.sink.on_end(turn, TurnEnd("failed", completed=False, error=error))

    def fail_request(self, request: RequestId, error: ChatdError) -> None:
        """End a turn whose messages could not be handled; the engine is told to stop."""
        turn = self.requests.turn_of(request)
        if turn is not None:
            self.requests.cancel(turn)
            self.fail(turn, error)

    def _finish(self, turn: Turn, reason: FinishReason, done: Done | None) -> None:
        """Commit an answer, then say so."""
        session, answer, text = turn.session, turn.answer, turn.text
        assert answer is not None and text is not None, "a turn without an answer is finished"  # noqa: PT018
        delta = text.flush()
        if text.is_stopped:
            reason = FinishReason.STOP_STRING
        if delta is not None:
            self._deliver(turn, answer, delta)
        if reason is FinishReason.STOP and text.ids and self._is_foreign_stop(text.ids[-1]):
            text.ids.pop()
        num_prompt_tokens = answer.num_tokens
        named = self._name_of(turn, reason, num_prompt_tokens, len(text.ids))
        num_cached = min(done.num_cached_tokens if done is not None else turn.num_cached_tokens, num_prompt_tokens)
        usage = Usage.of(num_prompt_tokens, num_cached, len(text.ids))
        timings = timings_of(turn, done.timings if done is not None else None, len(text.ids))
        completed = reason in (FinishReason.STOP, FinishReason.STOP_STRING)
        session.conversation.end_answer(
            answer, status="completed" if completed else "incomplete", reason=named, usage=usage, timings=timings
        )
        is_as_computed = self._settle(session, answer, text)
        self._free(turn)
        if not is_as_computed:
            self.requests.compute_ahead(session)
        stats = self._stats
        stats.turns_ended[named] += 1
        stats.prompt_tokens += num_prompt_tokens
        stats.cached_tokens += num_cached
        stats.output_tokens += len(text.ids)
        for observer in self.observers:
            observer.turn_ended(session.owner, named, usage, timings)
        self._on_ended(turn, True)
        turn.sink.on_end(turn, TurnEnd(named, completed, usage, timings, others=turn.others))

    def _settle(self, session: Session, answer: Node, text: AnswerText) -> bool:
        """Give an answer the ids that later prompts have of it, and note how much of them the lease holds.

        Returns:
            Whether these are the ids that were computed.
        """
        settled = self._encoder.settle(text.ids)
        if settled is None:
            answer.ids = text.ids
            num_held = answer.num_tokens
        else:
            # History has no thoughts, so what comes after them is computed again.
            del answer.prompt_ids[len(answer.prompt_ids) - settled.num_prompt_ids :]
            num_held = answer.num_tokens
            answer.ids = array(ID_TYPE, settled.ids)
        if session.lease.node is answer and session.lease.num_tokens:  # None of a lease that was lost meanwhile.
            session.lease.num_tokens = num_held
        return settled is None

    def _is_foreign_stop(self, token_id: int) -> bool:
        """Return whether an id ends an answer but has no place in a conversation of this template."""
        return token_id in self._encoder.stop_token_ids and token_id != self._encoder.turn_end_id

    def _name_of(self, turn: Turn, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int) -> str:
        if reason is FinishReason.MAX_OUTPUT_TOKENS and self.model.ends_by_context(
            turn.params, num_prompt_tokens, num_output_tokens
        ):
            return str(FinishReason.CONTEXT)
        if reason is FinishReason.CANCELLED and turn.cancel_reason is not None:
            return turn.cancel_reason
        return str(reason)

    def _free(self, turn: Turn) -> None:
        """Let the session have its next turn."""
        session = turn.session
        assert session.turn is turn, "a turn ends that is not the session's"
        session.turn = None
        session.latest.queued = session.latest.prefill = None
        self._uncount(session.owner, 1)
        self.requests.forget(turn)
        turn.ended.set()

    def _uncount(self, owner: Owner, count: int) -> None:
        self._num_by_owner[owner] -= count
        if self._num_by_owner[owner] <= 0:
            del self._num_by_owner[owner]

    def _deliver(self, turn: Turn, answer: Node, delta: TextDelta) -> None:
        answer.append_text(delta.text)
        self._stats.deltas += 1
        turn.sink.on_delta(turn, delta)

    def _token_text(self, token_id: int) -> str:
        return self._vocabulary.token_bytes[token_id].decode(errors="replace")


def check_free(session: Session) -> None:
    """Refuse a second turn.

    Raises:
        Conflict: `session_busy`.
    """
    if session.turn is not None:
        raise Conflict(
            f"session {session.id} has an answer in progress",
            code="session_busy",
            hint="wait for its end, or cancel it",
        )
