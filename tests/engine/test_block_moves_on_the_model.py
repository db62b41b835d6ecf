"""Blocks that went to the host, or to the disk, and came back: the same logits, and really those bytes."""

from types import SimpleNamespace

import pytest
import torch

from chatd.engine import model_runner
from chatd.engine.host_buffer import HostBuffer
from chatd.engine.model_runner import ModelRunner
from chatd.engine.plan import BlockCopy, BlockMove, Chunk, Plan, SampleSpec
from chatd.engine.sampler import Sampled
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.block_file import HEADER_BYTES, Origin
from chatd.kvcache.disk import DiskResult
from chatd.kvcache.disk_tier import DiskTier
from chatd.testing.engine import FakeClock
from chatd_kernels.kv_cache import allocate_kv_cache

GREEDY = SampleSpec(SamplingParams(max_tokens=8), 0)
SIZE = 16
NUM_SLOTS = 8
NUM_TOKENS = 3 * SIZE + 5
FOREVER = 30.0
DIGEST = bytes(range(32))
ORIGIN = Origin(b"namespace", bytes(32), bytes(64))


class Moved:
    """A prompt's KV in blocks 1 to 4 of a fresh pool, and what the token after it makes of it."""

    def __init__(self, model, monkeypatch):
        decoder = model.decoder
        self.cache = decoder.kv_cache
        self.cache.data.zero_()
        self.host = HostBuffer(NUM_SLOTS, self.cache.layout)
        self.runner = ModelRunner(decoder, self.host)
        self.logits = []
        original = type(decoder).forward

        def kept(decoder, batch):
            logits = original(decoder, batch)
            self.logits.append(logits.clone())
            return logits

        monkeypatch.setattr(type(decoder), "forward", kept)
        vocab = decoder.config.vocab_size
        self.prompt = [(7 * i * i + 3 * i + 11) % vocab for i in range(NUM_TOKENS)]
        self.run([Chunk(1, 0, self.prompt, [1, 2, 3, 4], None)])
        self.expected = self.next_logits([1, 2, 3, 4])

    def run(self, chunks=(), copies=(), stores=(), loads=()):
        moves = [[BlockMove(*move) for move in moves] for moves in (stores, loads)]
        return self.runner.execute(Plan(0, chunks, [BlockCopy(*pair) for pair in copies], SIZE, *moves))

    def next_logits(self, blocks, **moves):
        self.run([Chunk(1, NUM_TOKENS, [5], blocks, GREEDY)], **moves)
        return self.logits[-1]

    def lose(self, *blocks):
        self.cache.data[list(blocks)] = float("nan")

    def slot_bytes(self, slot):
        size = self.cache.layout.block_bytes
        return self.host.memory[slot * size : (slot + 1) * size]


@pytest.fixture
def tiny(load_tiny, monkeypatch):
    moved = Moved(load_tiny("fp16"), monkeypatch)
    yield moved
    moved.cache.data.zero_()


@pytest.fixture
def smollm2(load_smollm2, monkeypatch):
    moved = Moved(load_smollm2("fp16"), monkeypatch)
    yield moved
    moved.cache.data.zero_()


def check_restored_blocks_give_the_same_logits(moved):
    moved.run(stores=[(1, 6), (2, 0), (3, 3)])
    moved.lose(1, 2, 3)
    logits = moved.next_logits([9, 7, 8, 4], loads=[(9, 6), (7, 0), (8, 3)])
    assert torch.equal(logits, moved.expected)


def check_a_flipped_byte_changes_the_logits(moved):
    moved.run(stores=[(1, 0), (2, 1), (3, 2)])
    moved.lose(1, 2, 3)
    loads = [(7, 0), (8, 1), (9, 2)]
    for slot in range(3):
        # The exponent of a number in the middle of the block.
        at = moved.cache.layout.block_bytes // 2 + 1
        moved.slot_bytes(slot)[at] ^= 0x10
        logits = moved.next_logits([7, 8, 9, 4], loads=loads)
        assert not torch.equal(logits, moved.expected)
        moved.slot_bytes(slot)[at] ^= 0x10
        assert torch.equal(moved.next_logits([7, 8, 9, 4], loads=loads), moved.expected)


