"""The frames of chatd.v1, both directions. No I/O, no torch; the server, the client and the JSON Schema share them.

Commands are a closed schema: an unknown field or a value of the wrong type is refused by the field's name. Events are
open: a client ignores fields and types that it does not know. Text is JSON; `type` tells the frames apart.

Events that make the transcript carry the session's contiguous `seq`; those of which only the latest value matters
carry `session` but no `seq`; the rest belong to the connection.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from chatd.errors import ChatdError, InvalidRequest, UnknownType

SUBPROTOCOL = "chatd.v1"
TICKET_SUBPROTOCOL_PREFIX = "chatd.ticket."
WEBSOCKET_PATH = "/v1/chat/ws"

CLOSE_RESTART = 1012
CLOSE_OVERLOAD = 1013
CLOSE_PROTOCOL = 4400
CLOSE_UNAUTHENTICATED = 4401
CLOSE_NO_FIRST_FRAME = 4408
CLOSE_RATE = 4429

MIN_FRAME_BYTES = 256 * 1024
MAX_FRAME_BYTES = 4 * 1024 * 1024
CELL_STATES = ("free", "cached", "active", "shared")

# Python's `$` also matches before a line end at the end; JSON Schema's does not, and knows no `\Z`.
_ID_PATTERN = r"^[0-9A-Za-z_-]{1,64}(?!\n)$"
CommandId = Annotated[str, msgspec.Meta(pattern=_ID_PATTERN)]
SessionId = Annotated[str, msgspec.Meta(pattern=_ID_PATTERN)]
ItemId = Annotated[str, msgspec.Meta(pattern=_ID_PATTERN)]
Title = Annotated[str, msgspec.Meta(max_length=200)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
Role = Literal["system", "user", "assistant"]
AttachRole = Literal["writer", "observer"]
HistoryScope = Literal["full", "tail", "none"]
ContextPolicy = Literal["refuse", "drop_oldest"]
ItemStatus = Literal["completed", "in_progress", "incomplete"]
IncompleteReason = Literal["max_output_tokens", "context", "cancelled", "kv_exhausted", "draining"]
CompletedReason = Literal["stop", "stop_string"]


def frame_limit_bytes(context: int) -> int:
    """Return the largest text frame, in bytes, that a daemon with this context accepts."""
    return min(max(MIN_FRAME_BYTES, 8 * context), MAX_FRAME_BYTES)


# Values inside frames.


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters that a client may name; what is absent is the model's or the session's default.

    Ranges are those of `engine.sampling.SamplingParams`. `stop` holds at most 16 strings of at most 256 characters.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...], msgspec.Meta(max_length=16)
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
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
    """A session as a list shows it. Times are Unix seconds."""

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


# Client to server.


class _Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all commands; `id` is echoed as `re`."""

    id: CommandId | None = None


class SessionCreate(_Command, frozen=True, kw_only=True, tag="session.create"):
    """Open a session; the connection is attached to it as a writer."""

    system: str | None = None
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=4096)] = ()
    params: Params = Params()
    title: Title | None = None
    metadata: Metadata = {}
    context_policy: ContextPolicy | None = None


class SessionAttach(_Command, frozen=True, kw_only=True, tag="session.attach"):
    """Receive a session's events after `after_seq`, exactly where the ring still has them, else after a snapshot."""

    session: SessionId
    after_seq: Annotated[int, msgspec.Meta(ge=0)] | None = None
    boot: str | None = None
    role: AttachRole = "writer"
    history: HistoryScope = "full"


class SessionList(_Command, frozen=True, kw_only=True, tag="session.list"):
    """List one's own sessions, last used first."""

    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    query: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    archived: bool = False


class SessionGet(_Command, frozen=True, kw_only=True, tag="session.get"):
    """Return one session with its items."""

    session: SessionId


