"""Several answers to one stateless request, as they come. Knows completions; knows no turn and no session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from chatd.errors import ChatdError
from chatd.protocol import Params, Usage
from chatd.sessions.completion import Completion, CompletionDelta

_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What comes of one choice: more of it, or None at its end."""

    index: int
    delta: CompletionDelta | None


class Choices:
    """The answers to one request: iterate over what comes, then read how each ended.

    An iteration ends when all of them have, or when one has failed. Whoever stops reading early calls `cancel`.

    Args:
        completions: At least one, in the order of their index.
        num_beams: Of the search that finds them; 0 where each is an answer of its own.
    """

    def __init__(self, completions: Sequence[Completion], num_beams: int = 0) -> None:
        self.completions = completions
        self._num_beams = num_beams
        self._open = list(range(len(completions)))
        self._changed = asyncio.Event()
        for completion in completions:
            completion.watch(self._changed)

    @property
    def id(self) -> str:
        """Names the response."""
        return self.completions[0].id

    @property
    def error(self) -> ChatdError | None:
        """Why one of them failed."""
        return next((completion.error for completion in self.completions if completion.error is not None), None)

    @property
    def usage(self) -> Usage | None:
        """The prompt once, and the tokens of all answers that have ended; None where the first one has not."""
        first = self.completions[0].usage
        if first is None:
            return None
        outputs = [completion.usage.output_tokens for completion in self.completions if completion.usage is not None]
        return Usage.of(first.input_tokens, first.cached_tokens, sum(outputs))

    @property
    def num_charged_tokens(self) -> int:
        """What is counted against a quota, once all have ended: tokens that were computed."""
        usage = self.usage
        answers = [c.usage.output_tokens for c in self.completions if c.usage is not None]
        # Every beam of a search goes on for at least as long as the longest sequence that is returned.
        outputs = self._num_beams * max(answers, default=0) if self._num_beams else sum(answers)
        return outputs if usage is None else usage.input_tokens - usage.cached_tokens + outputs

    def __aiter__(self) -> Choices:
        return self

    async def __anext__(self) -> ChoiceEvent:
        while self._open and self.error is None:
            # Cleared before looking: what comes meanwhile sets it again.
            self._changed.clear()
            for index in self._open:
                completion = self.completions[index]
                delta = completion.take()
                if delta is not None or completion.finish_reason is not None:
                    # The others come before this one does again.
                    self._open.remove(index)
                    if delta is not None:
                        self._open.append(index)
                    return ChoiceEvent(index, delta)
            await self._changed.wait()
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End all generations; does nothing to those that have ended."""
        for completion in self.completions:
            completion.cancel()

    async def ended(self) -> None:
        """Return once all generations are over, however they end."""
        for completion in self.completions:
            await completion.ended()


def params_of_choice(params: Params, index: int) -> Params:
    """Return the parameters of one choice: with a seed of its own where the request names one."""
    if params.seed is None or index == 0:
        return params
    # Out of range is refused with the first choice.
    return msgspec.structs.replace(params, seed=(params.seed + index) % _SEEDS)


def params_of_search(params: Params) -> Params:
    """Return a search's parameters: what it has no place for is neutral, unless the request itself names it."""
    neutral = Params(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0)
    return params.over(neutral)
