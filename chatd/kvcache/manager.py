"""What the scheduler asks of the cache: find, allocate, commit, discard, share and give back.

The manager knows block tables and the pool. It knows no requests, no leases and no time. Each verb leaves every table
with exactly the blocks that its computed tokens need; between plan and commit also those that the step writes. What a
table gives back that a plan in flight may still read or write goes back to the pool when that plan is retired.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from chatd.kvcache.block import BlockId
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.block_table import BlockTable
from chatd.kvcache.prefix_index import Namespace, NamespaceId, PrefixEntry, PrefixIndex

BlockKey = tuple[NamespaceId, int, bytes]
"""Which block: its namespace, the serial of its parent's entry (0 at the start of a sequence), and its tokens."""

ID_TYPECODE = "i"


@dataclass(slots=True)
class Allocation:
    """What one plan took for one table, so that it can be committed or undone.

    Attributes:
        table: Whose it is.
        num_blocks_before: Length of the table without this plan's new blocks.
        num_tokens_before: The tokens that the table was planned for without them.
        copy_source: The shared or registered block whose slots go into the table's last one; held until commit.
        copy_target: That last one.
    """

    table: BlockTable
    num_blocks_before: int
    num_tokens_before: int = 0
    copy_source: BlockId | None = None
    copy_target: BlockId | None = None


