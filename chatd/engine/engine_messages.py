"""What the engine says to the front."""

from __future__ import annotations

import msgspec

from chatd.engine.plan import RequestId
from chatd.engine.pool_messages import BlockFacts, PoolFrame
from chatd.engine.vocabulary import FinishReason, LeaseId, Message, Tier, WaitReason


class Loading(Message, frozen=True):
    """A phase of start-up with progress from 0 to 1."""

    phase: str
    progress: float


class Ready(Message, frozen=True):
    """The engine serves.

    Attributes:
        num_blocks: Usable blocks of the pool.
        block_size: Tokens of a block.
        max_model_len: Tokens of a context, lowered to what fits.
        vocab_size: Ids are below this.
        kv_bytes: Size of the pool.
        quantization: Weight format that runs.
        notes: What start-up changed or fell back to, for the person at the terminal.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    kv_bytes: int
    quantization: str
    notes: list[str]


class Started(Message, frozen=True):
    """A request was admitted.

    Attributes:
        request: Which.
        num_prompt_tokens: Ids of the lease before the answer.
        num_cached_tokens: Of those, found computed.
        queue_s: Seconds from submission to admission.
    """

    request: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float


class Prefill(Message, frozen=True):
    """Progress of a prompt: `done` of `total` tokens, sent when a chunk did not finish it."""

    request: RequestId
    done: int
    total: int


class Preempted(Message, frozen=True):
    """A running request lost its blocks; it goes on later (`resumed` false), or has gone on (true)."""

    request: RequestId
    resumed: bool


class TokenDelta(msgspec.Struct, array_like=True, frozen=True):
    """New tokens of one request in one step.

    Attributes:
        request: Whose.
        ids: In order; usually one.
        logprobs: For each id (log probability, [(token id, log probability), …]), or None.
    """

    request: RequestId
    ids: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None


class Tokens(Message, frozen=True):
    """All new tokens of one step, in one frame."""

    step: int
    deltas: list[TokenDelta]


class RequestTimings(msgspec.Struct, array_like=True, frozen=True):
    """Where a request's time went, in seconds by the engine's clock.

    Attributes:
        queue_s: Submission to first admission.
        prefill_s: First admission to first token.
        decode_s: First token to last.
        num_prefill_tokens: Tokens computed before the first answer token, recomputation included.
        num_preemptions: How often it lost its blocks.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    num_prefill_tokens: int
    num_preemptions: int


class Done(Message, frozen=True):
    """The one end of a request.

    Attributes:
        request: Which.
        reason: Why.
        num_prompt_tokens: Ids before the answer.
        num_cached_tokens: Of those, found computed.
        num_output_tokens: Ids of the answer that the engine has kept; the front may have cut it shorter.
        timings: Where the time went.
        error_code: For `failed`: a stable code of `chatd.errors`.
        error_message: For `failed`.
        num_blocks: Blocks that the lease holds now; 0 where it was released.
        num_shared: Of those, held by somebody else too.
    """

    request: RequestId
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    timings: RequestTimings
    error_code: str = ""
    error_message: str = ""
    num_blocks: int = 0
    num_shared: int = 0


class BeamSequence(msgspec.Struct, array_like=True, frozen=True):
    """One result of a beam search.

    Attributes:
        ids: Of the answer, the stop id included where it ended by one.
        score: Sum of log probabilities over length ** penalty.
        reason: Why it ended.
    """

    ids: list[int]
    score: float
    reason: FinishReason


class Beams(Message, frozen=True):
    """What a beam search found, best first; `Done` follows."""

    request: RequestId
    sequences: list[BeamSequence]


class Forked(Message, frozen=True):
    """Answers `Fork`: what the new lease has in common with the other one now; nothing where it could not be opened.

    Attributes:
        lease: The new one.
        num_tokens: Leading tokens whose KV is shared.
        num_blocks: The blocks that hold them; a last one that is partly full is copied by whoever appends first.
    """

    lease: LeaseId
    num_tokens: int
    num_blocks: int


class Erased(Message, frozen=True):
    """Answers `Erase` and `EraseTenant`: the blocks that are gone.

    Attributes:
        lease: As it was given.
        num_blocks: Of the pool, those that the lease alone held included.
        num_host_blocks: Of the host's buffer.
        num_disk_blocks: Of the disk; their files are removed next.
    """

    lease: LeaseId
    num_blocks: int
    num_host_blocks: int
    num_disk_blocks: int


class LeaseLost(Message, frozen=True):
    """The engine holds less of a lease than `base_len`; submit again with the whole log and `base_len` 0."""

    request: RequestId
    lease: LeaseId


class LeaseTier(Message, frozen=True):
    """A lease's KV moved, fully or partly.

    Attributes:
        lease: Which.
        tier: Where most of it is now.
        why: "pressure", "used", "policy".
        num_tokens_kept: Leading tokens whose KV is still on the device.
    """

    lease: LeaseId
    tier: Tier
    why: str
    num_tokens_kept: int


class Waiting(Message, frozen=True):
    """Where a request stands in its tenant's own queue, sent when that changes."""

    request: RequestId
    position: int
    why: WaitReason


class Inspected(Message, frozen=True):
    """Answers `InspectBlocks`.

    Attributes:
        question: As it was given.
        step: The step after which it is so.
        blocks: What is known of each; free ones, and what is not there, are left out.
    """

    question: int
    step: int
    blocks: list[BlockFacts]


class EngineStats(Message, frozen=True):
    """Counters since start, once a second while anything happened; what `/metrics` shows of the engine.

    Attributes:
        steps: Steps committed.
        step_s: Seconds in steps, and of those in the model.
        model_s: Likewise.
        num_preemptions: Requests that lost their blocks.
        num_failed_steps: Steps that were discarded.
        integrity_errors: Invariants found broken when idle.
        num_swapped: Of the preempted requests, those whose blocks were saved to a lower tier.
        num_joins: Requests that waited for a prefix that another one was computing.
        move_s: Of `step_s`, seconds in moving blocks to lower tiers and back.
        num_oversized_steps: Of the discarded steps, those for which the device has too little memory.
    """

    steps: int
    step_s: float
    model_s: float
    num_preemptions: int
    num_failed_steps: int
    integrity_errors: int
    num_swapped: int = 0
    num_joins: int = 0
    move_s: float = 0.0
    num_oversized_steps: int = 0


class Pong(Message, frozen=True):
    """Answers `Ping`."""

    nonce: int


class StartFailed(Message, frozen=True):
    """The engine cannot serve; it exits after this.

    Attributes:
        code: Of `chatd.errors`.
        message: For the person at the terminal.
        exit_code: Of the command.
    """

    code: str
    message: str
    exit_code: int


EngineMessage = (
    Loading
    | Ready
    | Started
    | Prefill
    | Preempted
    | Tokens
    | Beams
    | Done
    | Forked
    | Erased
    | LeaseLost
    | LeaseTier
    | Waiting
    | PoolFrame
    | Inspected
    | EngineStats
    | Pong
    | StartFailed
)
