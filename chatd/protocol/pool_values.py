"""The values inside frames of the pool: its blocks by state, by tenant, tier and session, and as cells."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec


class PoolTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by state, and what the engine does with them. Free + cached + active is the whole pool.

    A daemon that does not know the last two has None there: `public` are those of the active blocks that are of public
    prompts, `wanted_again` counts evicted blocks that a prompt asked for soon afterwards.
    """

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
    public: int | None = None
    wanted_again: int | None = None


class TenantBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's blocks and requests; None is what the daemon does not know or does not tell.

    Attributes:
        tenant: Its name.
        active: Blocks with a holder.
        cached: Blocks without one that can still be found.
        running: Requests.
        waiting: Requests.
        weight: Of its share beside the others' weights.
        share: Blocks of the pool that its weight entitles it to, among the tenants of this frame; the operator's only.
        floor: Blocks that nobody else can take.
        evicted: Its cached blocks that were taken for something else, since start.
        wanted_again: Of those, how many a prompt asked for soon afterwards.
    """

    tenant: str
    active: int
    cached: int
    running: int
    waiting: int
    weight: float | None = None
    share: float | None = None
    floor: int | None = None
    evicted: int | None = None
    wanted_again: int | None = None


class TierBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A tier below the pool, `host` or `disk`: the blocks that it can keep, and those that it keeps."""

    tier: str
    blocks: int
    used: int


class SessionBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """What a session holds of the pool; None is what the daemon does not know or does not tell.

    Attributes:
        session: Its id.
        title: Of one's own.
        held: Blocks in its table.
        shared: Of those, the ones that are somebody else's too, or public.
        tokens: Of the conversation.
        tier: Where most of its KV is.
        active: An answer is in progress or waits.
        bill: Its part of the active blocks: each shared one is split among those who hold it, a public one is nobody's.
        lease: What keeps its blocks: "answering", "queued", "attached" (idle, and somebody looks at it) or "idle".
        idle_s: Seconds since its last turn ended; 0 while it answers or waits.
        release_s: Seconds until its blocks are given up for want of use; None also where they are kept until somebody
            else needs them.
        tenant: Whose it is; the operator's only.
    """

    session: str
    title: str
    held: int
    shared: int
    tokens: int
    tier: str
    active: bool
    bill: float | None = None
    lease: str | None = None
    idle_s: float | None = None
    release_s: float | None = None
    tenant: str | None = None


class CellHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has a block in its table.

    Attributes:
        session: Its id.
        title: Of one's own.
        own: It is one's own.
        tenant: Whose it is; the operator's only.
        tokens: How many of the block's tokens are its.
    """

    session: str
    title: str
    own: bool
    tenant: str | None = None
    tokens: int


class CellBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a cell, that is not free.

    Attributes:
        block: Its number on the map.
        state: "cached", "active" or "shared".
        references: Those who hold it: sessions, and steps in progress.
        tenant: Who is charged for it; the operator's only. None for a public one.
        public: It is of a public prompt.
        registered: It can be found by other conversations of its tenant.
        place: How many blocks of its conversation come before it; None where that is not known.
        tokens: Slots that hold a token.
        age_s: Seconds since it was taken for what is in it.
        hit_age_s: Seconds since a prompt last found it computed; None where none has.
        holders: The sessions that hold it, as far as one may know them.
        others: References that are not named there.
    """

    block: int
    state: str
    references: int
    tenant: str | None = None
    public: bool
    registered: bool
    place: int | None = None
    tokens: int
    age_s: float
    hit_age_s: float | None = None
    holders: list[CellHolder]
    others: int


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


def pack_cells(counts: Sequence[tuple[int, int, int, int]]) -> str:
    """Return `Cells.data` for (free, cached, active, shared) counts."""
    packed = b"".join(min(n, 0xFFFF).to_bytes(2, "little") for cell in counts for n in cell)
    return base64.b64encode(packed).decode()


def unpack_cells(data: str) -> list[tuple[int, int, int, int]]:
    """Return the counts in `Cells.data`."""
    raw = base64.b64decode(data)
    numbers = [int.from_bytes(raw[i : i + 2], "little") for i in range(0, len(raw), 2)]
    return [(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]) for i in range(0, len(numbers), 4)]
