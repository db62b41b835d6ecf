import errno
import logging
import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from chatd.engine import startup, transfer_trial
from chatd.engine.cgroup import MemoryRoom
from chatd.engine.host_buffer import HostBuffer
from chatd.engine.lower_tiers import allocate_host, open_lower_tiers
from chatd.engine.memory import RESERVE_BYTES, STAGING_SLOTS
from chatd.engine.options import EngineOptions
from chatd.engine.transfer_costs import TransferCosts
from chatd.engine.transfer_trial import DISK_TRIAL_S, measure_disk, measure_host
from chatd.errors import ConfigError, EnvironmentProblem
from chatd.kvcache.block_file import HEADER_BYTES, Origin
from chatd.testing.engine import FakeClock
from chatd_kernels.kv_cache import KVCacheLayout, allocate_kv_cache

MIB = 2**20
LAYOUT = KVCacheLayout(2, 3, 16, 32, torch.float16)
FILE_BYTES = HEADER_BYTES + LAYOUT.block_bytes
FOREVER = 30.0


def options_for(folder, **fields):
    values = {"model_id": "tiny", "model_path": str(folder), "model_digest": "abc", "kv_memory_bytes": 8 * MIB}
    return EngineOptions(**(values | fields))


@pytest.fixture
def opened(tmp_path):
    """Open what options ask for on a small cache; all of it is closed at the end."""
    made = []

    def open_tiers(num_slots=4, **fields):
        cache = allocate_kv_cache(6, 2, 3, 16, 32)
        host = allocate_host(num_slots, LAYOUT, is_pinned=False)
        options = options_for(tmp_path, **({"disk_directory": str(tmp_path / "kv")} | fields))
        made.append(open_lower_tiers(options, cache, host))
        return made[-1]

    yield open_tiers
    for tiers in made:
        if tiers.disk is not None:
            tiers.disk.close()


# The host's buffer.


