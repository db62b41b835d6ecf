"""S7: what a slot at or past the length holds never influences a result, whatever the engine does meanwhile.

Every unowned slot is filled before each step, with NaN and with 1e30 (in float16 its largest number, 65504); everything
that the engine says must be the same, to the last bit of every log probability.
"""

import math

import numpy as np
import pytest
import torch

from chatd.engine.messages import Beams, Cancel, Done, FinishReason, Fork, Release, Submit, Trim
from chatd.engine.options import EngineOptions
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.engine.startup import load_model
from chatd.engine.transfer_costs import TransferCosts
from chatd.testing.poison import PoisoningRunner

POISONS = {"NaN": math.nan, "1e30": 1e30}
CHEAP = TransferCosts(1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6)


@pytest.fixture
def poisoned(real_engine):
    """Make engines whose unowned slots are filled before each step; None leaves them as they are."""

    def make(model, value, **config):
        runners = []

        def wrap(runner):
            cache = model.decoder.kv_cache
            most = torch.finfo(cache.data.dtype).max
            runners.append(PoisoningRunner(runner, cache, value and min(value, most), runner._host))
            return runners[0]

        engine = real_engine(model, config, wrap=wrap)
        engine.poison = runners[0]
        engine.poison.core = engine.core
        return engine

    return make


def talk(engine, vocab_size=512, *, max_tokens=50):
    """Run chats that fork, are cut, cancelled and preempted, samples and a search, and return all that was said."""
    rng = np.random.default_rng(11)

    def ids(length):
        return rng.integers(3, vocab_size, length).tolist()

    shared = ids(37)
    for request in range(6):
        prompt = shared[: 37 - request] + ids(1 + 13 * request)
        kind = ({}, {"temperature": 0.9, "seed": request}, {"repetition_penalty": 1.2})[request % 3]
        engine.submit(request, prompt, tenant=("acme", "blue")[request % 2], max_tokens=max_tokens + request, **kind)
    for _ in range(7):
        engine.step()
    engine.send(Cancel(4))
    # In the middle of a block that its owner goes on writing to.
    engine.send(Fork(0, 50, 37 - 3))
    engine.submit(50, [5, 6], lease=50, base_len=37 - 3)
    engine.run()
    length = len(engine.core.leases.get(1).token_ids)
    engine.send(Fork(1, 51, length - 5))
    engine.send(Trim(1, length - 9))
    engine.submit(10, ids(3), lease=1, base_len=length - 9, tenant="blue")
    engine.submit(51, ids(20), lease=51, base_len=length - 5, tenant="blue")
    engine.submit(11, ids(1), lease=2, base_len=len(engine.core.leases.get(2).token_ids), max_tokens=20)
    prompt = ids(21)
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=1, logprobs=2)
    engine.send(Submit(20, 20, "acme", 0, prompt, sampling))
    engine.send(Submit(21, 21, "acme", 0, prompt, sampling, sample_of=20))
    search = BeamSearch(width=3, num_returned=3)
    engine.send(Submit(22, 22, "acme", 0, ids(18), SamplingParams(max_tokens=8), beam=search))
    for _ in range(4):
        engine.step()
    engine.send(Release(51))
    engine.run()
    for request in range(30, 34):
        engine.submit(request, shared + ids(5), tenant="acme", max_tokens=6)
    engine.run()
    ends = [message for message in engine.messages if isinstance(message, Done)]
    assert not [end for end in ends if end.reason is FinishReason.FAILED]
    assert any(isinstance(message, Beams) for message in engine.messages)
    return engine


def same(engine, clean):
    """Compare all that two engines said; shows the first message that differs."""
    for said, expected in zip(engine.messages, clean.messages, strict=True):
        assert said == expected
    assert engine.ids == clean.ids
    assert engine.logprobs == clean.logprobs


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("quantization", ["fp16", "int8", "fp32"])
def test_no_unowned_slot_is_read(load_tiny, poisoned, quantization, poison):
    model = load_tiny(quantization)
    for config in ({"num_blocks": 400}, {"num_blocks": 26, "max_model_len": 200, "max_num_batched_tokens": 64}):
        clean = talk(poisoned(model, None, **config))
        engine = talk(poisoned(model, POISONS[poison], **config))
        same(engine, clean)
        assert engine.poison.num_poisoned > 1000
    assert engine.core.stats().num_preemptions > 0


@pytest.mark.parametrize("poison", POISONS)
def test_no_unowned_slot_is_read_of_a_cache_in_float32(tiny_model, poisoned, poison):
    options = EngineOptions(
        model_id="tiny",
        model_path=str(tiny_model),
        model_digest="d",
        quantization="fp32",
        kv_dtype="float32",
        kv_memory_bytes=8 * 2**20,
    )
    model = load_model(options, lambda *_: None)
    clean = talk(poisoned(model, None, num_blocks=60))
    same(talk(poisoned(model, POISONS[poison], num_blocks=60)), clean)


@pytest.mark.parametrize("poison", POISONS)
def test_no_unowned_slot_of_the_host_is_read(load_tiny, poisoned, poison):
    model = load_tiny("fp16")
    config = {"num_blocks": 26, "max_model_len": 200, "host_slots": 60, "preemption": "swap", "transfer_costs": CHEAP}
    config["digest_key"] = b"k"
    clean = talk(poisoned(model, None, **config))
    engine = talk(poisoned(model, POISONS[poison], **config))
    same(engine, clean)
    assert engine.core.stats().num_swapped > 0
    assert engine.poison.num_poisoned_host > 100


def test_a_slot_that_is_read_is_found(load_tiny, poisoned):
    """The poison reaches everything that it should: one slot too few that is kept spoils what follows."""
    model = load_tiny("fp16")
    engine = poisoned(model, math.nan, num_blocks=60)
    engine.submit(1, list(range(3, 40)))
    engine.step()
    table = engine.core.leases.get(1).table
    table.num_computed_tokens -= 1
    engine.poison.poison()
    table.num_computed_tokens += 1
    engine.run()
    assert engine.done[1].reason is FinishReason.FAILED


def test_exactly_the_unowned_slots_are_filled(load_tiny, poisoned):
    model = load_tiny("fp16")
    cache = model.decoder.kv_cache
    engine = poisoned(model, math.nan, num_blocks=20)
    cache.data[:20].zero_()
    engine.submit(1, list(range(3, 40)), max_tokens=3)
    engine.run()
    engine.poison.poison()
    table = engine.core.leases.get(1).table
    assert table.num_computed_tokens == 39
    for place, block_id in enumerate(table.block_ids):
        for offset in range(16):
            for layer in range(cache.layout.num_layers):
                key, value = cache.read_slot(block_id * 16 + offset, layer)
                is_owned = place * 16 + offset < 39
                assert torch.isfinite(key).all() == torch.isfinite(value).all() == is_owned
                assert torch.isnan(key).all() == torch.isnan(value).all() == (not is_owned)
    for block_id in set(range(20)) - set(table.block_ids):
        assert cache.data[block_id].isnan().all()


@pytest.mark.model
def test_the_real_model_reads_no_unowned_slot(load_smollm2, poisoned):
    model = load_smollm2("fp16")
    clean = talk(poisoned(model, None, num_blocks=60), 49152, max_tokens=12)
    same(talk(poisoned(model, math.nan, num_blocks=60), 49152, max_tokens=12), clean)
