"""Begins turns: from a message to its answer on the way. How it gets on is in `turn_progress`, its end in `turn_ends`.

A turn encodes what its messages add, makes it durable, submits it under the session's lease, and then only reacts to
what the engine says. The flag that keeps a second turn out is `Session.turn`: set before the first await, cleared on
every exit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatd.engine.messages import FinishReason, Ready, RequestClass
from chatd.engine.pulse import NOT_KNOWN
from chatd.engine.sampling import BeamSearch, SamplingParams, check_beam_search
from chatd.errors import Conflict, RateLimited, Unavailable
from chatd.journal.records import Change, MessageRecord, SaveMessage
from chatd.protocol import Message, Params
from chatd.sessions.context_policy import ContextMaker, Prompt
from chatd.sessions.conversation import Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.limits import SessionLimits
from chatd.sessions.logs import Node
from chatd.sessions.model_profile import ModelProfile, draw_seed
from chatd.sessions.ports import ChatEncoder, Vocabulary
from chatd.sessions.recorder import Recorder
from chatd.sessions.restoring import Restorer, answer_of
from chatd.sessions.searches import BeamResults
from chatd.sessions.session import Session
from chatd.sessions.stats import SessionStats
from chatd.sessions.stored import answer_record, message_record
from chatd.sessions.turn import AnswerText, Turn, TurnSink
from chatd.sessions.turn_ends import TurnEnds
from chatd.sessions.turn_progress import TurnProgress


@dataclass(frozen=True, slots=True)
class Begun:
    """What a turn adds to its conversation, checked, and named as the journal will have it.

    Attributes:
        messages: With their ids, the first after the parent.
        answer_id: Of the answer after them.
        prompt: Before the answer.
        sampling: Resolved.
        num_tokens: Length of the log up to where the answer begins.
        text: That the answer begins with, where it goes on from another one.
    """

    messages: Sequence[tuple[str, Message]]
    answer_id: str
    prompt: Prompt
    sampling: SamplingParams
    num_tokens: int
    text: str = ""


AlsoKept = Callable[[Begun], Sequence[Change]]
"""Gives what is made durable together with the beginning of a turn."""


class TurnRunner:
    """All turns in flight.

    Args:
        requests: What the engine was given.
        encoder: Makes prompts' ids; called in threads.
        vocabulary: Makes text of ids.
        model: Limits and defaults; replaced when the engine says what fits.
        limits: Bounds.
        stats: Counted into.
        recorder: Makes turns durable.
        new_id: Makes ids with a prefix.
        clock: Gives Unix seconds.
        monotonic: Gives seconds for timings.
        on_ended: Called with every turn that ended once it was submitted, and whether its answer was committed.

    Attributes:
        progress: Takes in what the engine says of them.
    """

    def __init__(
        self,
        requests: EngineRequests,
        encoder: ChatEncoder,
        vocabulary: Vocabulary,
        model: ModelProfile,
        limits: SessionLimits,
        stats: SessionStats,
        recorder: Recorder,
        *,
        new_id: Callable[[str], str],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        on_ended: Callable[[Turn, bool], None],
        draw: Callable[[], int] = draw_seed,
    ) -> None:
        self.requests = requests
        self.model = model
        self.is_ready = False
        self.contexts = ContextMaker(encoder, lambda: self.model)
        self._vocabulary = vocabulary
        self._limits = limits
        self._stats = stats
        self._recorder = recorder
        self._new_id = new_id
        self._clock = clock
        self._monotonic = monotonic
        self._draw = draw
        self._ends = TurnEnds(requests, encoder, recorder, lambda: self.model, stats, clock=clock, on_ended=on_ended)
        self.observers = self._ends.observers
        self.searches = BeamResults(requests, vocabulary, encoder, self._ends, new_id)
        self.restorer = Restorer(requests, recorder, self._ends, lambda: self.model, self.text_of, monotonic=monotonic)
        self.progress = TurnProgress(
            requests, recorder, self._ends, self.searches, self.restorer, stats, monotonic=monotonic
        )
        self._num_by_owner = self._ends.num_by_owner

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
        also_kept: AlsoKept | None = None,
        key_id: str = "",
        beam: BeamSearch | None = None,
        num_samples: int = 1,
        goes_on: Node | None = None,
    ) -> Turn:
        """Start the session's one turn: the messages are added after `parent`, and an answer is on its way.

        `params` are all there are: those of the session are not looked at. With `beam` the answer is searched for. Of
        `num_samples` answers this is the first; `begin_sample` must follow for each of the others. With `goes_on` it
        begins with that answer's tokens and has its parameters, and `params` say how many more are wanted.

        Returns when the turn is durable, together with what `also_kept` gives, and its request is submitted.
        `on_accepted` is called in the same step of the loop, before anything of the answer can come. Nothing has
        changed where this raises. The lock of a session that is kept must be held.

        Raises:
            Conflict: `session_busy`.
            Unavailable: `engine_unavailable`.
            RateLimited: The owner has too many turns in flight.
            InvalidRequest: A parameter is out of range, or the template has no place for the messages.
            ContextLengthExceeded: The prompt can never fit.
            StorageError: It cannot be kept.
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
            key_id=key_id,
        )
        session.turn = turn
        self._num_by_owner[owner] += num_samples
        try:
            prompt = await self._prompt(turn, parent, messages, goes_on)
            begun = self._check(turn, parent, messages, prompt, goes_on)
            if self._recorder.keeps(session):
                # Before the engine has it: a refusal then needs nothing undone, and no token waits for the journal.
                await self._keep(turn, parent, begun, also_kept)
            self._accept(turn, parent, begun, on_accepted)
        except BaseException:
            self._ends.uncount(owner, num_samples - 1)
            self._ends.free(turn)
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
            key_id=first.key_id,
        )
        session.turn = turn
        try:
            self.requests.share_prompt(first.session, first.answer, session)
            begun = self._check(turn, first.answer.parent, [], Prompt.of(first.answer))
            self._accept(turn, first.answer.parent, begun, on_accepted)
        except BaseException:
            self._ends.free(turn)
            raise
        return turn

    def forgo_samples(self, owner: Owner, count: int) -> None:
        """Give up answers that were to follow a first one and will not begin."""
        self._ends.uncount(owner, count)

    async def _prompt(
        self, turn: Turn, parent: Node | None, messages: Sequence[Message], goes_on: Node | None
    ) -> Prompt:
        session, wanted = turn.session, turn.params.max_tokens
        policy, system = session.context_policy, session.conversation.system
        if goes_on is not None:
            return await self.contexts.prompt_of(policy, system, goes_on, date=session.date, max_tokens=wanted)
        return await self.contexts.prompt(policy, system, parent, messages, date=session.date, max_tokens=wanted)

    def _check(
        self,
        turn: Turn,
        parent: Node | None,
        messages: Sequence[Message],
        prompt: Prompt,
        goes_on: Node | None = None,
    ) -> Begun:
        """Check that it fits, and name what is added."""
        num_prompt_tokens = prompt.num_tokens(parent)
        if goes_on is not None:
            return self._check_going_on(turn, prompt, num_prompt_tokens, goes_on)
        self.model.check_prompt(num_prompt_tokens)
        sampling = self.model.resolve(turn.params, num_prompt_tokens, draw=self._draw)
        if turn.beam is not None:
            check_beam_search(turn.beam, sampling, self.model.vocab_size)
        named = [(self._new_id("msg"), message) for message in messages]
        prompt = prompt.named(named[0][0]) if named else prompt
        return Begun(named, answer_of(turn.response), prompt, sampling, num_prompt_tokens)

    def _check_going_on(self, turn: Turn, prompt: Prompt, num_prompt_tokens: int, goes_on: Node) -> Begun:
        """As `_check`, for an answer that begins with the tokens of another one."""
        num_answered = turn.num_inherited = len(goes_on.ids)
        assert goes_on.sampling is not None, "an answer without its parameters"
        self.model.check_prompt(num_prompt_tokens + num_answered)
        sampling = self.model.going_on(goes_on.sampling, turn.params, num_prompt_tokens, num_answered)
        turn.params = Params(stop=goes_on.stop_strings, max_tokens=turn.params.max_tokens)
        turn.text = self.text_of(turn, sampling)
        begun_with = turn.text.begin(goes_on.ids)
        return Begun((), answer_of(turn.response), prompt, sampling, num_prompt_tokens, begun_with)

    async def _keep(self, turn: Turn, parent: Node | None, begun: Begun, also_kept: AlsoKept | None) -> None:
        """Make the beginning of a turn durable."""
        now, last = self._clock(), None if parent is None else parent.id
        messages: list[MessageRecord] = []
        for message_id, message in begun.messages:
            messages.append(message_record(message_id, message.role, message.content, last, now))
            last = message_id
        turn.record = answer_record(turn, begun.answer_id, last, begun.prompt, begun.sampling, now)
        added = [SaveMessage(turn.session.id, message) for message in (*messages, turn.record)]
        await self._recorder.save(turn.session, [*added, *(also_kept(begun) if also_kept is not None else ())])

    def _accept(
        self,
        turn: Turn,
        parent: Node | None,
        begun: Begun,
        on_accepted: Callable[[Turn, Sequence[Node]], None],
    ) -> None:
        """Change the conversation and submit; does not await."""
        conversation = turn.session.conversation
        if turn.text is None:
            turn.text = self.text_of(turn, begun.sampling)
        added: list[Node] = []
        last = parent
        for message_id, message in begun.messages:
            last = conversation.add_message(message_id, message.role, message.content, last)
            added.append(last)
        turn.dropped = begun.prompt.dropped
        answer = conversation.begin_answer(
            begun.answer_id,
            last,
            begun.prompt.ids,
            begun.sampling,
            turn.params.stop,
            log_system=begun.prompt.log_system,
            context_from=begun.prompt.context_from,
        )
        if begun.text:
            answer.append_text(begun.text)
        turn.answer, turn.first_node = answer, added[0] if added else answer
        if turn.decided is None:
            try:
                self.requests.submit(turn)
            except Unavailable:
                if turn.record is None:
                    conversation.remove_from(turn.first_node, turn.previous_head)
                    raise
                # It is durable, so it is taken: the next engine answers it.
                self.restorer.wait(turn)
            except BaseException:
                conversation.remove_from(turn.first_node, turn.previous_head)
                raise
        self._stats.turns_started += 1
        for observer in self.observers:
            observer.turn_started(turn.session.owner)
        on_accepted(turn, added)
        if turn.decided is not None:
            self._ends.finish(turn, turn.decided, None)

    def text_of(self, turn: Turn, sampling: SamplingParams) -> AnswerText:
        """Return what makes text of an answer's tokens, with none yet."""
        return AnswerText(
            self._vocabulary.detokenizer(), turn.params.stop, frozenset(sampling.stop_token_ids), self._token_text
        )

    def cancel(self, turn: Turn, reason: str | None = None) -> None:
        """End a turn as cancelled, or for `reason`, and keep what there is; does nothing to one that ends already."""
        if turn.decided is not None or turn.is_ending:
            return
        turn.decided, turn.cancel_reason = FinishReason.CANCELLED, reason
        if turn.request is None and turn.answer is not None:
            self._ends.finish(turn, turn.decided, None)  # No engine has it.
        else:
            self.requests.cancel(turn)

    # What the engine says.

    def on_ready(self, ready: Ready) -> None:
        """Take in what fits, and serve: first what another engine left."""
        self.model = self.model.with_ready(ready)
        self.is_ready = True
        self.restorer.resume()

    def on_died(self, reason: str, alone: int = NOT_KNOWN) -> None:
        """Forget what the engine held; turns in flight wait for the next one, and end where they were to end.

        Args:
            reason: For those that end.
            alone: The suspect that was computed alone as it died, or what else `pulse` has to say.
        """
        self.is_ready = False
        self.requests.on_died()
        self.progress.interrupt(reason, alone)

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