def check_the_disk_gives_the_same_logits_and_refuses_a_flipped_byte(moved, folder):
    block_bytes = moved.cache.layout.block_bytes
    disk = DiskTier(folder, 4 * (block_bytes + HEADER_BYTES), block_bytes, moved.host.memory)
    try:
        moved.run(stores=[(2, 5)])
        assert disk.write(DIGEST, ORIGIN, 5)
        assert disk.settle(FOREVER)
        moved.lose(2)
        moved.slot_bytes(5)[:] = bytes(block_bytes)
        assert disk.read(DIGEST, ORIGIN, 2)
        assert disk.settle(FOREVER)
        assert [result.verb for result in disk.poll()] == ["written", "read"]
        assert torch.equal(moved.next_logits([1, 8, 3, 4], loads=[(8, 2)]), moved.expected)

        (path,) = folder.rglob("*.kv")
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES + block_bytes // 2] ^= 1
        path.write_bytes(data)
        assert disk.read(DIGEST, ORIGIN, 3)
        assert disk.settle(FOREVER)
        assert disk.poll() == [DiskResult("failed", DIGEST, 3, "checksum")]
        assert not any(moved.slot_bytes(3))
    finally:
        disk.close()


def test_restored_blocks_give_the_same_logits_bit_for_bit(tiny):
    check_restored_blocks_give_the_same_logits(tiny)


def test_one_flipped_byte_in_the_host_changes_the_logits(tiny):
    check_a_flipped_byte_changes_the_logits(tiny)


def test_blocks_from_the_disk_give_the_same_logits_and_a_flipped_byte_is_refused(tiny, tmp_path):
    check_the_disk_gives_the_same_logits_and_refuses_a_flipped_byte(tiny, tmp_path / "kv")


@pytest.mark.model
def test_restored_blocks_of_the_small_model_are_what_its_logits_are_made_of(smollm2, tmp_path):
    check_restored_blocks_give_the_same_logits(smollm2)
    smollm2.run([Chunk(1, 0, smollm2.prompt, [1, 2, 3, 4], None)])
    check_a_flipped_byte_changes_the_logits(smollm2)
    smollm2.run([Chunk(1, 0, smollm2.prompt, [1, 2, 3, 4], None)])
    check_the_disk_gives_the_same_logits_and_refuses_a_flipped_byte(smollm2, tmp_path / "kv")


def test_stores_come_before_copies_and_loads_and_these_before_the_forward():
    cache = allocate_kv_cache(6, 2, 3, 16, 32)
    cache.data.copy_(torch.randn(cache.data.shape))
    first, second, third = (cache.data[block].clone() for block in (1, 2, 3))
    host = HostBuffer(2, cache.layout)
    host.slots[1] = second
    decoder = SimpleNamespace(kv_cache=cache, config=SimpleNamespace(num_heads=3), device=torch.device("cpu"))
    # One plan: block 1 is saved, then overwritten by a copy of block 3, and block 3 is filled from the host.
    plan = Plan(0, (), [BlockCopy(3, 1)], SIZE, [BlockMove(1, 0)], [BlockMove(3, 1)])
    ModelRunner(decoder, host).execute(plan)
    assert torch.equal(host.slots[0], first)
    assert torch.equal(cache.data[1], third)
    assert torch.equal(cache.data[3], second)


def test_a_plan_of_moves_alone_draws_nothing(tiny):
    output = tiny.run(stores=[(1, 0)], loads=[(6, 0)])
    assert (output.sampled, output.failed) == ({}, {})
    assert torch.equal(tiny.cache.data[6], tiny.cache.data[1])


def test_moves_are_timed_apart_from_the_model(tiny, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(model_runner, "perf_counter", lambda: clock.now)
    for name, seconds in (("store_blocks", 1.0), ("copy_blocks", 10.0), ("load_blocks", 100.0)):
        monkeypatch.setattr(model_runner, name, lambda *_, seconds=seconds: clock.advance(seconds))
    monkeypatch.setattr(type(tiny.runner), "_compute", lambda *_: clock.advance(1000.0) or Sampled())
    chunk = Chunk(1, NUM_TOKENS, [5], [1, 2, 3, 4], GREEDY)
    both = tiny.run([chunk], copies=[(3, 6)], stores=[(1, 0)], loads=[(5, 0)])
    assert (both.move_s, both.model_s) == (101.0, 1010.0)
    neither = tiny.run([chunk])
    assert (neither.move_s, neither.model_s) == (0.0, 1000.0)


def test_moves_without_a_buffer_are_a_broken_plan(load_tiny):
    runner = ModelRunner(load_tiny("fp16").decoder)
    with pytest.raises(AssertionError, match="no buffer on the host"):
        runner.execute(Plan(0, (), (), SIZE, [BlockMove(1, 0)]))
