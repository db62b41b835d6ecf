"""Which blocks are kept below the pool: the slots of the host's buffer, and a disk behind them.

```
           store, settle            write_out
   free ──────────────────> ready ─────────────> ready, on disk too
    ^ ^                      │ │                        │
    │ └── store, cancel      │ └─ pin … unpin           │ evict
    └──────── evict ─────────┘ <──── fetch, poll ── on disk only
```
A slot that is being filled is no hit: a stored block can be found when the plan that stored it is committed, a fetched
one when the disk has said that it is whole. A slot that somebody reads is pinned and stays what it is. The index knows
digests and slots, not bytes: those are moved by the runner and by the disk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from chatd.kvcache.block import HostSlot
from chatd.kvcache.block_file import Origin
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.disk import Disk
from chatd.kvcache.host_block import HostBlock
from chatd.kvcache.prefix_index import PrefixEntry

MAX_WRITES = 16
"""Slots that wait to be written to the disk at a time: so many more cannot be given up."""

MAX_READS = 64
"""Slots that are being filled from the disk at a time."""

MAX_READ_S = 10.0
"""A read without an answer is waited for so long; from then on nothing is read before the disk has answered it."""

_CHECK_UNITS = 2000


class Tiers:
    """The index of everything below the pool.

    Args:
        num_slots: Of the host's buffer; 0 is no tier at all.
        pool: Returns the pool, whose accounts say what a tenant's share is.
        disk: Behind the host.

    Attributes:
        disk: As given.
        num_slots: As given.
        num_stored: Blocks that came from the pool, since start.
        num_loaded: Blocks that went to the pool, since start.
        num_offers: How often a slot became free or a block could be given up; while it stands still, and nothing leaves
            the pool, no more room can be had.
        changed: Leases of which a block fell to the disk or away, since whoever reads this last cleared it.
    """

    def __init__(self, num_slots: int, pool: Callable[[], BlockPool], disk: Disk | None = None) -> None:
        self.num_slots = num_slots
        self.disk = disk
        self.num_stored = self.num_loaded = self.num_offers = 0
        self.changed: dict[int, None] = {}
        self._pool = pool
        self._free = [HostSlot(slot) for slot in reversed(range(num_slots))]
        self._blocks: dict[bytes, HostBlock] = {}
        # By tenant, what is ready and not pinned; the longest unused first.
        self._queues: dict[str | None, OrderedDict[bytes, HostBlock]] = {}
        self._unwritten: OrderedDict[bytes, HostBlock] = OrderedDict()
        self._writing: dict[HostSlot, HostBlock] = {}
        self._reading: dict[HostSlot, HostBlock] = {}
        self._storing: dict[HostSlot, HostBlock] = {}
        self._is_refused = False
        self._now = 0.0

    @property
    def is_empty(self) -> bool:
        """Nothing can be found."""
        return not self._blocks and (self.disk is None or not self.disk.num_used)

    @property
    def num_used(self) -> int:
        """Slots of the host that are taken."""
        return self.num_slots - len(self._free)

    @property
    def free_slots(self) -> Sequence[HostSlot]:
        """Slots of the host that keep nothing."""
        return self._free

    @property
    def is_moving(self) -> bool:
        """The disk writes or reads, or could write more."""
        is_reading = self.is_reading and not self.is_stuck
        return bool(self._writing or is_reading or (self._unwritten and not self._is_refused))

    @property
    def is_reading(self) -> bool:
        """The disk fills slots."""
        return bool(self._reading)

    @property
    def is_stuck(self) -> bool:
        """The disk has not answered a read for so long that nobody waits for it any more."""
        oldest = next(iter(self._reading.values()), None)
        return oldest is not None and self._now - oldest.asked_s >= MAX_READ_S

    def get(self, digest: bytes) -> HostBlock | None:
        """Return a block that is ready in the host, or None."""
        block = self._blocks.get(digest)
        return block if block is not None and block.is_ready else None

    def is_in_host(self, digest: bytes) -> bool:
        """Return whether a slot of the host has a block, or will have it."""
        return digest in self._blocks

    def is_coming(self, digest: bytes) -> bool:
        """Return whether the disk is filling a slot with this block."""
        block = self._blocks.get(digest)
        return block is not None and block.slot in self._reading

    def is_on_disk(self, digest: bytes) -> bool:
        """Return whether the disk would be asked for this block."""
        return self.disk is not None and not self.is_stuck and digest in self.disk

    def is_below(self, digest: bytes) -> bool:
        """Return whether a block is, or will be, in a tier below the pool."""
        return digest in self._blocks or self.is_on_disk(digest)

    def touch(self, digest: bytes, lease_id: int) -> None:
        """Note that a lease has use for a block: it is given up after all that were noted before."""
        block = self._blocks.get(digest)
        if block is None:
            return
        if lease_id not in block.lease_ids:
            block.lease_ids += (lease_id,)
        queue = self._queues.get(block.tenant)
        if queue is not None and digest in queue:
            queue.move_to_end(digest)

    # From the pool, and back.

    def store(
        self,
        digest: bytes,
        origin: Origin,
        tenant: str | None,
        lease_id: int,
        entry: PrefixEntry | None,
        *,
        is_ahead: bool,
    ) -> HostBlock | None:
        """Take a slot for a block that is not below the pool yet; `settle` or `cancel` follows.

        Args:
            digest: Of the block.
            origin: What it was computed from.
            tenant: Whose it is.
            lease_id: Who has use for it.
            entry: Of the same content in the pool.
            is_ahead: It is still in the pool, so nothing is given up for it that is nowhere else.

        Returns:
            None where there is no room for it.
        """
        assert digest not in self._blocks, "a block is stored twice"
        slot = self._take_slot(is_ahead=is_ahead)
        if slot is None:
            return None
        block = HostBlock(digest, origin, slot, tenant, lease_id)
        block.entry = entry
        self._blocks[digest] = self._storing[slot] = block
        return block

    def settle(self, block: HostBlock) -> None:
        """Let a stored block be found: its plan is committed. One that was forgotten meanwhile only frees its slot."""
        del self._storing[block.slot]
        if block.is_dropped:
            self._free.append(block.slot)
            return
        self.num_stored += 1
        self._make_ready(block)
        if self.disk is not None:
            self._unwritten[block.digest] = block

    def cancel(self, block: HostBlock) -> None:
        """Undo `store`."""
        del self._storing[block.slot]
        if not block.is_dropped:
            del self._blocks[block.digest]
        self._free.append(block.slot)

    def pin(self, block: HostBlock) -> None:
        """Keep a slot as it is while somebody reads it."""
        block.num_pins += 1
        if block.num_pins == 1:
            self._dequeue(block)

    def unpin(self, block: HostBlock) -> None:
        """Drop a reader; the last one to go leaves the block as the one that was used last."""
        assert block.num_pins > 0, f"{block} is not pinned"
        block.num_pins -= 1
        if block.num_pins:
            return
        if block.is_dropped:
            self._free.append(block.slot)
        else:
            self._enqueue(block)

    def forget(self, digest: bytes) -> None:
        """Give a block up in every tier."""
        self.drop(digest)
        if self.disk is not None:
            self.disk.forget(digest)

    def forget_tenant(self, tenant: str, digests: Iterable[bytes]) -> tuple[int, int]:
        """Give up a tenant's blocks in every tier; return how many the host had, and the disk of those.

        Args:
            digests: Of what the disk has beyond the host; it knows no tenants.
        """
        held = [block.digest for block in self._blocks.values() if block.tenant == tenant]
        num_disk = 0
        for digest in (*held, *digests):
            num_disk += self.is_on_disk(digest)
            self.forget(digest)
        return len(held), num_disk

    def drop(self, digest: bytes) -> None:
        """Give a block up in the host."""
        block = self._blocks.get(digest)
        if block is None:
            return
        del self._blocks[digest]
        self._unwritten.pop(digest, None)
        self.num_offers += 1
        self.changed.update(dict.fromkeys(block.lease_ids))
        if block.num_pins or not block.is_ready:
            block.is_dropped = True
        else:
            self._dequeue(block)
            self._free.append(block.slot)

    def clear(self) -> None:
        """Forget everything in every tier; no plan is in flight."""
        for digest in list(self._blocks):
            self.forget(digest)
        if self.disk is not None:
            self.disk.clear()

    # To the disk, and back.

    def fetch(self, digest: bytes, origin: Origin, tenant: str | None, lease_id: int) -> bool:
        """Ask the disk for a block; False where it or the host has no room for another one now."""
        if self.disk is None or len(self._reading) >= MAX_READS or digest in self._blocks:
            return False
        slot = self._take_slot(is_ahead=False)
        if slot is None:
            return False
        if not self.disk.read(digest, origin, slot):
            self._free.append(slot)
            return False
        block = self._blocks[digest] = self._reading[slot] = HostBlock(digest, origin, slot, tenant, lease_id)
        block.asked_s = self._now
        return True

    def write_out(self) -> None:
        """Ask the disk to write what is in the host only, the longest there first."""
        self._is_refused = False
        while self._unwritten and len(self._writing) < MAX_WRITES:
            digest, block = self._unwritten.popitem(last=False)
            assert self.disk is not None, "a block waits for a disk that is not there"
            if not self.disk.write(digest, block.origin, block.slot):
                self._unwritten[digest] = block
                self._unwritten.move_to_end(digest, last=False)
                self._is_refused = True
                return
            self.pin(block)
            self._writing[block.slot] = block

    def poll(self, now: float) -> None:
        """Take in what the disk has done. What it says is an input: nothing else tells how far it is.

        What it was asked for and does not answer is given up, but for the slots, which it may still fill.
        """
        self._now = now
        if self.disk is None:
            return
        for result in self.disk.poll():
            written = self._writing.pop(result.slot, None)
            if written is not None:
                self.unpin(written)
                continue
            block = self._reading.pop(result.slot)
            if block.is_dropped:
                self._free.append(block.slot)
            elif result.verb == "read":
                self._make_ready(block)
            else:
                if result.why != "paused":
                    self.disk.forget(block.digest)
                del self._blocks[block.digest]
                self._free.append(block.slot)
                self.changed.update(dict.fromkeys(block.lease_ids))
        if self.is_stuck:
            # One thread reads, so all others stand behind the one that is not answered.
            for block in self._reading.values():
                if not block.is_dropped:
                    self.drop(block.digest)

    def check(self, loads: Sequence[HostBlock] = ()) -> Iterator[int]:
        """Check everything between two plans, yielding now and then how much was looked at.

        Args:
            loads: What plans in flight load, each as often as it is loaded.

        Raises:
            AssertionError: Names what is broken.
        """
        used: dict[HostSlot, HostBlock] = {}
        num_loads = Counter(block.slot for block in loads)
        busy = (*self._writing.values(), *self._reading.values(), *self._storing.values(), *loads)
        leaving = {block: None for block in busy if block.is_dropped}
        for block in (*self._blocks.values(), *leaving):
            slot = block.slot
            assert slot not in used, f"{block} and {used[slot]} are in one slot"
            used[slot] = block
            num_pins = (slot in self._writing) + num_loads[slot]
            assert block.num_pins == num_pins, f"{block} is pinned by nobody"
            is_filled = slot in self._reading or slot in self._storing
            assert block.is_ready != is_filled, f"{block} is neither ready nor being filled"
            queue = self._queues.get(block.tenant)
            is_queued = queue is not None and queue.get(block.digest) is block
            assert is_queued == (block.is_ready and not block.num_pins), f"{block} is in a queue, or in none"
            assert block.is_dropped or self._blocks[block.digest] is block, f"{block} is under another name"
            if len(used) % _CHECK_UNITS == 0:
                yield _CHECK_UNITS
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        assert not used.keys() & set(self._free), "a slot is free and used"
        assert len(used) + len(self._free) == self.num_slots, f"{len(used)} + {len(self._free)} slots are not all"
        queued = sum(len(queue) for queue in self._queues.values())
        assert queued == sum(block.is_ready and not block.num_pins for block in used.values()), "a queue has more"
        for digest, block in self._unwritten.items():
            assert self._blocks.get(digest) is block, f"{block} waits for the disk and is gone"
        yield len(used)

    # Parts.

    def _make_ready(self, block: HostBlock) -> None:
        block.is_ready = True
        self._enqueue(block)

    def _enqueue(self, block: HostBlock) -> None:
        self.num_offers += 1
        self._queues.setdefault(block.tenant, OrderedDict())[block.digest] = block

    def _dequeue(self, block: HostBlock) -> None:
        queue = self._queues[block.tenant]
        del queue[block.digest]
        if not queue:
            del self._queues[block.tenant]

    def _take_slot(self, *, is_ahead: bool) -> HostSlot | None:
        """Return a free slot, if need be that of the longest unused block of the tenant most over its share."""
        if not self._free:
            if not self._queues:
                return None
            pool = self._pool()
            tenant = max(self._queues, key=lambda tenant: len(self._queues[tenant]) / pool.account(tenant).weight)
            oldest = next(iter(self._queues[tenant].values()))
            if is_ahead and self._is_in_pool(oldest) and not self.is_on_disk(oldest.digest):
                # The host reaches as far back as it needs to: what is longest unused here is not even gone there.
                return None
            self.drop(oldest.digest)
        return self._free.pop()

    def _is_in_pool(self, block: HostBlock) -> bool:
        entry = block.entry
        if entry is None:
            return False
        blocks = self._pool().blocks
        return entry.block_id < len(blocks) and blocks[entry.block_id].entry is entry
