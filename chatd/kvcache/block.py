"""The slot of the pool that a block of KV lives in, and the queue that blocks without a holder wait in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from chatd.kvcache.block_pool import Account
    from chatd.kvcache.prefix_index import PrefixEntry

BlockId = NewType("BlockId", int)

HostSlot = NewType("HostSlot", int)
"""A place for one whole block in the host's buffer, outside the pool."""


class KVCacheBlock:
    """One preallocated slot of the pool.

    Attributes:
        block_id: Its place in the KV tensor.
        ref_count: Appearances in block tables, in plans in flight and in adoptions that wait for the next plan.
        entry: Its entry in the prefix index; a block that has one is never written.
        since: The pool's time at which it was taken for what is in it.
        hit_at: The pool's time at which a prompt last found it computed; None where none has.
        account: Who is charged for it; None while it is empty.
        prev: Neighbour towards the head of the queue that it is in; None in no queue.
        next: Neighbour towards the tail.
    """

    __slots__ = ("account", "block_id", "entry", "hit_at", "next", "prev", "ref_count", "since")

    def __init__(self, block_id: int) -> None:
        self.block_id = BlockId(block_id)
        self.ref_count = 0
        self.entry: PrefixEntry | None = None
        self.account: Account | None = None
        self.since = 0.0
        self.hit_at: float | None = None
        self.prev: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, registered={self.entry is not None})"


class BlockQueue:
    """A doubly linked list through the blocks themselves: O(1) at both ends and in the middle, no allocation.

    `length` is what `len` gives, without a call.

    ```
    ends.next ──> head <──> … <──> tail <── ends.prev
    ```
    """

    __slots__ = ("_ends", "length")

    def __init__(self) -> None:
        self._ends = KVCacheBlock(-1)
        self._ends.prev = self._ends.next = self._ends
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._ends.next
        while block is not self._ends:
            assert block is not None, "a queue's links are broken"
            yield block
            block = block.next

    @property
    def head(self) -> KVCacheBlock:
        """The first block of a queue that is not empty."""
        block = self._ends.next
        assert block is not None, "a queue's links are broken"
        assert self.length, "an empty queue has no head"
        return block

    def append(self, block: KVCacheBlock) -> None:
        """Put a block that is in no queue at the tail."""
        self._insert(block, self._ends)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Put a block that is in no queue at the head."""
        after = self._ends.next
        assert after is not None
        self._insert(block, after)

    def popleft(self) -> KVCacheBlock:
        """Take the head of a queue that is not empty."""
        block = self.head
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block of this queue out of it, wherever it stands."""
        before, after = block.prev, block.next
        assert before is not None, f"{block} is in no queue"
        assert after is not None, f"{block} is in no queue"
        before.next = after
        after.prev = before
        block.prev = block.next = None
        self.length -= 1

    def _insert(self, block: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.prev is None, f"{block} is in a queue already"
        before = after.prev
        assert before is not None
        block.prev = before
        block.next = after
        before.next = block
        after.prev = block
        self.length += 1