class SessionUpdate(_Command, frozen=True, kw_only=True, tag="session.update"):
    """Change what is named; another `system` is in the context from the next answer on."""

    session: SessionId
    title: Title | None = None
    system: str | None = None
    params: Params | None = None
    archived: bool | None = None
    pinned: bool | None = None
    metadata: Metadata | None = None
    context_policy: ContextPolicy | None = None


class SessionDetach(_Command, frozen=True, kw_only=True, tag="session.detach"):
    """Receive no more of a session's events."""

    session: SessionId


class SessionClose(_Command, frozen=True, kw_only=True, tag="session.close"):
    """Release a session's KV and keep its text."""

    session: SessionId


class SessionErase(_Command, frozen=True, kw_only=True, tag="session.erase"):
    """Remove a session from every tier and the journal; what forks have of it stays theirs."""

    session: SessionId


class SessionFork(_Command, frozen=True, kw_only=True, tag="session.fork"):
    """Open a session with the messages up to `at`, else all of them; the connection is attached to it as a writer."""

    session: SessionId
    at: ItemId | None = None
    title: Title | None = None


class UserMessage(_Command, frozen=True, kw_only=True, tag="user.message"):
    """Say something; an answer follows unless `respond` is false."""

    session: SessionId
    content: str
    parent: ItemId | None = None
    params: Params | None = None
    respond: bool = True


class MessageEdit(_Command, frozen=True, kw_only=True, tag="message.edit"):
    """Say something else in a message's place, beside it; an answer follows unless `respond` is false."""

    session: SessionId
    item: ItemId
    content: str
    params: Params | None = None
    respond: bool = True


class ResponseRegenerate(_Command, frozen=True, kw_only=True, tag="response.regenerate"):
    """Have another answer beside `item`, else beside the last one, from the same prompt with a fresh seed."""

    session: SessionId
    item: ItemId | None = None
    params: Params | None = None


class ResponseContinue(_Command, frozen=True, kw_only=True, tag="response.continue"):
    """Go on from an answer that was cut short, `item` or the last one, beside it.

    `max_tokens` is for what comes now; absent, as many as the answer had.
    """

    session: SessionId
    item: ItemId | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None


class BranchSelect(_Command, frozen=True, kw_only=True, tag="branch.select"):
    """Go on from `leaf`: the conversation is the path to it."""

    session: SessionId
    leaf: ItemId


class ResponseCancel(_Command, frozen=True, kw_only=True, tag="response.cancel"):
    """End the answer in progress; what is there is kept and marked."""

    session: SessionId


class Prefill(_Command, frozen=True, kw_only=True, tag="prefill"):
    """Compute ahead what is being typed, in place of what was before; without `content` it is taken back."""

    session: SessionId
    content: str | None = None


class PoolSubscribe(_Command, frozen=True, kw_only=True, tag="pool.subscribe"):
    """Receive the state of the block pool."""

    hz: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    detail: Literal["summary", "sessions", "map"] = "summary"
    cells: Annotated[int, msgspec.Meta(ge=64, le=4096)] = 1024


class PoolUnsubscribe(_Command, frozen=True, kw_only=True, tag="pool.unsubscribe"):
    """Receive it no more."""


class Ping(_Command, frozen=True, kw_only=True, tag="ping"):
    """Ask for a `pong` with the same `t`."""

    t: float


Command = (
    SessionCreate
    | SessionAttach
    | SessionList
    | SessionGet
    | SessionUpdate
    | SessionDetach
    | SessionClose
    | SessionErase
    | SessionFork
    | UserMessage
    | MessageEdit
    | ResponseRegenerate
    | ResponseContinue
    | BranchSelect
    | ResponseCancel
    | Prefill
    | PoolSubscribe
    | PoolUnsubscribe
    | Ping
)
COMMANDS: tuple[type[_Command], ...] = Command.__args__
COMMAND_TYPES: frozenset[str] = frozenset(str(command.__struct_config__.tag) for command in COMMANDS)


# Server to client.


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a daemon serves, and its pool."""

    id: str
    context: int
    block_size: int
    blocks: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection may use."""

    frame_bytes: int
    sessions: int
    inflight: int
    replay_events: int
    replay_ttl_s: int


