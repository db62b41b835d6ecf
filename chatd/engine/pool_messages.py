"""The pool as the engine tells it: a frame, and its rows of tenants, leases and tiers."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from chatd.engine.vocabulary import LeaseId, Message, Tier

MAX_INSPECTED = 64
"""Blocks that one answer tells of at most."""


class LeaseUse(StrEnum):
    """What keeps the blocks of a lease: a request that runs or waits, or its claim between turns."""

    ANSWERING = "answering"
    QUEUED = "queued"
    ATTACHED = "attached"
    """Idle, and somebody looks at its session."""
    IDLE = "idle"


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
        weight: Of its share beside the other tenants' weights.
        floor: Blocks that no other tenant can take.
        num_evicted: Its cached blocks that were taken for something else, since start.
        num_wanted_again: Of those, how many a prompt asked for soon afterwards.
    """

    tenant: str
    num_active: int
    num_cached: int
    num_running: int
    num_waiting: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    weight: float = 1.0
    floor: int = 0
    num_evicted: int = 0
    num_wanted_again: int = 0


class LeasePool(msgspec.Struct, array_like=True, frozen=True):
    """What one lease holds.

    Attributes:
        lease: Which.
        tenant: Whose.
        num_blocks: Blocks in its table.
        num_shared: Of those, the ones that another table holds too.
        num_tokens: Of the conversation.
        tier: Where most of its KV is.
        active: A request runs or waits on it.
        bill: Its part of the active blocks: a shared one is split among those who hold it, a public one is nobody's.
        use: What keeps its blocks.
        idle_s: Seconds since its last turn ended; 0 while a request is on it.
    """

    lease: LeaseId
    tenant: str
    num_blocks: int
    num_shared: int
    num_tokens: int
    tier: Tier
    active: bool
    bill: float = 0.0
    use: LeaseUse = LeaseUse.IDLE
    idle_s: float = 0.0


class BlockHolder(msgspec.Struct, array_like=True, frozen=True):
    """A lease that has a block in its table, at which place, and how many of its slots are the lease's."""

    lease: LeaseId
    place: int
    num_tokens: int


class BlockFacts(msgspec.Struct, array_like=True, frozen=True):
    """What is known of one block that is not free.

    Attributes:
        number: As it was asked for.
        state: 1 cached, 2 active, 3 shared.
        tenant: Who is charged for it; "" is nobody, for a public one.
        ref_count: Those who hold it: leases, and plans in flight.
        is_registered: It can be found by others of its namespace.
        place: How many blocks of its sequence come before it; -1 where that is not known.
        num_tokens: Slots that hold a token.
        age_s: Seconds since it was taken for what is in it.
        hit_age_s: Seconds since a prompt last found it computed; None where none has.
        holders: The leases of the front's that hold it.
    """

    number: int
    state: int
    tenant: str
    ref_count: int
    is_registered: bool
    place: int
    num_tokens: int
    age_s: float
    hit_age_s: float | None
    holders: list[BlockHolder]


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


class PoolFrame(Message, frozen=True):
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
        num_public: Public blocks with a holder (part of `num_active`).
        num_wanted_again: Evicted blocks that a prompt asked for soon afterwards, since start.
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
    leases: list[LeasePool] = msgspec.field(default_factory=list)
    states: bytes = b""
    owners: bytes = b""
    tiers: list[TierPool] = msgspec.field(default_factory=list)
    num_held: int = 0
    num_public: int = 0
    num_wanted_again: int = 0
