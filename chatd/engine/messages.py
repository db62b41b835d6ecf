"""What the front and the engine say to each other: length-prefixed msgpack over a socketpair, no pickle.

The engine keeps the ids of each lease, so a turn sends only what is new. The front decides where an answer ends.
This module does no I/O and knows no torch; `encode` and the two decoders are all there is to the wire.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, SamplingParams

LeaseId = NewType("LeaseId", int)

PUBLIC_TENANT = ""
"""As `Submit.tenant`: a system request, whose blocks every tenant may reuse. No key belongs to it."""
LENGTH_PREFIX_BYTES = 4
MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class RequestClass(StrEnum):
    """Who waits for a request: a person, nobody, or a draft that is being typed."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    PREFILL_AHEAD = "prefill-ahead"


class FinishReason(StrEnum):
    """Why a request ended; each request ends with exactly one."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    KV_EXHAUSTED = "kv_exhausted"
    FAILED = "failed"
    COMPUTED = "computed"
    """Of a request that only had its prompt computed."""


class WaitReason(StrEnum):
    """Why a request is not running now."""

    QUOTA = "quota"
    FAIR_SHARE = "fair_share"
    SLOTS = "slots"
    NO_BLOCKS = "no_blocks"
    JOIN = "join"
    SWAP_IN = "swap_in"
    RESTORE = "restore"
    GRAMMAR = "grammar"


class Tier(StrEnum):
    """Where a session's KV is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    TOKENS = "tokens"


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of all messages: tagged with the class's name, fields in order."""


# Front to engine.


class Submit(_Message, frozen=True):
    """Generate after `new_ids`, appended to the lease at `base_len`.

    Attributes:
        request: Chosen by the front, never reused.
        lease: Chosen by the front; a lease that the engine does not know is opened where `base_len` is 0.
        tenant: The tenant of the key; the namespace of every block comes from it.
        base_len: The length, in tokens, of what the front believes the lease to hold. More in the engine is
            trimmed; less is answered with `LeaseLost`.
        new_ids: Appended. Empty goes on from what is there.
        params: Resolved sampling parameters.
        request_class: Its place in the schedule.
        keep_lease: False releases the lease with the request (stateless requests that nobody will continue).
        compute_only: Compute the prompt, its last token too, draw nothing, and end as `computed`; without a step where
            all of it is computed already. It has to fit as any other: with one token of an answer after it.
        sample_of: Another sample of the prompt of that request, which was submitted before: where it has not ended, its
            blocks are shared as soon as the prompt is computed. Lease and ids are given as for any other request.
        beam: Search instead of drawing; the sequences come in one `Beams` before `Done`, the best stays in the lease.
    """

    request: RequestId
    lease: LeaseId
    tenant: str
    base_len: int
    new_ids: list[int]
    params: SamplingParams
    request_class: RequestClass = RequestClass.INTERACTIVE
    keep_lease: bool = True
    compute_only: bool = False
    sample_of: RequestId | None = None
    beam: BeamSearch | None = None


class Fork(_Message, frozen=True):
    """Open `new_lease` with the first `at` tokens of `lease`: full blocks are shared, no KV is copied now.

    Answered with `Forked` at once, also while a request is on `lease`.
    """

    lease: LeaseId
    new_lease: LeaseId
    at: int


class Trim(_Message, frozen=True):
    """Cut a lease to `length` tokens; one that a request is on, when that has ended."""

    lease: LeaseId
    length: int


class Release(_Message, frozen=True):
    """Forget a lease: its ids and its claim to blocks."""

    lease: LeaseId


class Cancel(_Message, frozen=True):
    """End a request as cancelled; what it has computed stays in the lease."""

    request: RequestId


class Finish(_Message, frozen=True):
    """The answer ends at lease length `length` (a stop string): the rest is trimmed and not counted.

    Attributes:
        request: A request of the front's; one that has ended since is trimmed all the same.
        lease: Its lease.
        length: Tokens of the lease, prompt included, that stay.
    """

    request: RequestId
    lease: LeaseId
    length: int


class Retain(_Message, frozen=True):
    """Tell how a lease should be valued while idle: is anybody attached to its session. It may be open or not yet."""

    lease: LeaseId
    attached: bool


class WatchPool(_Message, frozen=True):
    """Send `PoolFrame`s no more often than every `interval_s`; 0 stops them.

    Attributes:
        interval_s: Seconds between frames.
        with_map: Include the state of every block.
        with_leases: Include a row per lease.
    """

    interval_s: float
    with_map: bool = False
    with_leases: bool = False


class SetTenant(_Message, frozen=True):
    """Change a tenant's part of the machine from now on.

    `Ready.max_model_len` stays; a prompt that the other tenants' floors leave no room for is refused as any.

    Attributes:
        tenant: Its name.
        weight: Of service tokens, slots and blocks beside the other tenants' weights.
        floor: Part of the pool, 0 to 0.5, that no other tenant can take; all floors together get at most half.
    """

    tenant: str
    weight: float
    floor: float


class Ping(_Message, frozen=True):
    """Asks for a `Pong`: the engine's loop is alive."""

    nonce: int


class Shutdown(_Message, frozen=True):
    """End the process after the current step."""


