"""S3 on the real model, in pairs: a tenant finds its own prefix computed, and another tenant never does.

The halves of a pair differ in the tenant alone; so a hit for the one and none for the other is the namespace's work.
"""

import numpy as np
import pytest

from chatd.engine.messages import LeaseId, Submit
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams

PAIRS = 50
PARAMS = SamplingParams(max_tokens=1, logprobs=0)


def check_pairs(engine, vocab_size, num_pairs):
    """Each prompt is computed by one tenant, then asked for by the same and by another one, in either order."""
    rng = np.random.default_rng(9)
    shared = rng.integers(10, vocab_size, 16).tolist()
    prompts = [[*shared, *rng.integers(10, vocab_size, 1 + int(rng.integers(24))).tolist()] for _ in range(num_pairs)]
    found = [{} for _ in prompts]
    answers = [[] for _ in prompts]
    for turn in range(3):
        for pair, prompt in enumerate(prompts):
            is_foreign = turn == (2 if pair % 2 else 1)
            tenant = f"tenant {2 * pair + is_foreign}"
            number = 1 + turn * num_pairs + pair
            engine.send(Submit(RequestId(number), LeaseId(number), tenant, 0, prompt, PARAMS, keep_lease=False))
        engine.run()
        for pair in range(num_pairs):
            number = 1 + turn * num_pairs + pair
            is_foreign = turn == (2 if pair % 2 else 1)
            found[pair].setdefault(is_foreign, []).append(engine.done[number].num_cached_tokens)
            answers[pair].append((engine.ids[number], engine.logprobs[number]))
    for pair, prompt in enumerate(prompts):
        full = (len(prompt) - 1) // 16 * 16
        assert full > 0
        assert found[pair] == {False: [0, full], True: [0]}
        # What is computed and what is found give the same bits.
        assert answers[pair][0] == answers[pair][1] == answers[pair][2]


@pytest.mark.parametrize("quantization", ["fp16", "int8", "fp32"])
def test_same_tenant_hits_and_foreign_ones_never(load_tiny, real_engine, quantization):
    check_pairs(real_engine(load_tiny(quantization)), 512, PAIRS)


@pytest.mark.model
def test_fifty_pairs_on_the_real_model(load_smollm2, real_engine):
    check_pairs(real_engine(load_smollm2("fp16")), 49152, PAIRS)


def test_a_forgotten_namespace_is_found_by_the_pairs(load_tiny, real_engine, monkeypatch):
    monkeypatch.setattr("chatd.kvcache.prefix_index.Namespace.of", lambda namespace, tenant: namespace)
    with pytest.raises(AssertionError):
        check_pairs(real_engine(load_tiny("fp16")), 512, 2)
