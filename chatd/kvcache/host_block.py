"""One block in the host's buffer: where it is, what it is called, and who has use for it. A record and no more."""

from __future__ import annotations

from chatd.kvcache.block import HostSlot
from chatd.kvcache.block_file import Origin
from chatd.kvcache.prefix_index import PrefixEntry


class HostBlock:
    """One slot of the host's buffer in use.

    Attributes:
        digest: What it is found under.
        origin: What it was computed from.
        slot: Where it is.
        tenant: Whose it is; None is "public".
        entry: Of the same content in the pool, when it was last there.
        is_ready: It can be found.
        num_pins: Who reads the slot: plans in flight, and the disk.
        asked_s: When the disk was asked for it.
        is_dropped: It is forgotten; the slot is free as soon as nobody reads, fills or stores it.
        lease_ids: Leases that are told when it is gone.
    """

    __slots__ = (
        "asked_s",
        "digest",
        "entry",
        "is_dropped",
        "is_ready",
        "lease_ids",
        "num_pins",
        "origin",
        "slot",
        "tenant",
    )

    def __init__(self, digest: bytes, origin: Origin, slot: HostSlot, tenant: str | None, lease_id: int) -> None:
        self.digest = digest
        self.origin = origin
        self.slot = slot
        self.tenant = tenant
        self.entry: PrefixEntry | None = None
        self.is_ready = False
        self.num_pins = 0
        self.asked_s = 0.0
        self.is_dropped = False
        self.lease_ids: tuple[int, ...] = (lease_id,)

    def __repr__(self) -> str:
        return f"HostBlock({self.digest.hex()[:8]}, slot={self.slot}, ready={self.is_ready}, pins={self.num_pins})"
