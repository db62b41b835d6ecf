"""What one session has in the engine: its token ids, and what it holds of the blocks of their KV.

A record and no more: `leases` opens, moves and closes them.
"""

from __future__ import annotations

from array import array
from enum import Enum

from chatd.kvcache.block_table import BlockTable
from chatd.kvcache.manager import ID_TYPECODE


class LeaseState(Enum):
    """What happens on a lease now; the order is that of reclaiming."""

    IDLE = 0
    ATTACHED = 1
    """Idle, and somebody looks at its session."""
    QUEUED = 2
    """A request waits; its lease goes last, but goes."""
    ACTIVE = 3
    """A request runs; its blocks go with it only."""


class Lease:
    """One session's ids and blocks.

    Attributes:
        lease_id: The front's.
        tenant: None for "public".
        token_ids: The sequence, computed or not.
        table: Its KV.
        state: Whether it can be reclaimed, and how early.
        attached: Whether idle means `ATTACHED`.
        idle_since: The pool's time at which its last turn ended.
        tier: Where most of its KV is, as its owner was told last.
        trim_to: It is cut to this length when its turn ends.
        chain: Of its first blocks, the links of the digests; made when first needed, never twice.
        digests: Of the same blocks, what they are called below the pool.
        num_clean: Leading blocks that were copied down, as far as there was room.
        next_dirty: Blocks from this one on are done in the pass that copies it down; -1 where none is under way.
    """

    __slots__ = (
        "attached",
        "chain",
        "digests",
        "idle_since",
        "lease_id",
        "next_dirty",
        "num_clean",
        "state",
        "table",
        "tenant",
        "tier",
        "token_ids",
        "trim_to",
    )

    def __init__(self, lease_id: int, tenant: str | None, table: BlockTable) -> None:
        self.lease_id = lease_id
        self.tenant = tenant
        self.token_ids: array[int] = array(ID_TYPECODE)
        self.table = table
        self.state = LeaseState.ACTIVE
        self.attached = False
        self.idle_since = 0.0
        self.tier = "device"
        self.trim_to: int | None = None
        self.chain: list[bytes] = []
        self.digests: list[bytes] = []
        self.num_clean = 0
        self.next_dirty = -1
