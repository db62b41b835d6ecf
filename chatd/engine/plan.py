"""One step of the engine: what will be computed (`Plan`) and what came of it (`StepOutput`).

The scheduler makes a plan, a runner executes it, and only commit makes its effects visible. The model runner reads
nothing but the plan; the fake of the simulation gets the very same objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

import msgspec

from chatd.engine.sampling import SamplingParams
from chatd.kvcache.block import BlockId as BlockId
from chatd.kvcache.block import HostSlot as HostSlot

RequestId = NewType("RequestId", int)

PENDING_TOKEN = -1
"""In the place of the one token of a decode that is planned one step ahead: what the step before draws for it."""


class SampleSpec(msgspec.Struct, frozen=True):
    """How the token after a chunk's last row is drawn.

    Attributes:
        params: The request's parameters.
        output_position: How many tokens of the answer exist already, a pending one included; the draw's number.
        stop_token_ids: The ids that `min_tokens` forbids for now; empty where it does not apply.
        prompt_ids: The ids before the answer, only where the parameters need history.
        output_ids: The ids of the answer so far, likewise, without a pending one. Both are read during the step only
            and never copied here.
        num_candidates: Above 0 nothing is drawn: so many of the likeliest tokens are wanted, with log probabilities.
    """

    params: SamplingParams
    output_position: int
    stop_token_ids: tuple[int, ...] = ()
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    num_candidates: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        params = self.params
        return (
            params.is_greedy
            and params.logprobs is None
            and not params.logit_bias
            and not self.stop_token_ids
            and not params.needs_history
            and not self.num_candidates
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive positions of one request computed in one step: a decode is a chunk of one row.

    Attributes:
        request_id: Whose rows these are.
        start: The position of the first row; everything before it is in the block table's slots.
        token_ids: The rows' tokens; `(PENDING_TOKEN,)` where the step before, which is still running, draws it.
        block_ids: The block table up to and including the block of the last row. The table's own list, not a copy:
            it is read before `launch` or `execute` returns, and not kept; the next plan may change it.
        sample: Set where the last row's logits are drawn from.
    """

    request_id: RequestId
    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[BlockId]
    sample: SampleSpec | None

    @property
    def num_tokens(self) -> int:
        """Rows in this chunk."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of one whole block, done before the step's first write (copy-on-write)."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One whole block between the pool and the host's buffer; which way is said by the list that it is in."""

    block_id: BlockId
    slot: HostSlot


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: stores, then copies and loads, then one forward over all rows of all chunks.

    Stores come first, since what they save may be in blocks that the rest of the same plan writes.

    Attributes:
        step: Counts plans; never reused.
        chunks: In the order of their rows in the flattened batch; empty in a plan that only moves blocks.
        copies: Done before the forward.
        block_size: Positions in a block.
        stores: Blocks of the pool that are saved to the host.
        loads: Blocks of the pool that are filled from the host; no chunk of the plan writes to them.
    """

    step: int
    chunks: Sequence[Chunk]
    copies: Sequence[BlockCopy]
    block_size: int
    stores: Sequence[BlockMove] = ()
    loads: Sequence[BlockMove] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the flattened batch."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one drawn token, after temperature 1 and before penalties.

    Attributes:
        logprob: Of the drawn token.
        top: The likeliest (token id, log probability) pairs, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed.

    Attributes:
        sampled: The token drawn for each chunk that has a `sample`.
        logprobs: For those that asked.
        failed: Requests whose logits were not finite, and why; their chunk has no token.
        model_s: Seconds in the forward and in sampling; an input to the cost model.
        move_s: Seconds in stores and loads, which are not in `model_s`.
        candidates: For each chunk that wants some: (token id, log probability) pairs, likeliest first, of equal ones
            the lowest id first. Log probabilities are over the whole vocabulary, in float32, and only then changed by
            repetition penalty, logit bias and forbidden stop ids (minus infinity).
    """

    sampled: Mapping[RequestId, int]
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    failed: Mapping[RequestId, str] = field(default_factory=dict)
    model_s: float = 0.0
    move_s: float = 0.0
    candidates: Mapping[RequestId, Sequence[tuple[int, float]]] = field(default_factory=dict)


class StepTooLarge(Exception):
    """The device has too little memory for a step; one with fewer rows may succeed. `MemoryError` says the same."""


class DeviceFault(Exception):
    """The device cannot be used any more by this process: the engine ends, and its supervisor starts another."""


class Runner(Protocol):
    """Executes plans: the model runner, or the fake of the simulation."""

    def execute(self, plan: Plan) -> StepOutput:
        """Run one step, with none in flight. An exception means that nothing of the plan may become visible.

        Raises:
            StepTooLarge: It is tried again with fewer rows.
            DeviceFault: It is not tried again.
        """
        ...


class StepInFlight(Protocol):
    """A step that was launched and may still run."""

    def result(self) -> StepOutput:
        """Wait for its end; called once for each step, in the order of their launch.

        An exception means that nothing of its plan, nor of a later one, may become visible. The later one is waited
        for as well then, since its blocks are given to others, and whatever it says is ignored. It may be called after
        the plan's requests have ended.

        Raises:
            StepTooLarge: It is tried again with fewer rows.
            DeviceFault: It is not tried again.
        """
        ...


class PipelinedRunner(Runner, Protocol):
    """A runner that takes a second plan while the first one runs: one step ahead.

    The second plan may have pending tokens, of requests that draw in the first; everything else in it is known.
    """

    def launch(self, plan: Plan) -> StepInFlight:
        """Start a step behind the one in flight, and return without waiting for either.

        All that it reads and writes on the device comes after all that the step before does there. The plan is read
        before this returns, but for the parameters of its draws, which do not change. A row whose pending token was
        not drawn, since its logits were not finite, may compute anything: its request has failed.

        Raises:
            Exception: The step was not started; the one in flight is none the worse for it.
        """
        ...
