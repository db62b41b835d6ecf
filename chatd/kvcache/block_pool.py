"""The pool of blocks: who holds them, who is charged, and what goes when a new one is needed.

```
            allocate                    register
   empty ───────────────> active ─────────────────> active, registered
     ^                      │ release                    │ release, last holder
     └──────────────────────┘                            v
     ^                         evict                   cached  ── hold ──> active, registered
     └──────────────────────────────────────────────────┘
```
Cached and empty memory are the same memory. Every operation costs the same whatever the pool's size.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from chatd.kvcache.block import BlockId, BlockQueue, KVCacheBlock
from chatd.kvcache.prefix_index import NamespaceId, PrefixEntry, PrefixIndex
from chatd.kvcache.recently_evicted import RecentlyEvicted

EMPTY, CACHED, ACTIVE, SHARED = range(4)
NOBODY = 65535


class Account:
    """What one tenant, or "public", has in the pool. A block is charged once, whoever holds it.

    Attributes:
        tenant: Its name; None is "public", which has no share and no floor.
        index: Its row in pool frames; `NOBODY` for "public".
        weight: Its part of the pool relative to the other tenants'.
        floor: Blocks that no other tenant can take.
        num_active: Blocks with a holder.
        cached: Blocks without a holder that can still be found; the head goes first.
        num_protected: Of the cached ones, those that the floor keeps from other tenants.
        num_evicted: Its cached blocks that were emptied for something else, since start.
        num_wanted_again: Of those, how many a prompt asked for soon afterwards.
        evicted: Which they were, the last of them.
    """

    __slots__ = (
        "cached",
        "evicted",
        "floor",
        "heap_key",
        "index",
        "num_active",
        "num_evicted",
        "num_protected",
        "num_wanted_again",
        "tenant",
        "weight",
    )

    def __init__(self, tenant: str | None, index: int, weight: float, floor: int) -> None:
        self.tenant = tenant
        self.index = index
        self.weight = weight
        self.floor = floor
        self.num_active = 0
        self.cached = BlockQueue()
        self.num_protected = 0
        self.num_evicted = 0
        self.num_wanted_again = 0
        self.evicted = RecentlyEvicted()
        self.heap_key: float | None = None

    @property
    def num_resident(self) -> int:
        """Blocks charged to this account, held or cached."""
        return self.num_active + len(self.cached)

    @property
    def over_share(self) -> float:
        """Resident blocks per unit of weight; the greatest is the most over its share."""
        return self.num_resident / self.weight


class BlockPool:
    """All blocks of one KV tensor.

    Attributes:
        blocks: By id.
        states: One byte a block, always exact: 0 empty, 1 cached, 2 active, 3 shared (held more than once).
        owners: The index of each block's account, `NOBODY` for empty and public ones.
        num_cached: Blocks in the cached queues.
        num_shared: Blocks held more than once.
        num_evictions: Cached blocks that were emptied for something else, since start.
        num_freed: Blocks that lost their last holder, since start; while it stands still nothing became available.
        now: The engine's time at its last call, in seconds. It stamps what is told of blocks and decides nothing.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.index = index
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.states = bytearray(num_blocks)
        self.owners = array("H", [NOBODY]) * num_blocks
        self.empty = BlockQueue()
        for block in self.blocks:
            self.empty.append(block)
        self.public = Account(None, NOBODY, 1.0, 0)
        self.accounts: list[Account] = []
        self._by_tenant: dict[str | None, Account] = {None: self.public}
        self._sum_of_floors = 0
        # The sum of all accounts' `num_protected`.
        self._num_protected = 0
        # Accounts with cached blocks by (-over_share, index). A key that is out of date is mended when it comes up;
        # an account is never further down than it should be.
        self._heap: list[tuple[float, int]] = []
        self.num_cached = 0
        self.num_shared = 0
        self.num_evictions = 0
        self.num_freed = 0
        self.now = 0.0

    @property
    def num_wanted_again(self) -> int:
        """Evicted blocks of all accounts that a prompt asked for soon afterwards, since start."""
        return self.public.num_wanted_again + sum(account.num_wanted_again for account in self.accounts)

    @property
    def num_blocks(self) -> int:
        """All of them."""
        return len(self.blocks)

    @property
    def num_active(self) -> int:
        """Blocks with a holder."""
        return len(self.blocks) - len(self.empty) - self.num_cached

    def account(self, tenant: str | None, weight: float = 1.0, floor: int = 0) -> Account:
        """Return a tenant's account; the first call opens it with this weight and floor."""
        account = self._by_tenant.get(tenant)
        if account is None:
            account = Account(tenant, len(self.accounts), weight, floor)
            assert account.index < NOBODY, "more tenants than pool frames can name"
            self.accounts.append(account)
            self._sum_of_floors += floor
            self._by_tenant[tenant] = account
        return account

    def find_account(self, tenant: str | None) -> Account | None:
        """Return a tenant's account, None where nothing was ever computed or set for it."""
        return self._by_tenant.get(tenant)

    def set_limits(self, tenant: str | None, weight: float, floor: int) -> Account:
        """Change a tenant's weight and floor from now on; what others hold of the floor comes back as they let go."""
        account = self.account(tenant)
        assert account is not self.public, "public blocks have no share and no floor"
        self._sum_of_floors += floor - account.floor
        account.weight, account.floor = weight, floor
        self.protect(account)
        if account.heap_key is not None and -account.over_share < account.heap_key:
            self._push(account)
        return account

    def usable_blocks(self, tenant: str | None) -> int:
        """Return the blocks that a tenant's requests can get when nobody else runs."""
        own = self._by_tenant.get(tenant)
        return len(self.blocks) - self._sum_of_floors + (0 if own is None else own.floor)

    def available(self, account: Account) -> int:
        """Blocks that `allocate` can give to this account: empty and cached, less what others' floors protect."""
        return len(self.empty) + self.num_cached - (self._num_protected - account.num_protected)

    def protect(self, account: Account) -> None:
        """Count anew what an account's floor keeps from others; for who changes its floor or what it holds."""
        num_protected = min(len(account.cached), max(0, account.floor - account.num_active))
        self._num_protected += num_protected - account.num_protected
        account.num_protected = num_protected

    def allocate(self, account: Account, num_blocks: int) -> list[BlockId] | None:
        """Take blocks, each with one holder and charged to `account`; all or None.

        Empty blocks go first, then the head of the queue of the tenant most over its share, public ones last.
        """
        empty = self.empty
        if empty.length < num_blocks and self.available(account) < num_blocks:
            return None
        taken: list[BlockId] = []
        now = self.now
        for _ in range(num_blocks):
            block = empty.popleft() if empty.length else self._evict(account)
            block.ref_count = 1
            block.account = account
            block.since = now
            block.hit_at = None
            account.num_active += 1
            block_id = block.block_id
            self.states[block_id] = ACTIVE
            self.owners[block_id] = account.index
            taken.append(block_id)
        if account.floor:
            self.protect(account)
        if account.heap_key is not None and -account.over_share < account.heap_key:
            self._push(account)
        return taken

    def hold(self, block_ids: Sequence[BlockId]) -> None:
        """Add a holder to active or cached blocks."""
        blocks, states = self.blocks, self.states
        for block_id in block_ids:
            block = blocks[block_id]
            ref_count = block.ref_count = block.ref_count + 1
            if ref_count == 1:
                account = block.account
                assert account is not None, f"{block} is empty"
                account.cached.remove(block)
                account.num_active += 1
                self.num_cached -= 1
                states[block_id] = ACTIVE
                if account.floor:
                    self.protect(account)
            elif ref_count == 2:
                self.num_shared += 1
                states[block_id] = SHARED

    def hold_found(self, block_ids: Sequence[BlockId]) -> None:
        """Add a holder to blocks that a prompt found computed, and note when that was."""
        self.hold(block_ids)
        blocks, now = self.blocks, self.now
        for block_id in block_ids:
            blocks[block_id].hit_at = now

    def release(self, block_ids: Sequence[BlockId]) -> int:
        """Drop one holder of each block, tails first, so that a tail is evicted before what it hangs on.

        Returns:
            How many lost their last holder.
        """
        freed = 0
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"{block} has no holder to release"
            block.ref_count -= 1
            if block.ref_count == 1:
                self.num_shared -= 1
                self.states[block_id] = ACTIVE
            elif block.ref_count == 0:
                freed += 1
                account = block.account
                assert account is not None, f"{block} is charged to nobody"
                account.num_active -= 1
                if block.entry is None:
                    self._make_empty(block)
                else:
                    account.cached.append(block)
                    self.num_cached += 1
                    self.states[block_id] = CACHED
                    if account.heap_key is None:
                        self._push(account)
                if account.floor:
                    self.protect(account)
        self.num_freed += freed
        return freed

    def register(
        self, block_id: BlockId, namespace: NamespaceId, parent: PrefixEntry | None, tokens: bytes
    ) -> PrefixEntry | None:
        """Let a full, committed block be found; None where the index does not take it."""
        block = self.blocks[block_id]
        assert block.entry is None, f"{block} is registered already"
        assert block.ref_count > 0, f"{block} has no holder"
        block.entry = self.index.add(namespace, parent, tokens, block_id)
        return block.entry

    def unregister(self, block_id: BlockId) -> int:
        """Take a block and all that hangs on it out of the index; those without a holder become empty.

        Returns:
            How many those are together.
        """
        entry = self.blocks[block_id].entry
        if entry is None:
            return 0
        subtree = list(entry.subtree())
        for removed in reversed(subtree):
            self.index.remove(removed)
            block = self.blocks[removed.block_id]
            block.entry = None
            if block.ref_count == 0:
                account = block.account
                assert account is not None
                account.cached.remove(block)
                self.num_cached -= 1
                self._make_empty(block)
                if account.floor:
                    self.protect(account)
        return len(subtree)

    def _evict(self, account: Account) -> KVCacheBlock:
        """Return a cached block, now empty and in no queue."""
        owner = self._most_over_share(account) or self.public
        block = owner.cached.head
        entry = block.entry
        assert entry is not None, f"{block} is cached and not registered"
        if entry.first_child is not None:
            before = self.empty.length
            # Whoever holds a child holds its parent, so nobody holds any of these.
            for lost in entry.subtree():
                loser = self.blocks[lost.block_id].account
                assert loser is not None, "a cached block is charged to nobody"
                loser.num_evicted += 1
                loser.evicted.add(lost)
            self.unregister(block.block_id)
            self.num_evictions += self.empty.length - before
            return self.empty.popleft()
        owner.num_evicted += 1
        owner.evicted.add(entry)
        self.index.remove(entry)
        owner.cached.remove(block)
        block.entry = None
        self.num_cached -= 1
        self.num_evictions += 1
        if owner.floor:
            self.protect(owner)
        return block

    def _most_over_share(self, account: Account) -> Account | None:
        """Return the tenant to take a cached block from: any at or below its floor is exempt, but for its own use."""
        heap = self._heap
        exempt: list[tuple[float, int]] = []
        found: Account | None = None
        while heap:
            key, index = heap[0]
            candidate = self.accounts[index]
            actual = -candidate.over_share
            if key != candidate.heap_key:
                heapq.heappop(heap)
            elif not candidate.cached:
                heapq.heappop(heap)
                candidate.heap_key = None
            elif key != actual:
                heapq.heapreplace(heap, (actual, index))
                candidate.heap_key = actual
            elif candidate is account or candidate.num_resident > candidate.floor:
                found = candidate
                break
            else:
                exempt.append(heapq.heappop(heap))
        for item in exempt:
            heapq.heappush(heap, item)
        return found

    def _push(self, account: Account) -> None:
        if account is self.public:
            return
        account.heap_key = -account.over_share
        heapq.heappush(self._heap, (account.heap_key, account.index))
        if len(self._heap) > 2 * len(self.accounts) + 64:
            self._heap = [(a.heap_key, a.index) for a in self.accounts if a.heap_key is not None]
            heapq.heapify(self._heap)

    def _make_empty(self, block: KVCacheBlock) -> None:
        block.account = None
        self.states[block.block_id] = EMPTY
        self.owners[block.block_id] = NOBODY
        # The last one emptied is the first one used: its memory is warm.
        self.empty.appendleft(block)