class Hello(_Event, frozen=True, kw_only=True, tag="hello"):
    """The first frame of a connection."""

    protocol: str
    server: str
    boot: str
    connection: str
    tenant: str
    user: str
    model: ModelInfo
    caps: list[str]
    limits: Limits
    heartbeat_s: int


class SessionCreated(_Event, frozen=True, kw_only=True, tag="session.created"):
    """Answers `session.create` and `session.fork`.

    Attributes:
        session: The new session.
        head_seq: Events after this one follow.
        shared_tokens: Of a fork: tokens whose KV it has in common with the other session.
        shared_blocks: The blocks that hold them.
        copies_on_write: How many of these are copied by whoever goes on first: the last one, where it is partly full.
        re: Of the command.
    """

    session: SessionInfo
    head_seq: int = 0
    shared_tokens: int = 0
    shared_blocks: int = 0
    copies_on_write: int = 0
    re: str | None = None


class SessionAttached(_Event, frozen=True, kw_only=True, tag="session.attached"):
    """Answers `session.attach`; events after `head_seq` (snapshot) or `after_seq` (exact) follow."""

    session: str
    head_seq: int
    replay: Literal["exact", "snapshot"]
    snapshot: Snapshot | None = None
    re: str | None = None


class SessionListed(_Event, frozen=True, kw_only=True, tag="session.list"):
    """Answers `session.list`; `next_cursor` where there is more.

    The rows leave out `system`, `params` and `metadata`, which may be large; `session.get` has them.
    """

    sessions: list[SessionInfo]
    next_cursor: str | None = None
    re: str | None = None


class SessionGot(_Event, frozen=True, kw_only=True, tag="session.get"):
    """Answers `session.get`."""

    session: SessionInfo
    items: list[Item]
    re: str | None = None


class SessionDetached(_Event, frozen=True, kw_only=True, tag="session.detached"):
    """Answers `session.detach`."""

    session: str
    re: str | None = None


class SessionClosed(_Event, frozen=True, kw_only=True, tag="session.closed"):
    """Answers `session.close`; sent to everybody attached."""

    session: str
    re: str | None = None


class EraseReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What an erasure removed.

    Attributes:
        messages: Of the session, those that no other session has.
        shared_messages: Those that stay, since a fork has them too.
        tokens: Ids of the messages that are gone.
        blocks: Of the pool.
        host_blocks: Of the host's memory.
        disk_blocks: Of the disk; their files are gone, or go next.
        journal_bytes: Text and ids that are gone from the journal.
    """

    messages: int
    shared_messages: int
    tokens: int
    blocks: int
    host_blocks: int
    disk_blocks: int
    journal_bytes: int


class SessionErased(_Event, frozen=True, kw_only=True, tag="session.erased"):
    """Answers `session.erase`; sent to everybody attached."""

    session: str
    receipt: EraseReceipt
    re: str | None = None


class _Transcript(_Event, frozen=True, kw_only=True):
    """An event of a session's transcript: `seq` counts from 1 without a gap, `ts` is Unix seconds."""

    session: str
    seq: int
    ts: float


class ItemAdded(_Transcript, frozen=True, kw_only=True, tag="item.added"):
    """A message joined the conversation; `re` on the connection that sent it."""

    item: Item
    re: str | None = None


class BranchSelected(_Transcript, frozen=True, kw_only=True, tag="branch.selected"):
    """The conversation is another path of the tree now.

    Attributes:
        leaf: Its last message.
        parent: The last message that stays as it was shown; None where nothing does.
        items: What follows that one, in order.
        re: On the connection that asked.
    """

    leaf: str
    items: list[Item]
    parent: str | None = None
    re: str | None = None


