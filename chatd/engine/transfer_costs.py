"""What it costs to move blocks between the pool and the tiers below it. Numbers only; start-up measures them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Seconds, as measured at start: a move of n blocks takes the fixed part and n times the part of a block.

    A block on the disk passes through the host in both directions, so its way to the pool costs both tiers' parts.

    Attributes:
        host_fixed_s: Of a step that stores to or loads from the host.
        host_out_s_per_block: Pool to host.
        host_in_s_per_block: Host to pool.
        disk_fixed_s: From asking for a block to its first byte.
        disk_out_s_per_block: Host to disk; in a thread of its own, beside the steps.
        disk_in_s_per_block: Disk to host, checked; likewise.
    """

    host_fixed_s: float = 0.0
    host_out_s_per_block: float = 0.0
    host_in_s_per_block: float = 0.0
    disk_fixed_s: float = 0.0
    disk_out_s_per_block: float = 0.0
    disk_in_s_per_block: float = 0.0
