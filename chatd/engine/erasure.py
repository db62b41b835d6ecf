"""Takes a sequence out of every tier, but for what other leases of its tenant begin with. Knows no requests.

What was computed for a session is found by its ids: a prefix that another lease of the tenant has too is that session's
as much, and stays; from the first block on that is this sequence's alone, everything that hangs on it goes. What is
gone from the pool cannot be found, and its slot is overwritten by whoever gets it next.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from chatd.engine.lower_blocks import LowerBlocks
from chatd.engine.messages import PUBLIC_TENANT, Erase, Erased, EraseTenant
from chatd.kvcache.lease import Lease
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.manager import ID_TYPECODE, KVCacheManager


class Eraser:
    """Forgets sequences.

    Args:
        kv: Block tables.
        leases: Of the same manager.
        below: What leases have below the pool.
    """

    def __init__(self, kv: KVCacheManager, leases: LeaseTable, below: LowerBlocks) -> None:
        self._kv = kv
        self._leases = leases
        self._below = below

    def erase(self, message: Erase, lease: Lease | None) -> Erased:
        """Close a lease that no request is on, where it is open, and forget the sequence; say what is gone."""
        tenant = None if message.tenant == PUBLIC_TENANT else message.tenant
        num_blocks = 0
        if lease is not None:
            num_blocks = self._close(lease)
        try:
            token_ids = array(ID_TYPECODE, message.token_ids)
        except OverflowError:
            return Erased(message.lease, num_blocks, 0, 0)  # No such id was ever computed.
        first = self._num_shared(tenant, token_ids) // self._kv.block_size
        num_blocks += self._kv.forget_sequence(tenant, token_ids, first)
        num_host, num_disk = self._below.forget_sequence(tenant, token_ids, first)
        return Erased(message.lease, num_blocks, num_host, num_disk)

    def erase_tenant(self, message: EraseTenant) -> Erased:
        """Close every lease of a tenant, on which no request is, and forget all its blocks; say what is gone."""
        num_blocks = sum([self._close(lease) for lease in list(self._leases) if lease.tenant == message.tenant])
        num_blocks += self._kv.forget_tenant(message.tenant)
        num_host, num_disk = self._below.forget_tenant(message.tenant, message.digests)
        return Erased(message.lease, num_blocks, num_host, num_disk)

    def _close(self, lease: Lease) -> int:
        """Close a lease; return how many blocks it had that nobody can find: a last one that is partly full."""
        blocks = [self._kv.pool.blocks[block_id] for block_id in lease.table.block_ids]
        num_blocks = sum(block.ref_count == 1 and block.entry is None for block in blocks)
        self._leases.close(lease)
        return num_blocks

    def trim(self, lease: Lease, length: int) -> None:
        """Cut a lease that no request is on, so that what it alone has of the rest is nowhere any more."""
        if length >= len(lease.token_ids):
            return
        first = max(length, self._num_shared(lease.tenant, lease.token_ids, but=lease)) // self._kv.block_size
        self._below.forget(lease, first)
        self._kv.forget_sequence(lease.tenant, lease.token_ids, first)
        self._leases.trim(lease, length)

    def _num_shared(self, tenant: str | None, token_ids: array[int], but: Lease | None = None) -> int:
        """Return how many of the ids another lease of the tenant begins with."""
        longest = 0
        for lease in self._leases:
            if lease.tenant == tenant and lease is not but:
                longest = max(longest, common_length(lease.token_ids, token_ids))
        return longest


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids two sequences begin with alike; slices are compared, not ids."""
    low, high = 0, min(len(a), len(b))
    if a[:1] != b[:1]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
