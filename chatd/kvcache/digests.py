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
from hashlib import blake2b

from chatd.kvcache.block_file import Origin
from chatd.kvcache.prefix_index import Namespace

DIGEST_BYTES = 32

_CHAIN, _DIGEST, _ROOT = b"chatd chain", b"chatd block", b"chatd root"


class Digester:
    """Makes the digests of one engine's blocks.

    Args:
        key: Secret, at most 64 bytes: whoever does not know it cannot name a file that this engine would read.
        base: The namespace of this engine's KV; only `tenant` differs between blocks.
        block_size: Tokens of a block.
    """

    def __init__(self, key: bytes, base: Namespace, block_size: int) -> None:
        self._key = key
        self._base = base
        self._block_size = block_size
        self.root = self._hash(_ROOT, base.of(None).frame())
        self._frames: dict[str | None, bytes] = {}

    def extend(self, chain: list[bytes], token_ids: array[int], num_blocks: int) -> None:
        """Append to a prefix's chain until it has `num_blocks` links; what is there is not hashed again."""
        size = self._block_size
        parent = chain[-1] if chain else self.root
        for place in range(len(chain), num_blocks):
            parent = self._hash(_CHAIN, parent + token_ids[place * size : (place + 1) * size].tobytes())
            chain.append(parent)

    def digest(self, tenant: str | None, link: bytes) -> bytes:
        """Return what a tenant's block, or a public one, is called whose prefix has this link at its end."""
        return self._hash(_DIGEST, self._frame(tenant) + link)

    def origin(self, tenant: str | None, chain: list[bytes], token_ids: array[int], place: int) -> Origin:
        """Return what the block at `place` was computed from, to be compared when it comes back."""
        size = self._block_size
        tokens = token_ids[place * size : (place + 1) * size].tobytes()
        return Origin(self._frame(tenant), chain[place - 1] if place else self.root, tokens)

    def _frame(self, tenant: str | None) -> bytes:
        frame = self._frames.get(tenant)
        if frame is None:
            frame = self._frames[tenant] = self._base.of(tenant).frame()
        return frame

    def _hash(self, person: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=person).digest()
