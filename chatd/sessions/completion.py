"""What the stateless door is asked, and its answer as it comes. Knows the turn that makes it; knows no session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatd.engine.messages import RequestClass
from chatd.errors import ChatdError
from chatd.protocol import Logprob, Message, Params, Timings, Usage
from chatd.sessions.model_profile import NO_PARAMS
from chatd.sessions.turn import TextDelta, Turn, TurnEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What the stateless door is asked.

    Attributes:
        messages: The whole history; system messages first.
        params: Over the model's defaults.
        conversation_id: The client's own name for the conversation, of which 256 characters count; it grants nothing.
        request_class: Its place in the schedule.
    """

    messages: Sequence[Message]
    params: Params = NO_PARAMS
    conversation_id: str | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """More of an answer: text, the tokens behind it, and their log probabilities where asked for."""

    text: str
    num_tokens: int
    logprobs: list[Logprob] | None = None


class Completion:
    """One answer as it comes: iterate over its deltas, then read how it ended.

    Deltas that nobody has taken yet are merged. Whoever stops reading early calls `cancel`.

    Attributes:
        id: Names the response.
        finish_reason: A reason of the protocol ("stop", "stop_string", "max_output_tokens", …), "failed" where `error`
            is set, or None while the answer goes on.
        usage: At the end, unless it failed.
        timings: Likewise.
        error: Why it failed.
    """

    def __init__(self, cancel: Callable[[Turn], None]) -> None:
        self.id = ""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.error: ChatdError | None = None
        self._cancel = cancel
        self._turn: Turn | None = None
        self._texts: list[str] = []
        self._num_tokens = 0
        self._logprobs: list[Logprob] | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> CompletionDelta:
        while not self._texts:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        delta = CompletionDelta("".join(self._texts), self._num_tokens, self._logprobs)
        self._texts.clear()
        self._num_tokens, self._logprobs = 0, None
        return delta

    async def text(self) -> str:
        """Return what is left of the answer, once it has ended."""
        return "".join([delta.text async for delta in self])

    def cancel(self) -> None:
        """End the generation; what there is of the answer is kept. Does nothing after the end."""
        if self._turn is not None and not self._turn.ended.is_set():
            self._cancel(self._turn)

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
        self._changed.set()
