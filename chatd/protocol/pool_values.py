"""The values inside frames of the pool: its blocks by state, by tenant, tier and session, and as cells."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec


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


def pack_cells(counts: Sequence[tuple[int, int, int, int]]) -> str:
    """Return `Cells.data` for (free, cached, active, shared) counts."""
    packed = b"".join(min(n, 0xFFFF).to_bytes(2, "little") for cell in counts for n in cell)
    return base64.b64encode(packed).decode()


def unpack_cells(data: str) -> list[tuple[int, int, int, int]]:
    """Return the counts in `Cells.data`."""
    raw = base64.b64decode(data)
    numbers = [int.from_bytes(raw[i : i + 2], "little") for i in range(0, len(raw), 2)]
    return [(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]) for i in range(0, len(numbers), 4)]
