"""The index of what is below the pool: what can be found, what is given up, and in which order."""

from collections import deque

import pytest

from chatd.kvcache.block import HostSlot
from chatd.kvcache.block_file import Origin
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.disk import DiskResult
from chatd.kvcache.prefix_index import PrefixIndex
from chatd.kvcache.tiers import MAX_WRITES, Tiers
from chatd.testing.engine import NAMESPACE

ORIGIN = Origin(b"namespace", b"parent", b"tokens")


class ScriptedDisk:
    """Takes everything, and says what it is told to."""

    num_blocks, num_stored, num_loaded, num_refused = 100, 0, 0, 0

    def __init__(self, *held):
        self.held = set(held)
        self.takes = True
        self.writes, self.reads, self.forgotten, self.results = [], [], [], deque()

    num_used = property(lambda self: len(self.held))

    def __contains__(self, digest):
        return digest in self.held

    def write(self, digest, origin, slot):
        if self.takes:
            self.writes.append((digest, slot))
        return self.takes

    def read(self, digest, origin, slot):
        if self.takes:
            self.reads.append((digest, slot))
        return self.takes

    def forget(self, digest):
        self.forgotten.append(digest)
        self.held.discard(digest)

    def clear(self):
        self.forgotten += sorted(self.held)
        self.held.clear()

    def poll(self):
        results = list(self.results)
        self.results.clear()
        return results


@pytest.fixture
def pool():
    return BlockPool(16, PrefixIndex())


def make(pool, num_slots=3, disk=None):
    return Tiers(num_slots, lambda: pool, disk)


def keep(tiers, digest, tenant="acme", lease=1, entry=None, *, is_ahead=False):
    block = tiers.store(digest, ORIGIN, tenant, lease, entry, is_ahead=is_ahead)
    if block is not None:
        tiers.settle(block)
    check(tiers)
    return block


def check(tiers):
    for _ in tiers.check():
        pass


def test_a_stored_block_is_found_when_it_is_settled_and_not_before(pool):
    tiers = make(pool)
    block = tiers.store(b"a", ORIGIN, "acme", 1, None, is_ahead=False)
    assert tiers.get(b"a") is None
    assert tiers.is_below(b"a")
    tiers.settle(block)
    assert tiers.get(b"a") is block


def test_a_store_that_is_cancelled_leaves_nothing(pool):
    tiers = make(pool)
    tiers.cancel(tiers.store(b"a", ORIGIN, "acme", 1, None, is_ahead=False))
    assert tiers.num_used == 0
    assert tiers.is_empty
    check(tiers)


def test_the_longest_unused_goes_and_its_leases_are_told(pool):
    tiers = make(pool)
    for number, digest in enumerate((b"a", b"b", b"c")):
        keep(tiers, digest, lease=number)
    tiers.touch(b"a", 9)
    keep(tiers, b"d")
    assert tiers.get(b"b") is None
    assert tiers.get(b"a").lease_ids == (0, 9)
    assert list(tiers.changed) == [1]


def test_a_pinned_slot_stays_and_comes_back_as_the_one_used_last(pool):
    tiers = make(pool, 2)
    keep(tiers, b"a")
    keep(tiers, b"b")
    block = tiers.get(b"a")
    tiers.pin(block)
    tiers.pin(block)
    tiers.settle(tiers.store(b"c", ORIGIN, "acme", 1, None, is_ahead=False))
    assert tiers.get(b"b") is None
    tiers.unpin(block)
    assert tiers.store(b"x", ORIGIN, "acme", 1, None, is_ahead=False) is not None
    assert tiers.store(b"y", ORIGIN, "acme", 1, None, is_ahead=False) is None
    tiers.unpin(block)
    assert tiers.get(b"a") is block


def test_the_tenant_with_most_for_its_weight_gives_up_a_slot(pool):
    pool.account("blue", 4.0)
    tiers = make(pool, 5)
    keep(tiers, b"a", "acme")
    keep(tiers, b"b", "acme")
    for digest in (b"p", b"q", b"r"):
        keep(tiers, digest, "blue")
    keep(tiers, b"s", "blue")
    assert tiers.get(b"a") is None
    keep(tiers, b"t", "blue")
    assert tiers.get(b"p") is not None
    assert tiers.get(b"b") is None


def test_nothing_is_copied_ahead_over_what_is_still_in_the_pool(pool):
    tiers = make(pool, 1)
    namespace = pool.index.namespace_id(NAMESPACE)
    (block_id,) = pool.allocate(pool.account("acme"), 1)
    entry = pool.register(block_id, namespace, None, b"1234")
    keep(tiers, b"a", entry=entry)
    assert keep(tiers, b"b", is_ahead=True) is None
    pool.unregister(block_id)
    assert keep(tiers, b"b", is_ahead=True) is not None
    assert tiers.get(b"a") is None


def test_what_is_in_the_host_only_is_written_out_in_order_and_stays_until_it_is(pool):
    disk = ScriptedDisk()
    tiers = make(pool, 2, disk)
    keep(tiers, b"a")
    keep(tiers, b"b")
    tiers.write_out()
    assert [digest for digest, _ in disk.writes] == [b"a", b"b"]
    assert tiers.store(b"c", ORIGIN, "acme", 1, None, is_ahead=False) is None
    disk.results.append(DiskResult("written", *disk.writes[0]))
    tiers.poll(0.0)
    check(tiers)
    assert tiers.store(b"c", ORIGIN, "acme", 1, None, is_ahead=False) is not None
    assert tiers.get(b"a") is None


