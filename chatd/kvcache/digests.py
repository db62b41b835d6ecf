"""What blocks are called below the pool: keyed digests of a prefix and of the namespace that may reuse it.

```
tokens     |  block 0  |  block 1  |  block 2  |
chain      root ──> c0 ──────> c1 ──────> c2          each: H(chain before ‖ tokens)
digest              H(ns ‖ c0)  H(ns ‖ c1)  H(ns ‖ c2)
```
The chain is of the content alone, so that a block of a public prompt and one of a tenant's own are found by the same
walk, each under its own namespace. Serials of the prefix index mean nothing here: they die with the process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from chatd.kvcache.block_file import DIGEST_BYTES, Origin
from chatd.kvcache.lease import Lease
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.prefix_index import Namespace


class Digester:
    """Makes the digests of one engine's blocks.

    Args:
        key: Secret, at most 64 bytes: whoever does not know it cannot name a file that this engine would read.
        base: The namespace of this engine's KV; only `tenant` differs between blocks.
        block_size: Tokens of a block.
    """

    def __init__(self, key: bytes, base: Namespace, block_size: int) -> None:
        self._base = base
        self._block_size = block_size
        # Copying a state that has taken in the key is twice as fast as keying a new one.
        self._of_chains = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"chatd chain")
        self._of_blocks = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"chatd block")
        self._by_tenant: dict[str | None, tuple[bytes, blake2b]] = {}
        self.root = self._link(base.of(None).frame())

    def extend(self, chain: list[bytes], token_ids: array[int], num_blocks: int) -> None:
        """Append to a prefix's chain until it has `num_blocks` links; what is there is not hashed again."""
        size = self._block_size
        parent = chain[-1] if chain else self.root
        for place in range(len(chain), num_blocks):
            parent = self._link(parent + token_ids[place * size : (place + 1) * size].tobytes())
            chain.append(parent)

    def digest(self, tenant: str | None, link: bytes) -> bytes:
        """Return what a tenant's block, or a public one, is called whose prefix has this link at its end."""
        state = self._of(tenant)[1].copy()
        state.update(link)
        return state.digest()

    def origin(self, tenant: str | None, chain: list[bytes], token_ids: array[int], place: int) -> Origin:
        """Return what the block at `place` was computed from, to be compared when it comes back."""
        size = self._block_size
        tokens = token_ids[place * size : (place + 1) * size].tobytes()
        return Origin(self._of(tenant)[0], chain[place - 1] if place else self.root, tokens)

    def _of(self, tenant: str | None) -> tuple[bytes, blake2b]:
        """Return a namespace's frame, and the state of a digest that has taken it in."""
        found = self._by_tenant.get(tenant)
        if found is None:
            frame = self._base.of(tenant).frame()
            state = self._of_blocks.copy()
            state.update(frame)
            found = self._by_tenant[tenant] = (frame, state)
        return found

    def _link(self, data: bytes) -> bytes:
        state = self._of_chains.copy()
        state.update(data)
        return state.digest()


class LeaseNames:
    """What the full blocks of a lease are called below the pool; each is hashed once, when somebody first asks.

    Args:
        kv: Of the leases' tables.
        digester: Makes the names.
    """

    def __init__(self, kv: KVCacheManager, digester: Digester) -> None:
        self._kv = kv
        self._digester = digester

    def of(self, lease: Lease, place: int) -> Iterator[tuple[str | None, bytes]]:
        """Yield (tenant, digest) of the block at a place: as its tenant's own, then as a public one."""
        self._extend(lease, place + 1)
        yield lease.tenant, lease.digests[place]
        if lease.tenant is not None:
            yield None, self._digester.digest(None, lease.chain[place])

    def in_pool(self, lease: Lease, place: int) -> tuple[str | None, bytes]:
        """Return whose the block is that a lease's table has at a place, and its digest."""
        self._extend(lease, place + 1)
        account = self._kv.pool.blocks[lease.table.block_ids[place]].account
        assert account is not None, "a block in a table is charged to nobody"
        if account.tenant == lease.tenant:
            return lease.tenant, lease.digests[place]
        return account.tenant, self._digester.digest(account.tenant, lease.chain[place])

    def all_of(self, lease: Lease) -> list[bytes]:
        """Return the digests of all full blocks as the tenant's own."""
        self._extend(lease, len(lease.token_ids) // self._kv.block_size)
        return lease.digests

    def of_sequence(self, tenant: str | None, token_ids: array[int]) -> list[bytes]:
        """Return the digests of all full blocks of a sequence as a tenant's own; for one that has no lease."""
        chain: list[bytes] = []
        self._digester.extend(chain, token_ids, len(token_ids) // self._kv.block_size)
        return [self._digester.digest(tenant, link) for link in chain]

    def origin(self, tenant: str | None, lease: Lease, place: int) -> Origin:
        """Return what a block that was named before was computed from."""
        return self._digester.origin(tenant, lease.chain, lease.token_ids, place)

    def _extend(self, lease: Lease, num_blocks: int) -> None:
        self._digester.extend(lease.chain, lease.token_ids, num_blocks)
        for link in lease.chain[len(lease.digests) : num_blocks]:
            lease.digests.append(self._digester.digest(lease.tenant, link))
