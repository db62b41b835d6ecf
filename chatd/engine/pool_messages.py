"""The pool as the engine tells it: a frame, and its rows of tenants, leases and tiers."""

from __future__ import annotations

import msgspec

from chatd.engine.vocabulary import LeaseId, Message, Tier


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
