"""I16 and I20 through every tier, on real forwards: a session that comes back gives the bits of one that never left."""

import contextlib

import numpy as np
import pytest
import torch

from chatd.engine.messages import Tier, WatchPool
from chatd.engine.transfer_costs import TransferCosts
from chatd.kvcache.disk_tier import DiskTier

CHEAP = TransferCosts(1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6)
NUM_BLOCKS = 24
RNG = np.random.default_rng(5)
FIRST, SECOND = RNG.integers(3, 512, 150).tolist(), RNG.integers(3, 512, 9).tolist()
OTHERS = [RNG.integers(3, 512, 300).tolist() for _ in range(4)]
ANSWER = {"temperature": 0.9, "seed": 3}


@pytest.fixture
def below(real_engine, tmp_path):
    """Make engines whose sessions can be in any tier."""
    with contextlib.ExitStack() as stack:

        def disk(host, layout):
            tier = DiskTier(tmp_path / "kv", 2**26, layout.block_bytes, host.memory)
            stack.callback(tier.close)
            return tier

        def make(model, tier):
            config = {"num_blocks": NUM_BLOCKS, "max_model_len": 384, "transfer_costs": CHEAP, "digest_key": b"k"}
            slots = {Tier.DEVICE: 0, Tier.TOKENS: 0, Tier.HOST: 200, Tier.DISK: 20}[tier]
            return real_engine(model, config | {"host_slots": slots}, disk=disk if tier is Tier.DISK else None)

        yield make


def talk(engine):
    """Run the first turn of session 1."""
    engine.submit(1, FIRST, lease=1, **ANSWER)
    engine.run().settle()
    return engine


def leave(engine, tier):
    """Let other sessions take the pool until session 1 is where it should be."""
    if tier is not Tier.DEVICE:
        for number, prompt in enumerate(OTHERS, start=2):
            engine.submit(number, prompt)
            engine.run().settle()
        assert engine.core.leases.get(1).table.num_computed_tokens == 0
    engine.send(WatchPool(1.0, with_leases=True))
    assert {row.lease: row.tier for row in engine.core.pool_frame(0.0).leases}[1] is tier
    return engine


def come_back(engine):
    """Run the second turn of session 1, and return what it was answered and the tokens that were found."""
    engine.submit(9, SECOND, lease=1, base_len=len(engine.core.leases.get(1).token_ids), **ANSWER)
    engine.run()
    return engine.ids[9], engine.logprobs[9], engine.done[9].num_cached_tokens


def fresh_answer(real_engine, model, history):
    engine = real_engine(model)
    engine.submit(9, history, **ANSWER)
    engine.run()
    return engine.ids[9], engine.logprobs[9]


@pytest.mark.parametrize("quantization", ["fp16", "int8", "fp32"])
def test_a_session_answers_alike_from_every_tier(load_tiny, real_engine, below, quantization):
    model = load_tiny(quantization)
    found = {}
    for tier in Tier:
        engine = leave(talk(below(model, tier)), tier)
        ids, logprobs, found[tier] = come_back(engine)
        assert (ids, logprobs) == fresh_answer(real_engine, model, [*FIRST, *engine.ids[1], *SECOND])
    full = (len(FIRST) + 11) // 16 * 16
    assert found == {Tier.DEVICE: len(FIRST) + 11, Tier.HOST: full, Tier.DISK: full, Tier.TOKENS: 0}


def test_a_session_comes_back_from_the_disk_of_an_engine_that_is_gone(load_tiny, real_engine, below):
    model = load_tiny("fp16")
    engine = talk(below(model, Tier.DISK))
    engine.core.tiers.disk.close()
    history = [*FIRST, *engine.ids[1], *SECOND]
    after = below(model, Tier.DISK)
    after.submit(9, history, **ANSWER)
    after.run()
    assert (after.ids[9], after.logprobs[9]) == fresh_answer(real_engine, model, history)
    assert after.done[9].num_cached_tokens == (len(FIRST) + 11) // 16 * 16


def test_one_flipped_byte_in_the_host_changes_the_answer(load_tiny, real_engine, below):
    model = load_tiny("fp16")
    engine = leave(talk(below(model, Tier.HOST)), Tier.HOST)
    block = engine.core.tiers.get(engine.core.leases.get(1).digests[2])
    engine.host.slots[block.slot].view(-1).view(torch.uint8)[1] ^= 4
    _, logprobs, found = come_back(engine)
    assert found > 0
    assert logprobs != fresh_answer(real_engine, model, [*FIRST, *engine.ids[1], *SECOND])[1]


def test_one_flipped_byte_on_the_disk_is_refused_and_costs_its_own_block_only(load_tiny, real_engine, below, tmp_path):
    model = load_tiny("fp16")
    engine = leave(talk(below(model, Tier.DISK)), Tier.DISK)
    name = engine.core.leases.get(1).digests[2].hex()
    (path,) = (file for file in (tmp_path / "kv").rglob("*") if file.is_file() and name[2:] in str(file))
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
    ids, logprobs, found = come_back(engine)
    assert (ids, logprobs) == fresh_answer(real_engine, model, [*FIRST, *engine.ids[1], *SECOND])
    assert found == (len(FIRST) + 11) // 16 * 16 - 16
    assert engine.core.tiers.disk.num_refused == 1


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_swapping_and_computing_again_change_no_bit(load_tiny, real_engine, mode):
    model = load_tiny("fp16")
    prompts = [RNG.integers(3, 512, length).tolist() for length in (77, 130, 40, 90)]
    config = {"num_blocks": 16, "host_slots": 100, "max_model_len": 256, "transfer_costs": CHEAP, "preemption": mode}
    engine = real_engine(model, config)
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, max_tokens=60, **ANSWER)
    engine.run()
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped > 0) == (mode == "swap")
    for number, prompt in enumerate(prompts):
        alone = real_engine(model)
        alone.submit(number, prompt, max_tokens=60, **ANSWER)
        alone.run()
        assert engine.logprobs[number] == alone.logprobs[number]
