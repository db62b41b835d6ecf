import errno
import logging
import os
import random
import threading

import pytest

from chatd.errors import ConfigError
from chatd.kvcache import disk_tier as module
from chatd.kvcache.block_directory import DirectoryInUse
from chatd.kvcache.block_file import HEADER_BYTES, Origin
from chatd.kvcache.disk import DiskResult
from chatd.kvcache.disk_tier import DiskTier
from chatd.kvcache.io_health import MAX_FAILURES, PAUSE_S
from chatd.testing.engine import FakeClock

BLOCK_BYTES = 1000
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
NUM_SLOTS = 8
FOREVER = 30.0


class Disk:
    """A tier on a directory, with a buffer whose slots the test fills and reads."""

    def __init__(self, root, num_blocks=100, **options):
        self.root = root
        self.buffer = bytearray(NUM_SLOTS * BLOCK_BYTES)
        self.clock = FakeClock()
        options = {"clock": lambda: self.clock.now} | options
        self.tier = DiskTier(root, num_blocks * FILE_BYTES, BLOCK_BYTES, memoryview(self.buffer), **options)

    def fill(self, slot, content):
        self.buffer[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = content

    def slot(self, slot):
        return bytes(self.buffer[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def settle(self):
        assert self.tier.settle(FOREVER)
        return self.tier.poll()

    def put(self, *numbers):
        """Write blocks one after the other, each of its own content."""
        for number in numbers:
            self.fill(0, content(number))
            assert self.tier.write(digest(number), origin(number), 0)
            assert self.settle() == [DiskResult("written", digest(number), 0)]

    def get(self, number, slot=1):
        """Read a block, and return why not, or "" where its content is right."""
        assert self.tier.read(digest(number), origin(number), slot)
        (result,) = self.settle()
        assert result == DiskResult("failed" if result.why else "read", digest(number), slot, result.why)
        assert result.why or self.slot(slot) == content(number)
        return result.why

    def files(self):
        return sorted(path for path in (self.root / "blocks-1").rglob("*") if path.is_file())

    def path(self, number):
        name = digest(number).hex()
        return self.root / "blocks-1" / name[:2] / f"{name}.kv"


def digest(number):
    return random.Random(number).randbytes(32)


def content(number):
    return random.Random(~number).randbytes(BLOCK_BYTES)


def origin(number):
    return Origin(b"namespace", digest(number - 1), number.to_bytes(64, "little"))


@pytest.fixture
def make(tmp_path):
    made = []

    def make(num_blocks=100, root=tmp_path / "kv", **options):
        made.append(Disk(root, num_blocks, **options))
        return made[-1]

    yield make
    for disk in made:
        disk.tier.close()


class Gate:
    """Holds a thread at a call until the test lets it go on."""

    def __init__(self, monkeypatch, name):
        original = getattr(module, name)
        self.arrived, self.opened = threading.Event(), threading.Event()

        def gated(*arguments):
            self.arrived.set()
            assert self.opened.wait(FOREVER)
            return original(*arguments)

        monkeypatch.setattr(module, name, gated)

    def wait(self):
        assert self.arrived.wait(FOREVER)

    def open(self):
        self.opened.set()


def events(caplog):
    return [record.message for record in caplog.records if record.name == "chatd.disk_tier"]


# The bytes.


def test_blocks_come_back_as_they_went(make):
    disk = make()
    numbers = list(range(40))
    disk.put(*numbers)
    random.Random(0).shuffle(numbers)
    for number in numbers:
        assert disk.get(number, slot=number % NUM_SLOTS) == ""
    assert (disk.tier.num_stored, disk.tier.num_loaded, disk.tier.num_refused) == (40, 40, 0)


def test_a_block_moves_between_its_slot_and_its_file_and_no_other_byte_changes(make):
    disk = make()
    disk.put(1)
    for slot in range(NUM_SLOTS):
        disk.fill(slot, bytes([slot]) * BLOCK_BYTES)
    assert disk.get(1, slot=5) == ""
    for slot in {*range(NUM_SLOTS)} - {5}:
        assert disk.slot(slot) == bytes([slot]) * BLOCK_BYTES


def test_many_at_once_are_done_in_the_order_in_which_they_were_asked_for(make):
    disk = make()
    for number in range(NUM_SLOTS):
        disk.fill(number, content(number))
        assert disk.tier.write(digest(number), origin(number), number)
    assert disk.settle() == [DiskResult("written", digest(number), number) for number in range(NUM_SLOTS)]
    for number in range(NUM_SLOTS):
        assert disk.tier.read(digest(number), origin(number), NUM_SLOTS - 1 - number)
    assert disk.settle() == [DiskResult("read", digest(n), NUM_SLOTS - 1 - n) for n in range(NUM_SLOTS)]
    assert [disk.slot(NUM_SLOTS - 1 - number) for number in range(NUM_SLOTS)] == [content(n) for n in range(NUM_SLOTS)]


def test_a_slot_that_is_not_in_the_buffer_is_a_bug_of_the_caller(make):
    disk = make()
    for slot in (-1, NUM_SLOTS):
        with pytest.raises(AssertionError, match="not in the buffer"):
            disk.tier.write(digest(1), origin(1), slot)
        with pytest.raises(AssertionError, match="not in the buffer"):
            disk.tier.read(digest(1), origin(1), slot)


@pytest.mark.parametrize("buffer", [memoryview(bytes(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES + 1))])
def test_a_buffer_that_cannot_be_used_is_a_bug_of_the_caller(tmp_path, buffer):
    with pytest.raises(AssertionError, match="the buffer"):
        DiskTier(tmp_path / "kv", FILE_BYTES, BLOCK_BYTES, buffer)


def test_a_damaged_file_is_refused_and_removed(make, caplog):
    disk = make()
    disk.put(1, 2)
    data = bytearray(disk.path(1).read_bytes())
    data[HEADER_BYTES + 500] ^= 4
    disk.path(1).write_bytes(data)
    assert disk.get(1) == "checksum"
    assert disk.slot(1) == bytes(BLOCK_BYTES)
    assert disk.tier.num_refused == 1
    assert digest(1) not in disk.tier
    assert disk.files() == [disk.path(2)]
    assert disk.get(1) == "gone"
    assert disk.tier.num_used == 1
    assert events(caplog) == ["disk_tier.refused"]
    disk.put(1)
    assert disk.get(1) == ""


def test_a_cut_file_is_refused_and_removed(make):
    disk = make()
    disk.put(1)
    os.truncate(disk.path(1), FILE_BYTES - 1)
    assert disk.get(1) == "size"
    assert disk.files() == []


def test_the_file_of_another_content_under_this_name_is_refused(make):
    disk = make()
    disk.put(1, 2)
    disk.path(2).rename(disk.path(1))
    assert disk.get(1) == "other content"
    assert disk.slot(1) == bytes(BLOCK_BYTES)
    assert disk.tier.num_refused == 1
    assert disk.get(2) == "gone"
    assert disk.files() == []


def test_another_tenants_file_is_refused_however_it_came_here(make):
    disk = make()
    disk.put(1)
    theirs = origin(1)._replace(namespace=b"namespacf")
    assert disk.tier.read(digest(1), theirs, 3)
    assert disk.settle() == [DiskResult("failed", digest(1), 3, "other content")]
    assert disk.slot(3) == bytes(BLOCK_BYTES)


def test_a_file_that_somebody_removed_is_gone(make):
    disk = make()
    disk.put(1)
    disk.path(1).unlink()
    assert disk.get(1) == "gone"
    assert digest(1) not in disk.tier
    assert disk.tier.num_used == 0
    assert disk.tier.num_refused == 0


def test_what_was_never_written_is_gone(make):
    disk = make()
    assert digest(1) not in disk.tier
    assert disk.get(1) == "gone"


# Room and order.


def test_the_capacity_is_whole_files_of_header_and_payload(make, tmp_path):
    assert make(7).tier.num_blocks == 7
    assert make(root=tmp_path / "b", num_blocks=2.9).tier.num_blocks == 2
    with pytest.raises(ConfigError, match=r"hold no block, which takes 5096 \(engine.disk_space\)"):
        make(root=tmp_path / "c", num_blocks=0.99)


def test_the_files_never_take_more_than_the_capacity(make):
    disk = make(20)
    rng = random.Random(0)
    most = 0
    for _ in range(3000):
        number = rng.randrange(60)
        disk.fill(0, content(number))
        assert disk.tier.write(digest(number), origin(number), 0)
        disk.settle()
        if not rng.randrange(5):
            disk.tier.forget(digest(rng.randrange(60)))
        if not rng.randrange(50):
            disk.settle()
            sizes = [path.stat().st_size for path in disk.files()]
            assert sum(sizes) <= 20 * FILE_BYTES
            assert len(sizes) == disk.tier.num_used
            most = max(most, len(sizes))
    assert most == 20
    assert {path.stat().st_size for path in disk.files()} == {FILE_BYTES}


def test_what_was_not_used_for_longest_goes_first(make):
    disk = make(4)
    disk.put(1, 2, 3, 4)
    assert disk.get(1) == ""  # a read is a use
    assert disk.tier.write(digest(2), origin(2), 0)  # and so is a write of what is there
    assert disk.settle() == [DiskResult("written", digest(2), 0)]
    disk.put(5)
    assert [number for number in range(1, 6) if digest(number) in disk.tier] == [1, 2, 4, 5]
    disk.put(6, 7)
    assert [number for number in range(1, 8) if digest(number) in disk.tier] == [2, 5, 6, 7]
    assert sorted(disk.path(number) for number in (2, 5, 6, 7)) == disk.files()


def test_what_is_there_is_not_written_again(make):
    disk = make()
    disk.put(1)
    before = disk.path(1).stat().st_ino
    disk.put(1)
    assert disk.path(1).stat().st_ino == before
    assert disk.tier.num_stored == 1


def test_a_queue_has_an_end(make, monkeypatch):
    disk = make(max_queued=2)
    writing = Gate(monkeypatch, "write_block")
    assert disk.tier.write(digest(0), origin(0), 0)
    writing.wait()
    assert [disk.tier.write(digest(n), origin(n), n) for n in (1, 2, 3)] == [True, True, False]
    assert disk.tier.poll() == []
    writing.open()
    assert [result.slot for result in disk.settle()] == [0, 1, 2]
    assert digest(3) not in disk.tier
    reading = Gate(monkeypatch, "read_block")
    assert disk.tier.read(digest(0), origin(0), 0)
    reading.wait()
    assert [disk.tier.read(digest(n), origin(n), n) for n in (1, 2, 0)] == [True, True, False]
    reading.open()
    assert [result.slot for result in disk.settle()] == [0, 1, 2]


def test_nothing_waits_for_the_disk_but_the_threads(make, monkeypatch):
    disk = make()
    disk.put(1)
    gates = [Gate(monkeypatch, "write_block"), Gate(monkeypatch, "read_block")]
    assert disk.tier.write(digest(2), origin(2), 0)
    assert disk.tier.read(digest(1), origin(1), 1)
    for gate in gates:
        gate.wait()
    # Both threads are stuck in the system; none of these would return if it needed one of them.
    assert digest(1) in disk.tier
    assert digest(2) not in disk.tier
    assert disk.tier.num_used == 1
    assert disk.tier.poll() == []
    disk.tier.forget(digest(1))
    assert disk.tier.write(digest(3), origin(3), 2)
    assert not disk.tier.settle(0.0)
    for gate in gates:
        gate.open()
    disk.settle()


# Forgetting.


def test_forgetting_removes_the_file(make):
    disk = make()
    disk.put(1, 2)
    disk.tier.forget(digest(1))
    assert digest(1) not in disk.tier
    assert disk.settle() == []
    assert disk.files() == [disk.path(2)]
    disk.tier.forget(digest(1))
    disk.tier.forget(digest(9))
    assert disk.settle() == []
    assert disk.get(1) == "gone"
    assert disk.tier.num_used == 1


def test_what_is_forgotten_while_it_waits_is_not_written(make, monkeypatch):
    disk = make()
    gate = Gate(monkeypatch, "write_block")
    assert disk.tier.write(digest(1), origin(1), 0)
    gate.wait()
    assert disk.tier.write(digest(2), origin(2), 1)
    disk.tier.forget(digest(2))
    gate.open()
    assert disk.settle() == [DiskResult("written", digest(1), 0), DiskResult("failed", digest(2), 1, "forgotten")]
    assert disk.files() == [disk.path(1)]


def test_what_is_forgotten_while_it_is_written_is_removed(make, monkeypatch):
    disk = make()
    gate = Gate(monkeypatch, "write_block")
    assert disk.tier.write(digest(1), origin(1), 0)
    gate.wait()
    disk.tier.forget(digest(1))
    gate.open()
    assert disk.settle() == [DiskResult("failed", digest(1), 0, "forgotten")]
    assert digest(1) not in disk.tier
    assert disk.files() == []
    assert disk.tier.num_used == 0


def test_what_is_written_again_after_it_was_forgotten_is_there(make, monkeypatch):
    disk = make()
    gate = Gate(monkeypatch, "write_block")
    assert disk.tier.write(digest(1), origin(1), 0)
    gate.wait()
    disk.tier.forget(digest(1))
    disk.fill(2, content(1))
    assert disk.tier.write(digest(1), origin(1), 2)
    gate.open()
    assert disk.settle() == [DiskResult("failed", digest(1), 0, "forgotten"), DiskResult("written", digest(1), 2)]
    assert disk.get(1) == ""
    assert disk.tier.num_used == 1


def test_what_is_forgotten_while_it_is_read_is_not_given_out(make, monkeypatch):
    disk = make()
    disk.put(1, 2)
    gate = Gate(monkeypatch, "read_block")
    assert disk.tier.read(digest(1), origin(1), 1)
    assert disk.tier.read(digest(2), origin(2), 2)
    gate.wait()
    disk.tier.forget(digest(1))
    disk.tier.forget(digest(2))
    gate.open()
    assert disk.settle() == [
        DiskResult("failed", digest(1), 1, "forgotten"),
        DiskResult("failed", digest(2), 2, "forgotten"),
    ]
    assert disk.files() == []


def test_clearing_removes_every_file_and_what_is_queued(make, monkeypatch):
    disk = make()
    disk.put(1, 2)
    gate = Gate(monkeypatch, "write_block")
    assert disk.tier.write(digest(3), origin(3), 3)
    gate.wait()
    assert disk.tier.write(digest(4), origin(4), 4)
    disk.tier.clear()
    gate.open()
    assert [result.why for result in disk.settle()] == ["forgotten", "forgotten"]
    assert disk.files() == []
    assert disk.tier.num_used == 0


@pytest.mark.parametrize("forget", ["one", "all"])
def test_what_is_forgotten_before_the_directory_is_known_is_removed_when_it_is(make, monkeypatch, forget):
    disk = make()
    disk.put(1, 2)
    disk.tier.close()
    scan, opened = module.BlockDirectory.scan, threading.Event()
    monkeypatch.setattr(module, "_SCAN_S", 0.0)
    monkeypatch.setattr(
        module.BlockDirectory, "scan", lambda self, size: scan(self, size) if opened.wait(FOREVER) else []
    )
    again = make()
    if forget == "one":
        again.tier.forget(digest(1))
    else:
        again.tier.clear()
    opened.set()
    assert again.settle() == []
    assert again.files() == ([again.path(2)] if forget == "one" else [])
    assert digest(1) not in again.tier
    assert again.tier.num_used == (forget == "one")


# Starting again.


def test_a_restart_finds_what_was_written_and_in_which_order_it_was_used(make):
    disk = make(3)
    disk.put(1, 2, 3)
    for number in (1, 2, 3):
        os.utime(disk.path(number), (number, number))
    assert disk.get(1) == ""
    disk.tier.close()
    again = make(3)
    assert again.tier.num_used == 3
    assert again.get(2) == ""
    again.put(4)
    assert [number for number in range(1, 5) if digest(number) in again.tier] == [1, 2, 4]
    assert [again.get(number) for number in (1, 2, 4)] == ["", "", ""]


def test_a_restart_with_less_room_keeps_what_was_used_last(make):
    disk = make(5)
    disk.put(1, 2, 3, 4, 5)
    for number in range(1, 6):
        os.utime(disk.path(number), (number, number))
    disk.tier.close()
    again = make(2)
    again.settle()
    assert again.files() == sorted([again.path(4), again.path(5)])
    assert again.tier.num_used == 2


def test_a_restart_removes_blocks_of_another_size(make, tmp_path):
    disk = make()
    disk.put(1)
    disk.tier.close()
    other = DiskTier(tmp_path / "kv", 10**6, 500, memoryview(bytearray(500)))
    assert other.num_used == 0
    assert digest(1) not in other
    other.close()
    assert disk.files() == []


@pytest.mark.parametrize("at", ["half written", "written, without its name"])
def test_a_crash_while_writing_leaves_nothing_that_is_served(make, monkeypatch, at):
    disk = make()
    disk.put(1)
    disk.tier.close()
    whole = disk.path(1).read_bytes()
    (disk.root / "blocks-1" / "writing").write_bytes(whole[: 3000 if at == "half written" else None])
    again = make()
    assert again.tier.num_used == 1
    assert again.files() == [again.path(1)]
    assert again.get(1) == ""


def test_a_torn_file_under_its_name_is_found_out(make):
    disk = make()
    disk.put(1, 2)
    disk.tier.close()
    data = disk.path(1).read_bytes()
    disk.path(1).write_bytes(data[:2000])
    disk.path(2).write_bytes(data[:2000] + bytes(FILE_BYTES - 2000))  # as a file system may leave it after a power cut
    again = make()
    assert digest(1) not in again.tier
    assert again.get(2) == "other content"
    assert again.files() == []


def test_a_second_tier_on_a_directory_is_refused(make):
    disk = make()
    with pytest.raises(DirectoryInUse):
        make()
    disk.put(1)
    disk.tier.close()
    assert make().get(1) == ""


# The system fails.


class Failing:
    """Makes a function of `os` fail for paths and descriptors of the tier while it is on."""

    def __init__(self, monkeypatch, name, code):
        self.is_on = False
        original = getattr(os, name)

        def call(*arguments, **options):
            if self.is_on:
                raise OSError(code, os.strerror(code))
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("write", errno.ENOSPC),
        ("write", errno.EIO),
        ("write", errno.EDQUOT),
        ("open", errno.EACCES),
        ("open", errno.EMFILE),
        ("rename", errno.EROFS),
    ],
)
def test_a_write_that_the_system_refuses_fails_and_the_next_one_works(make, monkeypatch, caplog, function, code):
    disk = make()
    disk.put(1)
    system = Failing(monkeypatch, function, code)
    system.is_on = True
    for _ in range(3):
        assert disk.tier.write(digest(2), origin(2), 0)
        assert disk.settle() == [DiskResult("failed", digest(2), 0, os.strerror(code))]
    assert digest(2) not in disk.tier
    system.is_on = False
    assert events(caplog) == ["disk_tier.failed"]
    disk.put(2)
    assert [disk.get(number) for number in (1, 2)] == ["", ""]
    assert disk.files() == sorted([disk.path(1), disk.path(2)])


def test_a_disk_that_fills_in_the_middle_of_a_file_never_serves_that_file(make, monkeypatch):
    disk = make()
    original = os.write
    left = [3 * FILE_BYTES + 2500]

    def limited(descriptor, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = original(descriptor, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", limited)
    disk.put(1, 2, 3)
    assert disk.tier.write(digest(4), origin(4), 0)
    assert disk.settle() == [DiskResult("failed", digest(4), 0, os.strerror(errno.ENOSPC))]
    assert [disk.get(number) for number in (1, 2, 3, 4)] == ["", "", "", "gone"]
    disk.tier.close()
    assert [path for path in make().files() if path.name == "writing"] == []


def test_too_many_failures_pause_writes_but_not_reads(make, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    disk = make()
    disk.put(1)
    system = Failing(monkeypatch, "write", errno.ENOSPC)
    system.is_on = True
    for _ in range(MAX_FAILURES):
        assert disk.tier.write(digest(2), origin(2), 0)
        assert disk.settle()[0].verb == "failed"
    assert not disk.tier.write(digest(2), origin(2), 0)
    assert disk.get(1) == ""
    disk.clock.advance(PAUSE_S - 0.001)
    assert not disk.tier.write(digest(2), origin(2), 0)
    disk.clock.advance(0.001)
    for _ in range(MAX_FAILURES):
        assert disk.tier.write(digest(2), origin(2), 0)
        assert disk.settle()[0].verb == "failed"
    assert not disk.tier.write(digest(2), origin(2), 0)
    disk.clock.advance(PAUSE_S)
    system.is_on = False
    disk.put(2)
    assert events(caplog) == ["disk_tier.failed", "disk_tier.paused", "disk_tier.recovered"]


def test_reads_that_the_system_refuses_fail_and_too_many_pause_reads(make, monkeypatch, caplog):
    disk = make()
    numbers = list(range(MAX_FAILURES + 2))
    disk.put(*numbers)
    system = Failing(monkeypatch, "readv", errno.EIO)
    system.is_on = True
    for number in numbers[:MAX_FAILURES]:
        assert disk.get(number) == os.strerror(errno.EIO)
    assert events(caplog) == ["disk_tier.failed", "disk_tier.paused"]
    last = numbers[-1]
    assert digest(last) not in disk.tier
    assert disk.get(last) == "paused"
    system.is_on = False
    disk.put(100)  # writes go on
    disk.clock.advance(PAUSE_S)
    assert digest(last) in disk.tier
    assert disk.get(last) == ""


def test_a_directory_that_disappears_costs_its_blocks_and_nothing_else(make, caplog):
    disk = make()
    disk.put(1, 2)
    for path in disk.files():
        path.unlink()
    for path in sorted((disk.root / "blocks-1").rglob("*"), reverse=True):
        path.rmdir()
    (disk.root / "blocks-1").rmdir()
    assert disk.get(1) == "gone"
    assert disk.tier.write(digest(3), origin(3), 0)
    (result,) = disk.settle()
    assert result.verb == "failed"
    assert events(caplog) == ["disk_tier.failed"]
    (disk.root / "blocks-1").mkdir(mode=0o700)
    disk.put(3)
    assert disk.get(3) == ""


def test_files_that_cannot_be_removed_are_counted_until_they_are(make, monkeypatch, caplog):
    disk = make(3)
    disk.put(1, 2, 3)
    system = Failing(monkeypatch, "unlink", errno.EACCES)
    system.is_on = True
    disk.tier.forget(digest(2))
    disk.settle()
    assert digest(2) not in disk.tier
    assert disk.tier.num_used == len(disk.files()) == 3
    assert disk.tier.write(digest(4), origin(4), 0)
    assert disk.settle() == [DiskResult("failed", digest(4), 0, "no room")]
    assert len(disk.files()) == 3
    system.is_on = False
    disk.put(4)
    assert len(disk.files()) == disk.tier.num_used <= 3
    assert disk.get(2) == "gone"


def test_a_file_that_could_not_be_removed_may_be_written_again(make, monkeypatch):
    disk = make(3)
    disk.put(1)
    system = Failing(monkeypatch, "unlink", errno.EACCES)
    system.is_on = True
    disk.tier.forget(digest(1))
    disk.settle()
    disk.put(1)
    assert disk.tier.num_used == 1
    assert disk.get(1) == ""


def test_nothing_is_written_before_it_is_known_what_is_there(make, monkeypatch):
    full = make(2)
    full.put(1, 2)
    full.tier.close()
    system = Failing(monkeypatch, "scandir", errno.EIO)
    system.is_on = True
    disk = make(2)
    assert disk.tier.write(digest(3), origin(3), 0)
    assert disk.settle() == [DiskResult("failed", digest(3), 0, os.strerror(errno.EIO))]
    system.is_on = False
    disk.put(3)
    assert len(disk.files()) == disk.tier.num_used == 2


def test_a_bug_costs_one_result_and_no_thread(make, monkeypatch, caplog):
    disk = make()
    disk.put(1)
    for name in ("write_block", "read_block"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_: 1 // 0)
            assert disk.tier.write(digest(2), origin(2), 0)
            assert disk.tier.read(digest(1), origin(1), 1)
            verbs = {result.slot: (result.verb, result.why) for result in disk.settle()}
            assert verbs[0 if name == "write_block" else 1] == ("failed", "ZeroDivisionError")
            disk.tier.forget(digest(2))
            disk.settle()
    assert events(caplog) == ["disk_tier.bug"] * 2
    disk.put(3)
    assert disk.get(3) == ""


def test_an_origin_that_is_too_long_fails_alone(make, caplog):
    disk = make()
    disk.put(1)
    long = origin(2)._replace(namespace=bytes(5000))
    assert disk.tier.write(digest(2), long, 0)
    assert disk.settle()[0].why.startswith("5096 bytes say")
    assert disk.tier.read(digest(1), long, 0)
    assert disk.settle()[0].why.startswith("5096 bytes say")
    assert disk.get(1) == ""
    assert events(caplog) == []


# The end.


def test_closing_finishes_what_is_queued(make):
    disk = make()
    for number in range(NUM_SLOTS):
        disk.fill(number, content(number))
        assert disk.tier.write(digest(number), origin(number), number)
    disk.tier.forget(digest(0))
    disk.tier.close()
    assert [result.verb for result in disk.tier.poll()] in (
        ["failed"] + ["written"] * 7,
        ["written"] * 8,
    )
    assert disk.files() == sorted(disk.path(number) for number in range(1, NUM_SLOTS))


def test_closing_does_not_wait_for_a_disk_that_hangs(make, monkeypatch, tmp_path):
    disk = make()
    gate = Gate(monkeypatch, "write_block")
    for number in range(3):
        assert disk.tier.write(digest(number), origin(number), number)
    gate.wait()
    disk.tier.close(timeout_s=0.0)
    assert disk.tier.poll() == [DiskResult("failed", digest(n), n, "closed") for n in (1, 2)]
    with pytest.raises(DirectoryInUse):
        make()
    gate.open()
    disk.tier.close()
    assert make().tier.num_used == 1


def test_a_closed_tier_takes_nothing(make):
    disk = make()
    disk.put(1)
    disk.tier.close()
    disk.tier.close()
    assert digest(1) not in disk.tier
    assert not disk.tier.write(digest(2), origin(2), 0)
    assert disk.tier.read(digest(1), origin(1), 0)
    assert disk.tier.poll() == [DiskResult("failed", digest(1), 0, "paused")]


def test_the_threads_keep_no_process_alive_and_are_gone_after_the_end(make):
    disk = make()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("disk tier")]
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)
    disk.tier.close()
    assert not any(thread.is_alive() for thread in threads)
