"""What each session has in the engine: its token ids, and a claim to the blocks that hold their KV.

A lease is a claim, not a right. When blocks are wanted, idle leases shrink from their tails, longest idle first; the
ids stay, so what is lost costs time, never content. The table of leases knows no requests: only whether one waits for
or runs on a lease.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from chatd.kvcache.block import BlockId
from chatd.kvcache.block_pool import Account
from chatd.kvcache.block_table import BlockTable
from chatd.kvcache.lease import Lease, LeaseState
from chatd.kvcache.manager import ID_TYPECODE, Allocation, KVCacheManager

_MAX_CLEAN_TRIED = 32
"""So many leases are asked whether they are kept below, before the longest idle one is taken as it is."""

_RECLAIMABLE = (LeaseState.IDLE, LeaseState.ATTACHED, LeaseState.QUEUED)


class _Holder:
    """What the leases of one tenant are together.

    Attributes:
        num_leases: In any state.
        num_tokens: Ids of all of them.
        idle: Those that can be forgotten, the longest idle first.
    """

    __slots__ = ("idle", "num_leases", "num_tokens")

    def __init__(self) -> None:
        self.num_leases = self.num_tokens = 0
        self.idle: OrderedDict[int, Lease] = OrderedDict()


class LeaseTable:
    """All leases, and the order in which idle ones give up blocks.

    Args:
        manager: Of the tables.
        max_leases: More than this many, and one is forgotten: the longest idle of the tenant that has most for its
            weight, so that nobody's many conversations cost another tenant its few.
        max_tokens: Likewise for the sum of their ids.

    Attributes:
        num_tokens: Ids of all leases.
        num_offered: How often a lease became reclaimable; while it stands still, no more can be reclaimed.
        shrunk: Leases that lost KV to pressure since the owner of this table last cleared it.
        used: Likewise, those whose turn ended.
        dirty: Idle leases with blocks that were not copied down yet, the longest idle first.
        is_below: Tells of a lease and the place of one of its full blocks whether it is kept below the pool.
    """

    def __init__(self, manager: KVCacheManager, max_leases: int, max_tokens: int) -> None:
        self._manager = manager
        self._pool = manager.pool
        self._max_leases = max_leases
        self._max_tokens = max_tokens
        self._leases: dict[int, Lease] = {}
        # By tenant, those that hold blocks; in each state the longest idle first.
        self._reclaimable: dict[LeaseState, dict[str | None, OrderedDict[int, Lease]]] = {
            state: {} for state in _RECLAIMABLE
        }
        self._holders: dict[str | None, _Holder] = {}
        # Ids whose sessions somebody looks at, open or not; the longest known first.
        self._attached: dict[int, None] = {}
        self.shrunk: dict[int, Lease] = {}
        self.used: dict[int, Lease] = {}
        self.dirty: OrderedDict[int, Lease] = OrderedDict()
        self.is_below: Callable[[Lease, int], bool] | None = None
        self.num_tokens = 0
        self.num_offered = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, lease_id: int) -> Lease | None:
        """Return a lease, or None."""
        return self._leases.get(lease_id)

    def num_held(self, tenant: str | None) -> tuple[int, int]:
        """Return how many leases a tenant has, and how many ids they have together."""
        holder = self._holders.get(tenant)
        return (0, 0) if holder is None else (holder.num_leases, holder.num_tokens)

    def open(self, lease_id: int, tenant: str | None) -> Lease | None:
        """Open an empty lease; its state is `ACTIVE`. None where no idle lease can be forgotten for it."""
        assert lease_id not in self._leases, f"lease {lease_id} is open already"
        if len(self._leases) >= self._max_leases and not self._forget_one(lambda holder: holder.num_leases):
            return None
        lease = Lease(lease_id, tenant, self._manager.open_table(tenant))
        self._holders.setdefault(tenant, _Holder()).num_leases += 1
        lease.attached = lease_id in self._attached
        self._leases[lease_id] = lease
        return lease

    def fork(self, lease: Lease, new_lease_id: int, num_tokens: int) -> Lease | None:
        """Open a lease with the first tokens of another one and its blocks, shared; None as for `open`."""
        state = lease.state
        if state is not LeaseState.ACTIVE:
            self.set_state(lease, LeaseState.ACTIVE)
        fork = self.open(new_lease_id, lease.tenant)
        if fork is not None:
            fork.table = self._manager.fork(lease.table, num_tokens)
            self.extend(fork, lease.token_ids[:num_tokens])
            num_full = num_tokens // self._manager.block_size
            fork.chain, fork.digests = lease.chain[:num_full], lease.digests[:num_full]
            fork.num_clean = min(lease.num_clean, num_full)
        if state is not LeaseState.ACTIVE:
            self.set_state(lease, state)
        return fork

    def share(self, lease: Lease, source: Lease, num_tokens: int) -> None:
        """Let a lease hold the blocks of another one's first tokens in place of its own; their ids begin alike."""
        self.free(lease)
        lease.table = self._manager.fork(source.table, num_tokens)
        lease.num_clean = min(source.num_clean, num_tokens // self._manager.block_size)
        self.set_state(lease, lease.state, is_offer=False)

    def become(self, lease: Lease, source: Lease) -> None:
        """Make a lease a fork of the whole of another one: the same ids, and its blocks, shared."""
        self._count_tokens(lease, len(source.token_ids) - len(lease.token_ids))
        lease.token_ids = source.token_ids[:]
        lease.chain, lease.digests = source.chain[:], source.digests[:]
        self.share(lease, source, len(source.token_ids))

    def close(self, lease: Lease) -> None:
        """Forget a lease, its ids and its claim; closing it again changes nothing."""
        if self._leases.get(lease.lease_id) is not lease:
            return
        self.set_state(lease, LeaseState.ACTIVE)
        self._manager.free(lease.table)
        self._count_tokens(lease, -len(lease.token_ids))
        holder = self._holders[lease.tenant]
        holder.num_leases -= 1
        if not holder.num_leases:
            del self._holders[lease.tenant]
        self.shrunk.pop(lease.lease_id, None)
        self.used.pop(lease.lease_id, None)
        self.dirty.pop(lease.lease_id, None)
        del self._leases[lease.lease_id]

    def extend(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """Append ids, and forget the longest idle leases if they are too many for the table.

        Raises:
            OverflowError: An id has more than 32 bits; nothing was appended.
        """
        added = array(ID_TYPECODE, token_ids)
        lease.token_ids += added
        self._count_tokens(lease, len(added))
        while self.num_tokens > self._max_tokens and self._forget_one(lambda holder: holder.num_tokens, keep=lease):
            pass

    def append(self, lease: Lease, token_id: int) -> None:
        """Append one id that was just drawn."""
        lease.token_ids.append(token_id)
        self._count_tokens(lease, 1)

    def trim(self, lease: Lease, num_tokens: int) -> None:
        """Cut ids and blocks to a length; one that the lease does not reach changes nothing."""
        removed = len(lease.token_ids) - num_tokens
        if removed > 0:
            del lease.token_ids[num_tokens:]
            self._count_tokens(lease, -removed)
            num_full = num_tokens // self._manager.block_size
            del lease.chain[num_full:]
            del lease.digests[num_full:]
            lease.num_clean = min(lease.num_clean, num_full)
            lease.next_dirty = min(lease.next_dirty, num_full)
        self._manager.trim(lease.table, num_tokens)

    def free(self, lease: Lease) -> None:
        """Give back all blocks of a lease that is in use; its ids stay."""
        if lease.table.block_ids:
            self.shrunk[lease.lease_id] = lease
        self._manager.free(lease.table)
        lease.num_clean = 0

    def set_state(self, lease: Lease, state: LeaseState, *, is_offer: bool = True) -> None:
        """Move a lease to the end of the order of its new state; `is_offer` is False where it was there just before."""
        if lease.state is not LeaseState.ACTIVE:
            holders = self._reclaimable[lease.state].get(lease.tenant)
            if holders is not None:
                holders.pop(lease.lease_id, None)
            self._holders[lease.tenant].idle.pop(lease.lease_id, None)
        lease.state = state
        if state is not LeaseState.ACTIVE:
            self.num_offered += is_offer
            self._manager.adopt(lease.table)
            if lease.table.block_ids:
                self._reclaimable[state].setdefault(lease.tenant, OrderedDict())[lease.lease_id] = lease
            if state is not LeaseState.QUEUED:
                self._holders[lease.tenant].idle[lease.lease_id] = lease

    def note_offer(self) -> None:
        """Note that blocks of a lease have become reclaimable for another reason than its state."""
        self.num_offered += 1

    def set_idle(self, lease: Lease) -> None:
        """End a turn: the lease keeps its blocks until somebody needs them more."""
        if lease.trim_to is not None:
            self.trim(lease, lease.trim_to)
            lease.trim_to = None
        if lease.state not in (LeaseState.IDLE, LeaseState.ATTACHED):
            lease.idle_since = self._pool.now
        self.used[lease.lease_id] = lease
        if self.is_below is not None and lease.table.num_computed_tokens // self._manager.block_size > lease.num_clean:
            self.dirty[lease.lease_id] = lease
            self.dirty.move_to_end(lease.lease_id)
            lease.next_dirty = -1
        self.set_state(lease, LeaseState.ATTACHED if lease.attached else LeaseState.IDLE)

    def set_attached(self, lease_id: int, attached: bool) -> None:
        """Note whether somebody looks at a lease's session, also for one that is not open, or will be again."""
        self._attached.pop(lease_id, None)
        if attached:
            self._attached[lease_id] = None
            if len(self._attached) > self._max_leases:
                del self._attached[next(iter(self._attached))]
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.attached = attached
            if lease.state in (LeaseState.IDLE, LeaseState.ATTACHED):
                self.set_idle(lease)

    def drop_all(self) -> None:
        """Start over after the manager was given an empty pool: every lease keeps its ids, none has blocks."""
        self._pool = self._manager.pool
        for leases in self._reclaimable.values():
            leases.clear()
        self.dirty.clear()
        for lease in self._leases.values():
            lease.table = self._manager.open_table(lease.tenant)
            lease.num_clean = 0
            lease.next_dirty = -1

    def allocate_slots(self, table: BlockTable, num_tokens: int, computed: Sequence[BlockId] = ()) -> Allocation | None:
        """As `KVCacheManager.allocate_slots`, at the cost of leases where the pool alone has not enough."""
        allocation = self._manager.allocate_slots(table, num_tokens, computed)
        if allocation is not None:
            return allocation
        missing = self._manager.num_missing_blocks(table, num_tokens, computed)
        if not self._reclaim(table.account, missing, computed):
            return None
        return self._manager.allocate_slots(table, num_tokens, computed)

    def can_reclaim(self, account: Account, num_blocks: int) -> bool:
        """Return whether leases could give so many blocks, counting only blocks that one lease alone holds."""
        if num_blocks <= 0:
            return True
        blocks = self._pool.blocks
        for tenants in self._reclaimable.values():
            for tenant, leases in tenants.items():
                other = self._pool.account(tenant)
                limit = self._pool.num_blocks
                if other is not account:
                    limit = other.num_resident - other.floor - other.cached.length
                for lease in leases.values():
                    for block_id in reversed(lease.table.block_ids):
                        if limit <= 0 or blocks[block_id].ref_count > 1:
                            break
                        limit -= 1
                        num_blocks -= 1
                        if num_blocks <= 0:
                            return True
        return False

    def _reclaim(self, account: Account, num_blocks: int, keep: Sequence[BlockId]) -> bool:
        """Shrink leases until the pool has `num_blocks` for this account."""
        self._pool.hold(keep)
        try:
            # Found blocks are held now; what was counted for them is no longer available, nor needed.
            needed = num_blocks - sum(self._pool.blocks[block_id].ref_count == 1 for block_id in keep)
            if not self._may_suffice(needed - self._pool.available(account)):
                return False
            # What others hold too frees little and costs little; a queued turn goes after all that.
            for states in ((LeaseState.IDLE, LeaseState.ATTACHED), (LeaseState.QUEUED,)):
                for shared_too in (False, True):
                    if any(self._shrink_all(state, account, needed, shared_too) for state in states):
                        return True
            return self._pool.available(account) >= needed
        finally:
            self._pool.release(keep)

    def _may_suffice(self, num_blocks: int) -> bool:
        """Return whether all leases together hold so many blocks, so that none is shrunk for a hopeless need."""
        for tenants in self._reclaimable.values():
            for leases in tenants.values():
                for lease in leases.values():
                    if num_blocks <= 0:
                        return True
                    num_blocks -= len(lease.table.block_ids)
        return num_blocks <= 0

    def _shrink_all(self, state: LeaseState, account: Account, needed: int, shared_too: bool) -> bool:
        """Shrink leases of one state until there is enough; tenants most over their share first, public ones last."""
        pool = self._pool
        tenants = self._reclaimable[state]
        shares = {tenant: -pool.account(tenant).over_share for tenant in tenants}
        for tenant in sorted(tenants, key=lambda tenant: (tenant is None, shares[tenant], tenant or "")):
            other = pool.account(tenant)
            emptied: dict[int, None] = {}
            # What is kept below is dropped before what is not: it is copied down in this order too, so it comes first.
            clean = [] if self.is_below is None else list(islice(tenants[tenant].values(), _MAX_CLEAN_TRIED))
            for lease, is_clean in chain(((c, True) for c in clean), ((d, False) for d in tenants[tenant].values())):
                while pool.available(account) < needed and _gives(other, account):
                    if not self._shrink(lease, shared_too, is_clean):
                        break
                if not lease.table.block_ids:
                    emptied[lease.lease_id] = None
                if pool.available(account) >= needed:
                    break
            for lease_id in emptied:
                del tenants[tenant][lease_id]
            if not tenants[tenant]:
                del tenants[tenant]
            if pool.available(account) >= needed:
                return True
        return False

    def _shrink(self, lease: Lease, shared_too: bool, is_clean: bool) -> bool:
        """Take a lease's last block; False where there is none, or only one that is not to be taken.

        Args:
            lease: Which.
            shared_too: Take also what another one holds.
            is_clean: Take only what is kept below the pool, or is no full block.
        """
        table = lease.table
        if not table.block_ids or (not shared_too and self._pool.blocks[table.block_ids[-1]].ref_count > 1):
            return False
        if self._manager.is_in_flight(table):
            return False  # Its turn has ended and a row of it is still computed: nothing would be free before that.
        last = len(table.block_ids) - 1
        size = self._manager.block_size
        if is_clean and self.is_below is not None:
            place = last if table.num_computed_tokens % size == 0 else last - 1
            # Only what was copied is asked for: naming a block takes a hash of all before it.
            is_copied = place < lease.num_clean or 0 <= lease.next_dirty <= place
            if place >= 0 and not (is_copied and self.is_below(lease, place)):
                return False
        self._manager.trim(table, last * size)
        lease.num_clean = min(lease.num_clean, last)
        lease.next_dirty = min(lease.next_dirty, last)
        self.shrunk[lease.lease_id] = lease
        return True

    def _count_tokens(self, lease: Lease, added: int) -> None:
        self.num_tokens += added
        self._holders[lease.tenant].num_tokens += added

    def _forget_one(self, size_of: Callable[[_Holder], int], keep: Lease | None = None) -> bool:
        """Forget the longest idle lease of the tenant with most by this measure for its weight; public ones go last."""
        greatest: tuple[bool, float] = (False, -1.0)
        forgotten: Lease | None = None
        for tenant, holder in self._holders.items():
            size = (tenant is not None, size_of(holder) / self._pool.account(tenant).weight)
            if size > greatest:
                oldest = next((lease for lease in holder.idle.values() if lease is not keep), None)
                if oldest is not None:
                    greatest, forgotten = size, oldest
        if forgotten is None:
            return False
        self.close(forgotten)
        self.shrunk[forgotten.lease_id] = forgotten
        return True


def _gives(other: Account, account: Account) -> bool:
    """Return whether blocks that `other` lets go become available to `account`: its floor keeps what is cached too."""
    return other is account or other.cached.length < other.num_resident - other.floor