class SessionTruncated(_Transcript, frozen=True, kw_only=True, tag="session.truncated", omit_defaults=True):
    """The oldest messages are out of the context of the answer that comes next; they stay in the conversation.

    Attributes:
        kept_from: The first message that is in it; the answer's item says it as `context_from`.
        dropped_items: Messages that were in the context before.
        dropped_tokens: Tokens that it is shorter by; absent where they were never counted.
    """

    kept_from: str
    dropped_items: int
    dropped_tokens: int | None = None


class ResponseCreated(_Transcript, frozen=True, kw_only=True, tag="response.created", omit_defaults=True):
    """An answer began; `item` is its message; `re` on the connection that asked for another one.

    The item is empty, but for an answer that goes on from another one: it begins with that one's text.
    """

    response: str
    item: Item
    re: str | None = None


class OutputTextDelta(_Transcript, frozen=True, kw_only=True, tag="response.output_text.delta", omit_defaults=True):
    """More of an answer.

    Attributes:
        item_id: The answer's message.
        delta: Text to append.
        n_tokens: Tokens behind it.
        seq_from: Where a writer merged adjacent deltas, the first of them; `seq` is the last.
        logprobs: Where the request asked.
    """

    item_id: str
    delta: str
    n_tokens: int
    seq_from: int | None = None
    logprobs: list[Logprob] | None = None


class ResponseCompleted(_Transcript, frozen=True, kw_only=True, tag="response.completed"):
    """The model ended its answer."""

    response: str
    item: Item
    reason: CompletedReason
    usage: Usage
    timings: Timings


class ResponseIncomplete(_Transcript, frozen=True, kw_only=True, tag="response.incomplete"):
    """Something else ended the answer; its text is kept."""

    response: str
    item: Item
    reason: IncompleteReason
    usage: Usage
    timings: Timings


class ResponseFailed(_Transcript, frozen=True, kw_only=True, tag="response.failed"):
    """The turn failed; the session is as it was before the turn.

    Attributes:
        response: Which.
        item_id: Its answer, which is gone.
        error: Why.
        parent: The last message that stays, None where none does. Where the turn went on from elsewhere than the head,
            `branch.selected` follows.
    """

    response: str
    item_id: str
    error: ErrorBody
    parent: str | None = None


class SessionUpdated(_Transcript, frozen=True, kw_only=True, tag="session.updated"):
    """A session's title, parameters, system prompt or flags changed."""

    info: SessionInfo
    re: str | None = None


class ResponseQueued(_Event, frozen=True, kw_only=True, tag="response.queued"):
    """The answer waits: its place in the tenant's own queue, and why."""

    session: str
    position: int
    why: str


class ResponsePrefill(_Event, frozen=True, kw_only=True, tag="response.prefill"):
    """The prompt is being read: `done` of `total` tokens, `cached` of them free."""

    session: str
    done: int
    total: int
    cached: int


class ResponsePreempted(_Event, frozen=True, kw_only=True, tag="response.preempted"):
    """The answer was set aside for want of memory."""

    session: str


class ResponseResumed(_Event, frozen=True, kw_only=True, tag="response.resumed"):
    """It goes on."""

    session: str


class SessionUsage(_Event, frozen=True, kw_only=True, tag="session.usage"):
    """What a session uses of its context and of the pool."""

    session: str
    context_used: int
    context_max: int
    blocks_held: int
    blocks_shared: int


class SessionTier(_Event, frozen=True, kw_only=True, tag="session.tier"):
    """Where a session's KV is: "device", "host", "disk" or "tokens"."""

    session: str
    tier: str
    why: str


class PrefillState(_Event, frozen=True, kw_only=True, tag="prefill.state", omit_defaults=True):
    """Answers `prefill`, and comes again when what was typed last is computed; to that connection only.

    Attributes:
        session: Whose draft it is.
        tokens: Of the draft, as far as they no longer change by what is typed next; 0 where there is none.
        computed: Whether these are computed.
        re: Of the command.
    """

    session: str
    tokens: int
    computed: bool
    re: str | None = None


class ClientAttached(_Event, frozen=True, kw_only=True, tag="client.attached"):
    """Somebody joined the session."""

    session: str
    connection: str
    role: AttachRole


