"""The engine on the GPU's path: what it answers, whatever is scheduled, cached, preempted or padded."""

import pytest
import torch

from chatd.engine.messages import FinishReason, Fork
from chatd.engine.options import EngineOptions
from chatd.engine.startup import load_model
from chatd_kernels.dispatch import use_backend

CONFIG = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
SYSTEM = list(range(20, 52))


@pytest.fixture(scope="module")
def on_cpu(llama):
    """The model in float32 on the CPU's kernels."""
    with use_backend("cpu"):
        options = EngineOptions(
            model_id="tiny",
            model_path=str(llama),
            model_digest="d",
            quantization="fp32",
            kv_dtype="float32",
            kv_memory_bytes=2**20,
            device="cpu",
        )
        return load_model(options, lambda *_: None)


def conversation(engine):
    """Chunked prompts, a shared prefix, a fork in the middle of a block, sampling, and answers of many lengths."""
    engine.submit(1, [*SYSTEM, 60, 61, 62], max_tokens=6)
    engine.submit(2, [70, 71], max_tokens=9, temperature=1.0, top_p=0.9, seed=5)
    while 1 not in engine.done:
        engine.step()
    engine.submit(3, [*SYSTEM, 80], max_tokens=3)
    engine.send(Fork(1, 9, 38))
    engine.submit(4, [90, 91], lease=9, base_len=38, max_tokens=4, repetition_penalty=1.3)
    engine.submit(5, [*SYSTEM[:20], 100], max_tokens=2, temperature=0.7, seed=6, logit_bias=((77, 2.0),))
    engine.run()
    return engine


def test_the_answers_are_those_of_the_cpu_and_of_transformers(llama, load, real_engine, on_cpu):
    from transformers import LlamaForCausalLM

    gpu = conversation(real_engine(load(), CONFIG, wrap=lambda _: load().runner))
    with use_backend("cpu"):
        cpu = conversation(real_engine(on_cpu, CONFIG))
    assert gpu.ids == cpu.ids
    assert {done.reason for done in gpu.done.values()} == {FinishReason.MAX_OUTPUT_TOKENS}
    assert [gpu.done[request].num_cached_tokens for request in (1, 3, 4, 5)] == [0, 32, 38, 16]
    for request in gpu.ids:
        assert gpu.logprobs[request] == pytest.approx(cpu.logprobs[request], abs=1e-4)
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    prompt = [*SYSTEM, 60, 61, 62]
    found = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert gpu.ids[1] == found[0, len(prompt) :].tolist()