def test_a_slot_is_a_block_and_its_bytes_are_those_of_the_memory():
    host = HostBuffer(5, LAYOUT)
    assert host.num_slots == 5
    assert host.slots.shape == (5, 2, 2, 3, 16 * 32)
    assert host.slots.dtype == torch.float16
    assert len(host.memory) == 5 * LAYOUT.block_bytes
    host.slots[3] = 1.0
    size = LAYOUT.block_bytes
    assert host.memory[3 * size : 4 * size] == torch.ones(size // 2, dtype=torch.float16).numpy().tobytes()
    assert not any(host.memory[: 3 * size])
    host.memory[size : 2 * size] = host.memory[3 * size : 4 * size]
    assert torch.equal(host.slots[1], host.slots[3])


def test_a_buffer_outlives_the_object_that_made_it():
    memory = HostBuffer(2, LAYOUT).memory
    memory[:4] = b"kept"
    assert bytes(memory[:4]) == b"kept"


def test_no_slots_are_no_buffer():
    assert allocate_host(0, LAYOUT, is_pinned=False) is None


def test_memory_that_the_system_refuses_is_a_problem_of_the_machine():
    with pytest.raises(EnvironmentProblem, match="for KV outside the pool could not be allocated") as refused:
        allocate_host(2**60 // LAYOUT.block_bytes, LAYOUT, is_pinned=False)
    assert (refused.value.error_code, refused.value.param) == ("no_room_for_host", "engine.host_memory")


# What start-up opens.


def test_nothing_is_below_the_pool_unless_it_is_asked_for(opened):
    tiers = opened(num_slots=0)
    assert (tiers.host, tiers.disk, tiers.key, tiers.notes) == (None, None, b"", [])
    assert tiers.costs == TransferCosts()


def test_a_host_alone_has_a_key_of_this_process(opened, tmp_path):
    first, second = (opened(host_memory_bytes=MIB) for _ in range(2))
    assert first.disk is None
    assert len(first.key) == 32
    assert first.key != second.key
    assert first.notes == [f"the host keeps 4 blocks more = 64 tokens ({4 * LAYOUT.block_bytes / MIB:,.0f} MiB)"]
    assert not (tmp_path / "kv").exists()


def test_a_disk_keeps_its_key_and_its_blocks_over_a_restart(opened, tmp_path):
    tiers = opened(disk_space_bytes=7 * FILE_BYTES)
    assert tiers.disk.num_blocks == 7
    assert tiers.notes[0].startswith(f"{tmp_path / 'kv'} keeps 7 blocks more = 112 tokens")
    tiers.host.slots[2] = 3.0
    assert tiers.disk.write(bytes(32), Origin(b"n", b"p", b"t"), 2)
    tiers.disk.close()
    again = opened(disk_space_bytes=7 * FILE_BYTES)
    assert again.key == tiers.key
    assert again.notes[0].endswith(", 1 from before")
    assert again.disk.read(bytes(32), Origin(b"n", b"p", b"t"), 1)
    assert again.disk.settle(FOREVER)
    assert [result.verb for result in again.disk.poll()] == ["read"]
    assert torch.equal(again.host.slots[1], tiers.host.slots[2])


def test_a_disk_with_less_room_than_it_may_take_is_said(opened, monkeypatch):
    for free, num_notes in ((9 * FILE_BYTES, 1), (9 * FILE_BYTES - 1, 2)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _root, free=free: SimpleNamespace(free=free))
        tiers = opened(disk_space_bytes=9 * FILE_BYTES)
        tiers.disk.close()
        assert len(tiers.notes) == num_notes
    assert tiers.notes[1] == "of the 0 MiB that these blocks may still take only 0 MiB are free"


def test_a_disk_that_another_daemon_has_is_done_without(opened, tmp_path, caplog):
    first = opened(disk_space_bytes=7 * FILE_BYTES)
    second = opened(disk_space_bytes=7 * FILE_BYTES, host_memory_bytes=MIB)
    assert second.disk is None
    assert second.key != first.key
    assert second.host is not None
    off = f"the disk tier is off: {tmp_path / 'kv'} is the disk tier of another daemon that runs"
    assert second.notes[1:] == [off]
    assert [record.message for record in caplog.records] == ["disk_tier.off"]


def test_a_directory_that_cannot_be_used_stops_the_start(opened, tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="you alone can write to"):
        opened(disk_space_bytes=7 * FILE_BYTES)


def test_a_key_that_cannot_be_read_stops_the_start_and_lets_go_of_the_directory(opened, tmp_path):
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match="the key in"):
        opened(disk_space_bytes=7 * FILE_BYTES)
    (tmp_path / "kv" / "key").unlink()
    assert opened(disk_space_bytes=7 * FILE_BYTES).disk is not None


def test_space_that_holds_no_block_is_a_wrong_setting(opened):
    with pytest.raises(ConfigError, match=r"engine\.disk_space"):
        opened(disk_space_bytes=FILE_BYTES - 1)


# What moving costs.


def test_what_the_pool_holds_is_the_same_after_measuring():
    cache = allocate_kv_cache(6, 2, 3, 16, 32)
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    for num_slots in (1, 4, 20):
        costs = measure_host(cache, HostBuffer(num_slots, LAYOUT))
        assert all(cost >= 0.0 for cost in costs)
        assert torch.equal(cache.data, before)


def test_the_fixed_part_and_that_of_a_block_are_told_apart(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(transfer_trial, "perf_counter", lambda: clock.now)
    for name, per_block_s in (("store_blocks", 2.0), ("load_blocks", 3.0)):
        monkeypatch.setattr(
            transfer_trial, name, lambda _c, _h, moves, s=per_block_s: clock.advance(7.0 + s * len(moves))
        )
    cache = allocate_kv_cache(20, 2, 3, 16, 32)
    assert measure_host(cache, HostBuffer(20, LAYOUT)) == (7.0, 2.0, 3.0)
    assert measure_host(cache, HostBuffer(1, LAYOUT)) == (0.0, 9.0, 10.0)


def test_the_trial_of_the_disk_tells_what_it_saw_and_leaves_no_file(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(transfer_trial, "perf_counter", lambda: clock.now)
    original_write, original_read = transfer_trial.write_block, transfer_trial.read_block

    def write(path, origin, payload):
        original_write(path, origin, payload)
        clock.advance(0.5 if len(payload) > 1 else 0.25)

    def read(path, origin, payload):
        original_read(path, origin, payload)
        clock.advance(0.75 if len(payload) > 1 else 0.125)

    monkeypatch.setattr(transfer_trial, "write_block", write)
    monkeypatch.setattr(transfer_trial, "read_block", read)
    monkeypatch.setattr(transfer_trial, "DISK_TRIAL_S", FOREVER)
    assert measure_disk(tmp_path / "trial", 1000) == (0.125, 0.5, 0.625)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_hangs_is_taken_for_slow_and_not_waited_for(tmp_path, monkeypatch):
    release = threading.Event()
    original = transfer_trial.write_block

    def hang(*arguments):
        assert release.wait(FOREVER)
        original(*arguments)

    monkeypatch.setattr(transfer_trial, "write_block", hang)
    before = set(threading.enumerate())
    assert measure_disk(tmp_path / "trial", 1000) == (DISK_TRIAL_S, DISK_TRIAL_S, DISK_TRIAL_S / 2)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    release.set()
    thread.join(FOREVER)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_taken_for_slow(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    assert measure_disk(tmp_path / "trial", 1000) == (DISK_TRIAL_S, DISK_TRIAL_S, DISK_TRIAL_S / 2)
    assert [record.message for record in caplog.records] == ["disk_tier.failed"]


# The whole start.


@pytest.fixture
def start(tiny_model, tmp_path):
    started = []

    def start(room=None, **fields):
        options = options_for(tiny_model, **({"disk_directory": str(tmp_path / "kv")} | fields))
        rooms = () if room is None else (lambda: room,)
        started.append(startup.load_model(options, lambda *_: None, *rooms))
        return started[-1]

    yield start
    for model in started:
        if model.tiers.disk is not None:
            model.tiers.disk.close()


def test_the_host_takes_its_memory_before_the_pool_is_sized(start):
    room = MemoryRoom(10**10, RESERVE_BYTES + 3 * MIB)
    model = start(room, kv_memory_bytes=None, host_memory_bytes=MIB)
    block_bytes = model.decoder.kv_cache.layout.block_bytes
    num_slots = MIB // block_bytes
    assert model.tiers.host.num_slots == num_slots
    assert model.pool.num_blocks == (3 * MIB - num_slots * block_bytes) // block_bytes
    assert model.tiers.notes[0] in model.notes


def test_a_host_that_does_not_fit_is_refused(start):
    with pytest.raises(EnvironmentProblem, match=r"for KV outside the pool do not fit.* \(host_memory\)") as refused:
        start(MemoryRoom(10**9, RESERVE_BYTES + 2 * MIB), host_memory_bytes=3 * MIB)
    assert refused.value.error_code == "no_room_for_host"


def test_a_host_that_holds_no_block_is_a_wrong_setting(start):
    with pytest.raises(ConfigError, match=r"hold no block, which takes \d+ \(host_memory\)"):
        start(host_memory_bytes=1000)


def test_a_disk_alone_gets_a_small_buffer_for_both_directions(start):
    model = start(disk_space_bytes=MIB)
    assert model.tiers.host.num_slots == STAGING_SLOTS
    assert not any("the host keeps" in note for note in model.notes)
    assert any("kv keeps" in note for note in model.notes)


def test_what_start_measured_reaches_the_core(tiny_model, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    options = options_for(tiny_model, host_memory_bytes=MIB)
    core, ready = startup.build_engine(options, FakeClock(), lambda *_: None)
    costs = core.config.transfer_costs
    assert 0.0 < costs.host_out_s_per_block < 1.0
    assert 0.0 < costs.host_in_s_per_block < 1.0
    assert costs.disk_in_s_per_block == 0.0
    assert any(note.startswith("the host keeps") for note in ready.notes)
