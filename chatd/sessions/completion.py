"""What the stateless door is asked, and its answer as it comes. Knows the turn that makes it; knows no session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatd.engine.messages import RequestClass
from chatd.engine.sampling import BeamSearch
from chatd.errors import ChatdError
from chatd.protocol import Logprob, Message, Params, Timings, Usage
from chatd.sessions.model_profile import NO_PARAMS
from chatd.sessions.turn import OtherAnswer, TextDelta, Turn, TurnEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What the stateless door is asked.

    Attributes:
        messages: The whole history; system messages first.
        params: Over the model's defaults.
        conversation_id: The client's own name for the conversation, of which 256 characters count; it grants nothing.
        request_class: Its place in the schedule.
        key_id: Whose usage it is.
        num_choices: Answers that are wanted.
        beam: Search for them in place of drawing; `num_returned` of it is `num_choices`.
    """

    messages: Sequence[Message]
    params: Params = NO_PARAMS
    conversation_id: str | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE
    key_id: str = ""
    num_choices: int = 1
    beam: BeamSearch | None = None


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """More of an answer: text, the tokens behind it, and their log probabilities where asked for."""

    text: str
    num_tokens: int
    logprobs: list[Logprob] | None = None


class Completion:
    """One answer as it comes: iterate over its deltas, then read how it ended.

    Deltas that nobody has taken yet are merged. Whoever stops reading early calls `cancel`.

    Args:
        cancel: Ends a turn.
        others: Of a search, what takes the answers that it found beside this one.

    Attributes:
        id: Names the response.
        finish_reason: A reason of the protocol ("stop", "stop_string", "max_output_tokens", …), "failed" where `error`
            is set, or None while the answer goes on.
        usage: At the end, unless it failed.
        timings: Likewise.
        error: Why it failed.
    """

    def __init__(self, cancel: Callable[[Turn], None], others: Sequence[Completion] = ()) -> None:
        self.id = ""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.error: ChatdError | None = None
        self._cancel = cancel
        self._others = others
        self._turn: Turn | None = None
        self._texts: list[str] = []
        self._num_tokens = 0
        self._logprobs: list[Logprob] | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> CompletionDelta:
        while (delta := self.take()) is None:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return delta

    def take(self) -> CompletionDelta | None:
        """Return what has come since the last time, or None."""
        if not self._texts:
            return None
        delta = CompletionDelta("".join(self._texts), self._num_tokens, self._logprobs)
        self._texts.clear()
        self._num_tokens, self._logprobs = 0, None
        return delta

    def watch(self, changed: asyncio.Event) -> None:
        """Set this event, in place of an own one, when more has come."""
        self._changed = changed

    async def text(self) -> str:
        """Return what is left of the answer, once it has ended."""
        return "".join([delta.text async for delta in self])

    def cancel(self) -> None:
        """End the generation; what there is of the answer is kept. Does nothing after the end."""
        if self._turn is not None and not self._turn.ended.is_set():
            self._cancel(self._turn)

    async def ended(self) -> None:
        """Return once the generation is over, however it ends."""
        if self._turn is not None:
            await self._turn.ended.wait()

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    def begin(self, turn: Turn) -> None:
        """Learn which turn this is."""
        self._turn = turn
        self.id = turn.response

    def on_delta(self, turn: Turn, delta: TextDelta) -> None:
        """Take more of the answer."""
        self._texts.append(delta.text)
        self._num_tokens += delta.num_tokens
        if delta.logprobs is not None:
            self._logprobs = delta.logprobs if self._logprobs is None else self._logprobs + delta.logprobs
        self._changed.set()

    def on_end(self, turn: Turn, end: TurnEnd) -> None:
        """Take the end."""
        self.finish_reason, self.usage, self.timings, self.error = end.reason, end.usage, end.timings, end.error
        for number, completion in enumerate(self._others):
            completion.on_found(end, end.others[number] if number < len(end.others) else None)
        self._changed.set()

    def on_found(self, end: TurnEnd, other: OtherAnswer | None) -> None:
        """Take an answer that a search found beside another one, or its end where it found none."""
        self.finish_reason, self.timings, self.error = end.reason, end.timings, end.error
        if other is not None:
            num_tokens = len(other.answer.ids)
            self.finish_reason = other.reason
            if other.text:
                self._texts.append(other.text)
                self._num_tokens += num_tokens
            if end.usage is not None:
                self.usage = Usage.of(end.usage.input_tokens, end.usage.cached_tokens, num_tokens)
        self._changed.set()
