"""What leases have below the pool, by the names of their blocks: what is found there, and what is given up.

What moves, and when, is decided in `block_moves`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from chatd.engine.engine_config import EngineConfig
from chatd.kvcache.digests import Digester, LeaseNames
from chatd.kvcache.host_block import HostBlock
from chatd.kvcache.lease import Lease
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.tiers import Tiers


class LowerBlocks:
    """Blocks in the tiers, as those of leases.

    Args:
        config: The engine core's.
        kv: Block tables.
        tiers: Below the pool.

    Attributes:
        names: Of the blocks of leases.
        is_on: There is something below the pool.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager, tiers: Tiers) -> None:
        self.names = LeaseNames(kv, Digester(config.digest_key, config.namespace, config.block_size))
        self.is_on = tiers.num_slots > 0
        self._tiers = tiers
        self._block_size = config.block_size

    def find(self, lease: Lease, place: int) -> HostBlock | None:
        """Return the block that the host has for a place of a lease, or None."""
        for _, digest in self.names.of(lease, place):
            block = self._tiers.get(digest)
            if block is not None:
                return block
        return None

    def is_below(self, lease: Lease, place: int) -> bool:
        """Return whether the block that the pool has at a place of a lease is below it as well."""
        _, digest = self.names.in_pool(lease, place)
        return self._tiers.is_below(digest)

    def forget(self, lease: Lease, first: int = 0) -> None:
        """Give up everything below the pool that a lease could be restored from, from the block at `first` on."""
        if self.is_on:
            for digest in self.names.all_of(lease)[first:]:
                self._tiers.forget(digest)

    def forget_sequence(self, tenant: str | None, token_ids: array[int], first: int) -> tuple[int, int]:
        """Give up the blocks of a sequence from the place `first` on; return how many the host had, and the disk."""
        if not self.is_on:
            return 0, 0
        num_host = num_disk = 0
        for digest in self.names.of_sequence(tenant, token_ids)[first:]:
            num_host += self._tiers.is_in_host(digest)
            num_disk += self._tiers.is_on_disk(digest)
            self._tiers.forget(digest)
        return num_host, num_disk

    def forget_tenant(self, tenant: str, digests: Sequence[bytes]) -> tuple[int, int]:
        """Give up all that the host has of a tenant, and these blocks of the disk; return how many either had."""
        return self._tiers.forget_tenant(tenant, digests) if self.is_on else (0, 0)

    def counts(self, lease: Lease) -> tuple[int, int]:
        """Return the tokens of a lease beyond the pool's that the host has, and of the rest that the disk has.

        Stops where it is plain that one of the two has most of them.
        """
        size = self._block_size
        host = disk = 0
        if self._tiers.is_empty:
            return 0, 0
        most = len(lease.token_ids) // 2
        for place in range(lease.table.num_computed_tokens // size, len(lease.token_ids) // size):
            if self.find(lease, place) is not None:
                host += size
            elif any(self._tiers.is_on_disk(digest) for _, digest in self.names.of(lease, place)):
                disk += size
            else:
                break
            if max(host, disk) > most:
                break
        return host, disk
