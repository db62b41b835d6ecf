"""I16, I20, I21 on real forwards: every bit of every token's log probability, whatever else the engine does."""

import numpy as np
import pytest

from chatd.engine.messages import Fork
from chatd_kernels import runtime

FORMATS = ["fp16", "int8", "fp32"]
KINDS = [
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.2, "top_p": 0.95, "seed": 12},
    {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.1, "seed": 13},
]


def workload(vocab_size, lengths, *, max_tokens=40, seed=0):
    """Return (prompt, parameters) pairs; the odd ones share a long beginning."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab_size, 40).tolist()
    prompts = []
    for i, length in enumerate(lengths):
        own = rng.integers(3, vocab_size, length).tolist()
        prompt = (shared + own)[:length] if i % 2 and length > 40 else own
        prompts.append((prompt, {**KINDS[i % len(KINDS)], "max_tokens": max_tokens}))
    return prompts


def one_by_one(make, model, prompts):
    """Return each prompt's answer computed with nothing beside it and nothing cached."""
    ids, logprobs = {}, {}
    for i, (prompt, kind) in enumerate(prompts):
        engine = make(model)
        engine.submit(i, prompt, **kind)
        engine.run()
        ids[i], logprobs[i] = engine.ids[i], engine.logprobs[i]
    return ids, logprobs


def check_all(make, model, prompts, *, num_tight_blocks, max_chunks):
    ids, logprobs = one_by_one(make, model, prompts)
    assert len({tuple(v) for v in ids.values()}) == len(prompts)

    def submitted(engine, tenant=lambda i: "acme", offset=0):
        for i, (prompt, kind) in enumerate(prompts):
            engine.submit(offset + i, prompt, tenant=tenant(i), **kind)
        return engine

    def check(engine, what, offset=0):
        for i in range(len(prompts)):
            assert engine.ids[offset + i] == ids[i], f"{what}: the tokens of prompt {i}"
            assert engine.logprobs[offset + i] == logprobs[i], f"{what}: the log probabilities of prompt {i}"

    together = submitted(make(model)).run()
    check(together, "all at once")
    # Before another engine writes to the same memory.
    cached = submitted(together, offset=100).run()
    for i, (prompt, _) in enumerate(prompts):
        assert cached.done[100 + i].num_cached_tokens >= (len(prompt) - 1) // 16 * 16
    check(cached, "from cache", offset=100)
    check(submitted(make(model), tenant=lambda i: f"tenant {i}").run(), "nothing shared")
    for rows in max_chunks:
        config = {"max_num_batched_tokens": rows, "max_num_seqs": min(rows, 8)}
        check(submitted(make(model, config)).run(), f"steps of {rows} rows")

    tight = submitted(make(model, {"num_blocks": num_tight_blocks})).run()
    assert tight.core.stats().num_preemptions > 0
    check(tight, "preempted")


@pytest.mark.parametrize("quantization", FORMATS)
def test_an_answer_does_not_depend_on_batch_chunks_cache_or_preemption(load_tiny, real_engine, quantization):
    model = load_tiny(quantization)
    prompts = workload(512, [5, 77, 130, 300, 16, 270, 33, 64, 1, 90])
    check_all(real_engine, model, prompts, num_tight_blocks=24, max_chunks=[7, 24, 100])


@pytest.mark.model
@pytest.mark.parametrize("quantization", ["fp16", "int8"])
def test_the_real_model_answers_alike_whatever_is_beside_it(load_smollm2, real_engine, quantization):
    model = load_smollm2(quantization)
    prompts = workload(49152, [14, 46, 30, 78], max_tokens=20)
    check_all(real_engine, model, prompts, num_tight_blocks=10, max_chunks=[60])


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_conversation_gives_what_its_whole_history_gives_at_once(load_tiny, real_engine, quantization):
    model = load_tiny(quantization)
    rng = np.random.default_rng(3)
    talk = real_engine(model)
    history = []
    for turn in range(5):
        new = rng.integers(3, 512, 30 + turn).tolist()
        talk.submit(turn, new, lease=1, base_len=len(history), temperature=0.9, seed=turn)
        talk.run()
        history += new
        if turn:
            # Only what is new is computed: the partial block stays as well.
            assert talk.done[turn].num_cached_tokens >= len(history) - len(new) - 1
        fresh = real_engine(model)
        fresh.submit(turn, list(history), temperature=0.9, seed=turn)
        fresh.run()
        assert fresh.logprobs[turn] == talk.logprobs[turn]
        assert fresh.ids[turn] == talk.ids[turn]
        history += talk.ids[turn]


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_number_of_threads_changes_nothing(load_tiny, real_engine, quantization):
    model = load_tiny(quantization)
    prompts = workload(512, [5, 77, 300, 16, 270])
    before = runtime.num_threads()
    told = []
    try:
        for num_threads in (1, 2, 3):
            runtime.set_num_threads(num_threads)
            engine = real_engine(model)
            for i, (prompt, kind) in enumerate(prompts):
                engine.submit(i, prompt, **kind)
            engine.run()
            told.append((engine.ids, engine.logprobs))
    finally:
        runtime.set_num_threads(before)
    assert told[0] == told[1] == told[2]


def test_forks_inside_a_block_go_on_alike_and_leave_the_original_alone(load_tiny, real_engine):
    model = load_tiny("fp16")
    prompt = workload(512, [70])[0][0]
    engine = real_engine(model)
    engine.submit(1, prompt, lease=1)
    engine.run()
    engine.send(Fork(1, 2, 55))
    engine.send(Fork(1, 3, 70))
    engine.submit(2, [9, 8, 7], lease=2, base_len=55)
    engine.submit(3, [4], lease=3, base_len=70)
    engine.submit(4, [5], lease=1, base_len=70 + 12)
    engine.run()
    for request, history in (
        (2, [*prompt[:55], 9, 8, 7]),
        (3, [*prompt, 4]),
        (4, [*prompt, *engine.ids[1], 5]),
    ):
        fresh = real_engine(model)
        fresh.submit(request, history)
        fresh.run()
        assert fresh.logprobs[request] == engine.logprobs[request]
    assert engine.done[2].num_cached_tokens >= 55