FrontMessage = Submit | Fork | Trim | Release | Cancel | Finish | Retain | WatchPool | SetTenant | Ping | Shutdown


# Engine to front.


class Loading(_Message, frozen=True):
    """A phase of start-up with progress from 0 to 1."""

    phase: str
    progress: float


class Ready(_Message, frozen=True):
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


class Started(_Message, frozen=True):
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


class Prefill(_Message, frozen=True):
    """Progress of a prompt: `done` of `total` tokens, sent when a chunk did not finish it."""

    request: RequestId
    done: int
    total: int


class Preempted(_Message, frozen=True):
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


class Tokens(_Message, frozen=True):
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


class Done(_Message, frozen=True):
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


class Beams(_Message, frozen=True):
    """What a beam search found, best first; `Done` follows."""

    request: RequestId
    sequences: list[BeamSequence]


class Forked(_Message, frozen=True):
    """Answers `Fork`: what the new lease has in common with the other one now; nothing where it could not be opened.

    Attributes:
        lease: The new one.
        num_tokens: Leading tokens whose KV is shared.
        num_blocks: The blocks that hold them; a last one that is partly full is copied by whoever appends first.
    """

    lease: LeaseId
    num_tokens: int
    num_blocks: int


class LeaseLost(_Message, frozen=True):
    """The engine holds less of a lease than `base_len`; submit again with the whole log and `base_len` 0."""

    request: RequestId
    lease: LeaseId


class LeaseTier(_Message, frozen=True):
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


class Waiting(_Message, frozen=True):
    """Where a request stands in its tenant's own queue, sent when that changes."""

    request: RequestId
    position: int
    why: WaitReason


class TenantPool(msgspec.Struct, array_like=True, frozen=True):
    """One tenant's part of the pool.

    Attributes:
        tenant: Its name.
        num_active: Blocks charged to it with `ref_count` > 0.
        num_cached: Blocks of its namespace that nobody holds.
        num_running: Requests.
        num_waiting: Requests.
        prompt_tokens: Since start.
        cached_tokens: Since start; the hit rate is their ratio.
        output_tokens: Since start.
    """

    tenant: str
    num_active: int
    num_cached: int
    num_running: int
    num_waiting: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class LeasePool(msgspec.Struct, array_like=True, frozen=True):
    """What one lease holds: blocks in its table, those that another table holds too, its tokens, its tier."""

    lease: LeaseId
    tenant: str
    num_blocks: int
    num_shared: int
    num_tokens: int
    tier: Tier
    active: bool


class TierPool(msgspec.Struct, array_like=True, frozen=True):
    """One tier below the pool.

    Attributes:
        tier: Host or disk.
        num_blocks: That it can hold.
        num_used: That it holds.
        num_stored: Written since start.
        num_loaded: Read since start.
        num_refused: Found damaged or of another content when read, since start.
    """

    tier: Tier
    num_blocks: int
    num_used: int
    num_stored: int
    num_loaded: int
    num_refused: int


class PoolFrame(_Message, frozen=True):
    """The pool at one step.

    Attributes:
        step: The step.
        num_blocks: Usable blocks; free + cached + active sum to it.
        num_free: Empty.
        num_cached: Registered, held by nobody.
        num_active: Held.
        num_shared: Held more than once (part of `num_active`).
        num_evictions: Cached blocks taken for something else, since start.
        output_tokens_per_s: Over the last seconds.
        num_running: Requests.
        num_waiting: Requests.
        tenants: A row each.
        leases: A row each, where asked for.
        states: One byte a block where asked for: 0 free, 1 cached, 2 active, 3 shared.
        owners: Index into `tenants` for each block (two bytes, little endian, 65535 = public or none), where asked for.
        tiers: A row for each tier below the pool that is in use.
        num_held: Blocks of all tables, each counted in every table that has it: beyond `num_active` is what sharing
            saves.
    """

    step: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_active: int
    num_shared: int
    num_evictions: int
    output_tokens_per_s: float
    num_running: int
    num_waiting: int
    tenants: list[TenantPool]
    leases: list[LeasePool] = []
    states: bytes = b""
    owners: bytes = b""
    tiers: list[TierPool] = []
    num_held: int = 0


class EngineStats(_Message, frozen=True):
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


class Pong(_Message, frozen=True):
    """Answers `Ping`."""

    nonce: int


class StartFailed(_Message, frozen=True):
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
    | LeaseLost
    | LeaseTier
    | Waiting
    | PoolFrame
    | EngineStats
    | Pong
    | StartFailed
)

_encoder = msgspec.msgpack.Encoder()
_front_decoder = msgspec.msgpack.Decoder(FrontMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: FrontMessage | EngineMessage) -> bytes:
    """Return the frame of a message: four bytes of length (big endian), then msgpack."""
    body = _encoder.encode(message)
    assert len(body) <= MAX_MESSAGE_BYTES, f"{len(body)} bytes in one message, the limit is {MAX_MESSAGE_BYTES}"
    return len(body).to_bytes(LENGTH_PREFIX_BYTES, "big") + body


def decode_front(body: bytes | memoryview) -> FrontMessage:
    """Decode what the front sent."""
    return _front_decoder.decode(body)


def decode_engine(body: bytes | memoryview) -> EngineMessage:
    """Decode what the engine sent."""
    return _engine_decoder.decode(body)
