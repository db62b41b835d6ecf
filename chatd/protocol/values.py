"""The values inside frames: parameters, messages, usage, items, a session's state."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from chatd.errors import ChatdError
from chatd.protocol.ranges import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, RANGES
from chatd.protocol.vocabulary import ContextPolicy, ItemStatus, Role


def _ranged(name: str) -> msgspec.Meta:
    """Put a range into the schema; a daemon refuses what is outside of it, and reading a frame does not."""
    return msgspec.Meta(extra_json_schema={"minimum": RANGES[name].low, "maximum": RANGES[name].high})


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters that a client may name; what is absent is the model's or the session's default.

    Ranges are those of `ranges.RANGES`; what they mean says `engine.sampling.SamplingParams`.
    """

    temperature: Annotated[float, _ranged("temperature")] | None = None
    top_p: Annotated[float, _ranged("top_p")] | None = None
    top_k: Annotated[int, _ranged("top_k")] | None = None
    min_p: Annotated[float, _ranged("min_p")] | None = None
    max_tokens: Annotated[int, _ranged("max_tokens")] | None = None
    min_tokens: Annotated[int, _ranged("min_tokens")] | None = None
    seed: Annotated[int, _ranged("seed")] | None = None
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_STRING_CHARS)], ...],
        msgspec.Meta(max_length=MAX_STOP_STRINGS),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    repetition_penalty: Annotated[float, _ranged("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _ranged("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _ranged("frequency_penalty")] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: Annotated[int, _ranged("logprobs")] | None = None
    ignore_eos: bool | None = None

    def over(self, base: Params) -> Params:
        """Return these parameters with `base` where they are absent."""
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if value not in (None, ())}
        return msgspec.structs.replace(base, **own)


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message that a client brings along when it creates a session."""

    role: Role
    content: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one response, named as in the Responses API."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int

    @classmethod
    def of(cls, input_tokens: int, cached_tokens: int, output_tokens: int) -> Usage:
        """Build from the three numbers."""
        return cls(
            input_tokens=input_tokens,
            input_tokens_details={"cached_tokens": cached_tokens},
            output_tokens=output_tokens,
        )

    @property
    def cached_tokens(self) -> int:
        """Input tokens whose KV was there already."""
        return self.input_tokens_details.get("cached_tokens", 0)


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a response's time went. Rates are tokens per second, 0 where there was nothing to time."""

    queue_ms: float
    ttft_ms: float
    prefill_tok_s: float
    decode_tok_s: float
    preemptions: int


class Siblings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The other messages that follow the same one: versions of a message that was edited or regenerated.

    Attributes:
        index: Which of them this is, from 1.
        count: How many there are.
        previous: What `branch.select` takes to show the one before: the end of that branch as it was last seen.
        next: Likewise for the one after.
    """

    index: int
    count: int
    previous: str | None = None
    next: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a session's tree.

    Attributes:
        id: Stable.
        role: Who wrote it.
        content: The text; of an answer in progress, the text so far.
        status: Whether more can come.
        parent: The item before it, or None for the first.
        reason: Of a finished answer, why it ended.
        usage: Of a finished answer.
        timings: Of a finished answer.
        siblings: Where there are others beside it.
        context_from: Of an answer before which the oldest messages were left out of the context: the first one that was
            in it, then and for what follows.
    """

    id: str
    role: Role
    content: str
    status: ItemStatus
    parent: str | None = None
    reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    siblings: Siblings | None = None
    context_from: str | None = None


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session as a list shows it. Times are Unix seconds; `writers` and `observers` count connections attached."""

    id: str
    title: str
    model: str
    created_at: float
    updated_at: float
    num_items: int
    context_used: int
    context_max: int
    busy: bool
    tier: str
    archived: bool = False
    pinned: bool = False
    system: str | None = None
    params: Params = Params()
    metadata: dict[str, str] = {}
    context_policy: ContextPolicy = "refuse"
    writers: int = 0
    observers: int = 0


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session has what was looked for.

    Attributes:
        session: Of the list.
        item: The latest message that has it; it may be in another branch than is shown.
        text: Where it stands in that message, on one line.
    """

    session: str
    item: str
    text: str


class LatestState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last values of the events that carry no `seq`, as a snapshot needs them."""

    queued: dict[str, Any] | None = None
    prefill: dict[str, int] | None = None
    usage: dict[str, int] | None = None
    tier: str | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A session at `head_seq`: its items on the path to the head, the answer in progress included."""

    session: SessionInfo
    items: list[Item]
    response: str | None
    state: LatestState


class Logprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log probability of one token of a delta and of the likeliest others, as (token text, log probability)."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = []


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape of OpenAI's errors, so that both doors agree."""

    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: ChatdError) -> ErrorBody:
        """Show an error to a client."""
        return cls(
            type=error.error_type,
            code=error.error_code,
            message=error.message,
            param=error.param,
            retry_after_ms=error.retry_after_ms,
            hint=error.hint,
        )