class ClientLeft(_Event, frozen=True, kw_only=True, tag="client.left"):
    """Somebody left it."""

    session: str
    connection: str


class PoolTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by state, and what the engine does with them. Free + cached + active is the whole pool."""

    blocks: int
    free: int
    cached: int
    active: int
    shared: int
    evictions: int
    hit_rate: float
    tok_s: float
    running: int
    waiting: int


class TenantBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's blocks and requests."""

    tenant: str
    active: int
    cached: int
    running: int
    waiting: int


class TierBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A tier below the pool, `host` or `disk`: the blocks that it can keep, and those that it keeps."""

    tier: str
    blocks: int
    used: int


class SessionBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """What one of one's own sessions holds of the pool."""

    session: str
    title: str
    held: int
    shared: int
    tokens: int
    tier: str
    active: bool


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """The pool folded into cells of `blocks_per_cell` consecutive blocks.

    Attributes:
        count: Cells of the whole map.
        blocks_per_cell: Blocks in each but perhaps the last.
        index: Which cells `data` holds; None is all of them in order.
        data: Base64 of four little-endian 16-bit counts a cell: free, cached, active, shared.
    """

    count: int
    blocks_per_cell: int
    data: str
    index: list[int] | None = None


class PoolSnapshot(_Event, frozen=True, kw_only=True, tag="pool.snapshot"):
    """The whole pool at one step."""

    step: int
    totals: PoolTotals
    tenants: list[TenantBlocks]
    tiers: list[TierBlocks] = []
    sessions: list[SessionBlocks] | None = None
    cells: Cells | None = None
    re: str | None = None


class PoolDelta(_Event, frozen=True, kw_only=True, tag="pool.delta"):
    """The pool at a later step; `cells` holds only those that changed."""

    step: int
    totals: PoolTotals
    tenants: list[TenantBlocks]
    tiers: list[TierBlocks] = []
    sessions: list[SessionBlocks] | None = None
    cells: Cells | None = None


class PoolUnsubscribed(_Event, frozen=True, kw_only=True, tag="pool.unsubscribed"):
    """Answers `pool.unsubscribe`."""

    re: str | None = None


class RateLimitsUpdated(_Event, frozen=True, kw_only=True, tag="rate_limits.updated"):
    """What is left of a key's quota."""

    limits: list[dict[str, Any]]


class ServerDraining(_Event, frozen=True, kw_only=True, tag="server.draining"):
    """The daemon stops within `deadline_s`."""

    deadline_s: float


class Error(_Event, frozen=True, kw_only=True, tag="error", omit_defaults=True):
    """A command was refused; the connection stays open."""

    error: ErrorBody
    re: str | None = None
    session: str | None = None


class Pong(_Event, frozen=True, kw_only=True, tag="pong"):
    """Answers `ping`."""

    t: float
    re: str | None = None


Event = (
    Hello
    | SessionCreated
    | SessionAttached
    | SessionListed
    | SessionGot
    | SessionDetached
    | SessionClosed
    | SessionErased
    | ItemAdded
    | BranchSelected
    | SessionTruncated
    | ResponseCreated
    | OutputTextDelta
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | SessionUpdated
    | ResponseQueued
    | ResponsePrefill
    | ResponsePreempted
    | ResponseResumed
    | SessionUsage
    | SessionTier
    | PrefillState
    | ClientAttached
    | ClientLeft
    | PoolSnapshot
    | PoolDelta
    | PoolUnsubscribed
    | RateLimitsUpdated
    | ServerDraining
    | Error
    | Pong
)
EVENTS: tuple[type[_Event], ...] = Event.__args__
EVENT_TYPES: frozenset[str] = frozenset(str(event.__struct_config__.tag) for event in EVENTS)
TranscriptEvent = (
    ItemAdded
    | BranchSelected
    | SessionTruncated
    | ResponseCreated
    | OutputTextDelta
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | SessionUpdated
)