def test_writes_are_bounded_and_one_that_is_not_taken_is_asked_for_again(pool):
    disk = ScriptedDisk()
    tiers = make(pool, 2 * MAX_WRITES, disk)
    for number in range(2 * MAX_WRITES):
        keep(tiers, bytes([number]))
    disk.takes = False
    tiers.write_out()
    assert not tiers.is_moving
    disk.takes = True
    tiers.write_out()
    assert [digest for digest, _ in disk.writes] == [bytes([number]) for number in range(MAX_WRITES)]
    assert tiers.is_moving
    check(tiers)


def test_a_write_that_fails_is_not_tried_again(pool):
    disk = ScriptedDisk()
    tiers = make(pool, 2, disk)
    keep(tiers, b"a")
    tiers.write_out()
    disk.results.append(DiskResult("failed", *disk.writes[0], "No space left on device"))
    tiers.poll(0.0)
    tiers.write_out()
    assert len(disk.writes) == 1
    assert tiers.get(b"a") is not None
    assert not tiers.is_moving
    check(tiers)


def test_a_fetched_block_is_found_when_the_disk_says_that_it_is_whole(pool):
    disk = ScriptedDisk(b"a")
    tiers = make(pool, 2, disk)
    assert tiers.fetch(b"a", ORIGIN, "acme", 1)
    assert tiers.is_coming(b"a")
    assert tiers.get(b"a") is None
    check(tiers)
    disk.results.append(DiskResult("read", *disk.reads[0]))
    tiers.poll(0.0)
    assert tiers.get(b"a").slot == disk.reads[0][1]
    assert not tiers.is_coming(b"a")
    check(tiers)


@pytest.mark.parametrize("why", ["checksum", "other content", "gone", "Input/output error"])
def test_a_block_that_cannot_be_read_is_forgotten(pool, why):
    disk = ScriptedDisk(b"a")
    tiers = make(pool, 1, disk)
    tiers.fetch(b"a", ORIGIN, "acme", 5)
    disk.results.append(DiskResult("failed", b"a", HostSlot(0), why))
    tiers.poll(0.0)
    assert disk.forgotten == [b"a"]
    assert not tiers.is_below(b"a")
    assert list(tiers.changed) == [5]
    assert tiers.num_used == 0
    check(tiers)


def test_what_is_forgotten_while_the_disk_is_on_it_frees_its_slot_only_then(pool):
    disk = ScriptedDisk(b"a")
    tiers = make(pool, 2, disk)
    tiers.fetch(b"a", ORIGIN, "acme", 1)
    keep(tiers, b"b")
    tiers.write_out()
    tiers.forget(b"a")
    tiers.forget(b"b")
    check(tiers)
    assert tiers.num_used == 2
    assert disk.forgotten == [b"a", b"b"]
    disk.results.append(DiskResult("read", *disk.reads[0]))
    disk.results.append(DiskResult("written", *disk.writes[0]))
    tiers.poll(0.0)
    check(tiers)
    assert tiers.num_used == 0
    assert tiers.get(b"a") is None


def test_a_clear_leaves_nothing_in_the_host_or_on_the_disk(pool):
    disk = ScriptedDisk(b"x", b"y")
    tiers = make(pool, disk=disk)
    keep(tiers, b"a")
    tiers.clear()
    check(tiers)
    assert (tiers.num_used, disk.held) == (0, set())
    assert tiers.is_empty


@pytest.mark.parametrize("verb", ["settle", "cancel"])
def test_what_is_forgotten_while_it_is_stored_is_never_found(pool, verb):
    tiers = make(pool, disk=ScriptedDisk())
    block = tiers.store(b"a", ORIGIN, "acme", 1, None, is_ahead=False)
    tiers.forget(b"a")
    assert not tiers.is_below(b"a")
    getattr(tiers, verb)(block)
    check(tiers)
    assert (tiers.get(b"a"), tiers.num_used, tiers.num_stored) == (None, 0, 0)


def test_a_tenants_blocks_go_wherever_they_are_and_those_that_are_moved_as_soon_as_that_ends(pool):
    disk = ScriptedDisk(b"on disk", b"read", b"blue's")
    tiers = make(pool, num_slots=6, disk=disk)
    keep(tiers, b"theirs", "blue")
    keep(tiers, b"ready")
    keep(tiers, b"both")
    disk.held.add(b"both")
    pinned = keep(tiers, b"pinned")
    tiers.pin(pinned)
    storing = tiers.store(b"stored", ORIGIN, "acme", 1, None, is_ahead=False)
    assert tiers.fetch(b"read", ORIGIN, "acme", 1)
    assert tiers.forget_tenant("acme", [b"on disk", b"both"]) == (5, 3)
    assert disk.held == {b"blue's"}
    assert [tiers.is_below(digest) for digest in (b"ready", b"both", b"pinned", b"stored", b"read")] == [False] * 5
    assert tiers.num_used == 4
    tiers.unpin(pinned)
    tiers.settle(storing)
    disk.results.append(DiskResult("read", b"read", disk.reads[0][1]))
    tiers.poll(1.0)
    check(tiers)
    assert tiers.num_used == 1
    assert tiers.get(b"theirs") is not None