class KVCacheManager:
    """Block tables over one pool.

    Args:
        pool: Of which it is the only user.
        block_size: Tokens of a block.
        base: The namespace of this engine's KV; only `tenant` differs between tables.
    """

    def __init__(self, pool: BlockPool, block_size: int, base: Namespace) -> None:
        self.block_size = block_size
        self._base = base
        self._last_retired = 0
        self._limbo: list[tuple[int, list[BlockId]]] = []
        self.use_pool(pool)

    def use_pool(self, pool: BlockPool) -> None:
        """Go on with another pool; tables of the old one are void."""
        assert not self._limbo, "a plan is in flight"
        self.pool = pool
        self.index: PrefixIndex = pool.index
        self._public = self.index.namespace_id(self._base.of(None))

    def open_table(self, tenant: str | None) -> BlockTable:
        """Return an empty table in a tenant's namespace; None is "public"."""
        return BlockTable(self.index.namespace_id(self._base.of(tenant)), self.pool.account(tenant))

    @property
    def limbo(self) -> Iterable[Sequence[BlockId]]:
        """Blocks that tables have given back and that plans in flight hold."""
        return (block_ids for _, block_ids in self._limbo)

    def is_in_flight(self, table: BlockTable) -> bool:
        """Return whether a plan that is not retired reads or writes a table's blocks."""
        return table.last_plan > self._last_retired

    def retire(self, step: int) -> None:
        """Let go of what plans up to this one held: they have ended."""
        self._last_retired = step
        if self._limbo:
            ended = [block_ids for last_plan, block_ids in self._limbo if last_plan <= step]
            self._limbo = [held for held in self._limbo if held[0] > step]
            for block_ids in ended:
                self.pool.release(block_ids)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, table: BlockTable, token_ids: array[int], *, last_too: bool = False) -> list[BlockId]:
        """Find blocks of `token_ids` that go on where the table's full blocks end.

        Whole blocks only and never the last token, whose logits are needed, but for `last_too`. Costs one look-up
        more than it finds: nothing that the table holds is hashed again.
        """
        self.adopt(table)
        size = self.block_size
        first = table.num_computed_tokens // size
        end = (len(token_ids) - (not last_too)) // size
        found: list[BlockId] = []
        if first >= end:
            return found
        parent = self._entry(table, first - 1)
        if first and parent is None:
            return found
        for position in range(first * size, end * size, size):
            entry = self._find(table.namespace, parent, token_ids[position : position + size].tobytes())
            if entry is None:
                self._note_wanted(table, parent, token_ids, range(position, end * size, size))
                break
            found.append(entry.block_id)
            parent = entry
        return found

    def take_computed_blocks(self, table: BlockTable, token_ids: array[int]) -> bool:
        """Have a table hold what `get_computed_blocks` finds for it; return whether that was anything."""
        computed = self.get_computed_blocks(table, token_ids)
        if not computed:
            return False
        self.allocate_slots(table, self.num_tokens_with(table, computed), computed)
        return True

    def next_block(
        self, table: BlockTable, token_ids: array[int], computed: Sequence[BlockId] = (), *, last_too: bool = True
    ) -> BlockKey | None:
        """Return which block goes on where the table's full blocks, and those that were found for it, end.

        None where its tokens are not all there, or what it hangs on is not registered.
        """
        self.adopt(table)
        size = self.block_size
        place = table.num_computed_tokens // size + len(computed)
        if place >= (len(token_ids) - (not last_too)) // size:
            return None
        parent = self.pool.blocks[computed[-1]].entry if computed else self._entry(table, place - 1)
        if place and parent is None:
            return None
        tokens = token_ids[place * size : (place + 1) * size].tobytes()
        return (table.namespace, 0 if parent is None else parent.serial, tokens)

    def num_tokens_with(self, table: BlockTable, computed: Sequence[BlockId]) -> int:
        """Return the computed tokens of a table once it holds the blocks that were found for it."""
        if not computed:
            return table.num_computed_tokens
        return (table.num_computed_tokens // self.block_size + len(computed)) * self.block_size

    def num_missing_blocks(self, table: BlockTable, num_tokens: int, computed: Sequence[BlockId] = ()) -> int:
        """Blocks that `allocate_slots` with these arguments would take from the pool, found ones included."""
        if computed:
            first = table.num_computed_tokens // self.block_size
            cached = sum(self.pool.blocks[block_id].ref_count == 0 for block_id in computed)
            return self.num_blocks_of(num_tokens) - first - len(computed) + cached
        return self.num_blocks_of(num_tokens) - len(table.block_ids) + self._must_copy(table)

    def allocate_slots(self, table: BlockTable, num_tokens: int, computed: Sequence[BlockId] = ()) -> Allocation | None:
        """Give the table a slot of its own for each token from the computed ones to `num_tokens`.

        Args:
            table: All its tokens from `num_planned_tokens` to `num_tokens` will be written by this plan.
            num_tokens: The length, in tokens, that the plan will have computed.
            computed: What `get_computed_blocks` just found. They stay in the table even if the plan is discarded.

        Returns:
            None for "not now"; then nothing has changed.
        """
        if table.adoptions:
            self.adopt(table)
        pool, block_ids = self.pool, table.block_ids
        must_copy = not computed and self._must_copy(table)
        kept = len(block_ids)
        if computed:
            pool.hold_found(computed)
            kept = table.num_computed_tokens // self.block_size + len(computed)
        missing = -(-num_tokens // self.block_size) - kept + must_copy
        if missing:
            fresh = pool.allocate(table.account, missing)
            if fresh is None:
                pool.release(computed)
                return None
        else:
            fresh = []
        if computed:
            # A partial block of the table's own gives way to a full one that begins with the same tokens.
            replaced = block_ids[kept - len(computed) :]
            block_ids[kept - len(computed) :] = computed
            self._release(table, replaced)
            table.num_computed_tokens = table.num_planned_tokens = kept * self.block_size
            table.num_registered_blocks = kept
        allocation = Allocation(table, kept, table.num_planned_tokens)
        if must_copy:
            allocation.copy_source, allocation.copy_target = table.copying = block_ids[-1], fresh[0]
            block_ids[-1:] = fresh
        elif fresh:
            block_ids += fresh
        table.num_planned_tokens = num_tokens
        return allocation

    def commit(self, allocation: Allocation, num_tokens: int, token_ids: array[int]) -> None:
        """Make a step's KV count: `num_tokens` of the table are computed, and full blocks can be found from now on."""
        table = allocation.table
        if allocation.copy_source is not None:
            self._settle_copy(allocation)
            self._release(table, [allocation.copy_source])
        table.num_computed_tokens = num_tokens
        if num_tokens // self.block_size > table.num_registered_blocks:
            self._register(table, num_tokens // self.block_size, token_ids)

    def discard(self, allocation: Allocation) -> None:
        """Undo `allocate_slots` after a step that failed: its slots were never seen by anybody."""
        table = allocation.table
        block_ids = table.block_ids
        fresh = block_ids[allocation.num_blocks_before :]
        del block_ids[allocation.num_blocks_before :]
        if allocation.copy_source is not None:
            self._settle_copy(allocation)
            fresh.insert(0, block_ids[-1])
            block_ids[-1] = allocation.copy_source
        table.num_planned_tokens = allocation.num_tokens_before
        self._release(table, fresh)

    def adopt(self, table: BlockTable) -> None:
        """Swap the table's duplicates for the blocks that were registered first."""
        for place, block_id in table.adoptions:
            duplicate = table.block_ids[place]
            table.block_ids[place] = block_id
            self._release(table, [duplicate])
        table.adoptions.clear()

    def trim(self, table: BlockTable, num_tokens: int) -> int:
        """Forget computed tokens beyond `num_tokens`; a length that the table does not reach changes nothing.

        Returns:
            Blocks that lost their last holder.
        """
        if num_tokens >= table.num_computed_tokens:
            return 0
        assert table.num_planned_tokens == table.num_computed_tokens, "a plan in flight goes on with the table"
        self.adopt(table)
        num_blocks = self.num_blocks_of(num_tokens)
        dropped = table.block_ids[num_blocks:]
        del table.block_ids[num_blocks:]
        table.num_computed_tokens = table.num_planned_tokens = num_tokens
        table.num_registered_blocks = min(table.num_registered_blocks, num_tokens // self.block_size)
        return self._release(table, dropped)

    def free(self, table: BlockTable) -> None:
        """Give back everything that a table holds; free of an empty table changes nothing."""
        self.trim(table, 0)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """Return a table with the first `num_tokens` computed tokens, all blocks shared, the partial last one too.

        A shared block is never written: whoever appends to it first copies it. What a plan in flight is about to copy
        is shared where it is now, since that plan may be discarded.
        """
        self.adopt(table)
        fork = BlockTable(table.namespace, table.account)
        fork.num_computed_tokens = fork.num_planned_tokens = min(num_tokens, table.num_computed_tokens)
        fork.num_registered_blocks = min(table.num_registered_blocks, fork.num_computed_tokens // self.block_size)
        fork.block_ids = table.block_ids[: self.num_blocks_of(fork.num_computed_tokens)]
        if table.copying is not None and fork.block_ids and fork.block_ids[-1] == table.copying[1]:
            fork.block_ids[-1] = table.copying[0]
        self.pool.hold(fork.block_ids)
        return fork

    def forget_sequence(self, tenant: str | None, token_ids: array[int], first: int) -> int:
        """Take the blocks of a sequence, from the place `first` on, and all that hangs on them out of the index.

        Public blocks stay. What somebody holds is theirs until they let go of it, and nobody else's. That some of it
        was evicted is forgotten as well.

        Returns:
            How many could be found and cannot any more.
        """
        account = self.pool.find_account(tenant)
        if account is None:
            return 0
        namespace = self.index.namespace_id(self._base.of(tenant))
        size, end = self.block_size, len(token_ids) // self.block_size
        parent: PrefixEntry | None = None
        top: PrefixEntry | None = None
        for place in range(end):
            entry = self._find(namespace, parent, token_ids[place * size : (place + 1) * size].tobytes())
            if entry is None:
                serial = 0 if parent is None else parent.serial
                rest = range(place * size, end * size, size)
                if namespace != self._public and (parent is None or parent.namespace == self._public):
                    blocks, public = self._blocks_of(token_ids, rest), self.pool.public.evicted
                    num_public, serial = public.follow(self._public, serial, blocks, forget=False)
                    rest = rest[num_public:]
                account.evicted.follow(namespace, serial, self._blocks_of(token_ids, rest))
                break
            if top is None and place >= first and entry.namespace == namespace:
                top = entry
            parent = entry
        return 0 if top is None else self.pool.unregister(top.block_id)

    def forget_tenant(self, tenant: str) -> int:
        """Take every block of a tenant out of the index; return how many. It looks at all blocks of the pool."""
        account = self.pool.find_account(tenant)
        if account is None:
            return 0
        namespace, num_blocks = self.index.namespace_id(self._base.of(tenant)), 0
        for block in self.pool.blocks:
            if block.entry is not None and block.entry.namespace == namespace:
                num_blocks += self.pool.unregister(block.block_id)
        account.evicted.clear()
        return num_blocks

    def poison(self, table: BlockTable) -> None:
        """Free a table whose KV is not to be trusted; none of its private blocks can be found again."""
        self.adopt(table)
        for block_id in table.block_ids:
            block = self.pool.blocks[block_id]
            if block.entry is not None and block.entry.namespace != self._public:
                # The rest of the table hangs on this one.
                self.pool.unregister(block_id)
                break
        self.free(table)

    def _release(self, table: BlockTable, block_ids: list[BlockId]) -> int:
        """Give a table's blocks back, once no plan in flight can reach them through it."""
        if table.last_plan > self._last_retired:
            if block_ids:
                self._limbo.append((table.last_plan, block_ids))
            return 0
        return self.pool.release(block_ids)

    def _settle_copy(self, allocation: Allocation) -> None:
        table = allocation.table
        if table.copying == (allocation.copy_source, allocation.copy_target):
            table.copying = None

    def _register(self, table: BlockTable, num_full: int, token_ids: array[int]) -> None:
        size = self.block_size
        place = table.num_registered_blocks
        parent = self._entry(table, place - 1)
        if place and parent is None:
            return
        while place < num_full:
            tokens = token_ids[place * size : (place + 1) * size].tobytes()
            entry = self._find(table.namespace, parent, tokens)
            if entry is not None:
                self.pool.hold((entry.block_id,))
                table.adoptions.append((place, entry.block_id))
            else:
                entry = self.pool.register(table.block_ids[place], table.namespace, parent, tokens)
                if entry is None:
                    break
            parent = entry
            place += 1
        table.num_registered_blocks = place

    def _find(self, namespace: NamespaceId, parent: PrefixEntry | None, tokens: bytes) -> PrefixEntry | None:
        """Look in "public" for as long as everything so far is public, then in the private namespace."""
        if namespace != self._public and (parent is None or parent.namespace == self._public):
            entry = self.index.find(self._public, parent, tokens)
            if entry is not None:
                return entry
        return self.index.find(namespace, parent, tokens)

    def _note_wanted(
        self, table: BlockTable, parent: PrefixEntry | None, token_ids: array[int], positions: range
    ) -> None:
        """Count the blocks that would have been found after `parent` were they not evicted lately; each one once."""
        public, own = self.pool.public, table.account
        serial = 0 if parent is None else parent.serial
        if public.evicted and (parent is None or parent.namespace == self._public):
            blocks = self._blocks_of(token_ids, positions)
            num_blocks, serial = public.evicted.follow(self._public, serial, blocks)
            public.num_wanted_again += num_blocks
            positions = positions[num_blocks:]
        if own.evicted:
            blocks = self._blocks_of(token_ids, positions)
            own.num_wanted_again += own.evicted.follow(table.namespace, serial, blocks)[0]

    def _blocks_of(self, token_ids: array[int], positions: range) -> Iterator[bytes]:
        """Yield the tokens of the blocks that begin at these positions."""
        return (token_ids[position : position + self.block_size].tobytes() for position in positions)

    def _entry(self, table: BlockTable, place: int) -> PrefixEntry | None:
        """Return the entry of the table's block at `place`; none at the start of a sequence."""
        return self.pool.blocks[table.block_ids[place]].entry if place >= 0 else None

    def _must_copy(self, table: BlockTable) -> bool:
        """Return whether the next slot is in a block that others read or that can be found."""
        if table.num_planned_tokens % self.block_size == 0:
            return False
        block = self.pool.blocks[table.block_ids[-1]]
        return block.ref_count > 1 or block.entry is not None