# The wire.

_encoder = msgspec.json.Encoder()
_command_decoder = msgspec.json.Decoder(Command)
_event_decoder = msgspec.json.Decoder(Event)


class _Head(msgspec.Struct):
    """Just enough of a frame to say what is wrong with the rest."""

    type: str
    id: Any = None


_head_decoder = msgspec.json.Decoder(_Head)
_FIELD = re.compile(r"unknown field `([^`]+)`|missing required field `([^`]+)`")
_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`")
_NAME = re.compile(r"`str` matching regex .*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def encode(frame: Command | Event) -> str:
    """Return a frame's text."""
    return _encoder.encode(frame).decode()


def decode_command(text: str | bytes) -> Command:
    """Decode what a client sent.

    Raises:
        UnknownType: The command does not exist.
        InvalidRequest: Names the field that is at fault in `param`.
    """
    head = _decode_head(text)
    if head.type not in COMMAND_TYPES:
        raise UnknownType(f"{head.type[:64]!r} is not a command of {SUBPROTOCOL}", param="type")
    try:
        return _command_decoder.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def command_id(text: str | bytes) -> str | None:
    """Return the `id` of a frame that may be broken otherwise, to answer it as `re`."""
    try:
        head = _head_decoder.decode(text)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeError):
        raw = _with_half_characters(text)
        head = _Head(type="", id=raw.get("id")) if isinstance(raw, dict) else _Head(type="")
    return head.id if isinstance(head.id, str) and len(head.id) <= 64 else None


def decode_event(text: str | bytes) -> Event | None:
    """Decode what a server sent; None for a type that this version does not know.

    Raises:
        InvalidRequest: The frame is broken.
    """
    head = _decode_head(text)
    if head.type not in EVENT_TYPES:
        return None
    try:
        return _event_decoder.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def _decode_head(text: str | bytes) -> _Head:
    try:
        return _head_decoder.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"the frame is not JSON: {why_not_json(text, error)}", code="invalid_json") from None


def why_not_json(text: str | bytes, error: Exception) -> str:
    """Say what is wrong with a text; msgspec mistakes half a surrogate pair for a text that is cut off."""
    half = _with_half_characters(text) is not None
    return "an escape such as \\ud800 is half a character" if half else str(error)


def _with_half_characters(text: str | bytes) -> Any:
    """Return what a text says that would be JSON but for escapes of half a character; None for any other."""
    if not _SURROGATE.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    """Turn msgspec's complaint into a refusal that names the field in `param`."""
    message = str(error)
    path = _PATH.search(message)
    where = path.group(1).lstrip(".") if path else ""
    named = _FIELD.search(message)
    if named:
        name = named.group(1) or named.group(2)
        where = f"{where}.{name}" if where else name
    # The only pattern in a frame is that of ids.
    text = _NAME.sub("1 to 64 letters, digits, `_` or `-`", _PATH.sub("", message))
    return InvalidRequest(f"{where or 'frame'}: {text[:1].lower()}{text[1:]}", param=where or None)


def pack_cells(counts: Sequence[tuple[int, int, int, int]]) -> str:
    """Return `Cells.data` for (free, cached, active, shared) counts."""
    packed = b"".join(min(n, 0xFFFF).to_bytes(2, "little") for cell in counts for n in cell)
    return base64.b64encode(packed).decode()


def unpack_cells(data: str) -> list[tuple[int, int, int, int]]:
    """Return the counts in `Cells.data`."""
    raw = base64.b64decode(data)
    numbers = [int.from_bytes(raw[i : i + 2], "little") for i in range(0, len(raw), 2)]
    return [(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]) for i in range(0, len(numbers), 4)]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of all commands and events."""
    (commands, events), definitions = msgspec.json.schema_components((Command, Event), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SUBPROTOCOL,
        "$defs": {**definitions, "Command": commands, "Event": events},
        "anyOf": [{"$ref": "#/$defs/Command"}, {"$ref": "#/$defs/Event"}],
    }
