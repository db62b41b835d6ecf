"""What a server says: open frames, of which a client ignores what it does not know."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from chatd.protocol.pool_values import CellBlock, Cells, PoolTotals, SessionBlocks, TenantBlocks, TierBlocks
from chatd.protocol.values import ErrorBody, Item, Logprob, Params, Passage, SessionInfo, Snapshot, Timings, Usage
from chatd.protocol.vocabulary import AttachRole, CompletedReason, IncompleteReason


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model that a daemon serves, and its pool.

    Attributes:
        id: Its name.
        context: Tokens of prompt and answer together.
        block_size: Tokens of a block.
        blocks: Of the pool.
        params: What holds where neither a message nor its session names a parameter; older daemons do not say it.
    """

    id: str
    context: int
    block_size: int
    blocks: int
    params: Params | None = None


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

    The rows leave out `system`, `params` and `metadata`, which may be large; `session.get` has them. `passages` has a
    search's, of those sessions whose messages have what was looked for.
    """

    sessions: list[SessionInfo]
    next_cursor: str | None = None
    passages: list[Passage] = []
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
    """Answers `session.close`; sent to everybody attached.

    Attributes:
        blocks: Of the pool's, that it held until now.
        shared_blocks: Of these, that others hold too, and so are not released.
    """

    session: str
    blocks: int = 0
    shared_blocks: int = 0
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


class PoolInspected(_Event, frozen=True, kw_only=True, tag="pool.inspected"):
    """Answers `pool.inspect`.

    Attributes:
        cell: As it was asked for.
        blocks_per_cell: Likewise.
        blocks: Those that are not free, in order.
        left_out: Blocks at the cell's end of which nothing is said, since there are too many.
        re: Of the command.
    """

    cell: int
    blocks_per_cell: int
    blocks: list[CellBlock]
    left_out: int = 0
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
    | PoolInspected
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
