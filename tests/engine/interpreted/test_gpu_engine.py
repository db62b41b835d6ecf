"""The engine on the GPU's path: what it answers, whatever is scheduled, cached, preempted or padded."""

from dataclasses import replace

import pytest
import torch

from chatd.engine.messages import FinishReason, Fork
from chatd.engine.options import EngineOptions
from chatd.engine.startup import load_model
from chatd_kernels.dispatch import use_backend

CONFIG = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 5, "max_model_len": 80}
SYSTEM = list(range(20, 52))


class Steady:
    """A runner whose steps all take the same time, so that no measurement changes what is planned."""

    def __init__(self, runner):
        self.runner = runner

    def execute(self, plan):
        return replace(self.runner.execute(plan), model_s=0.001, move_s=0.0)

    def launch(self, plan):
        return SteadyStep(self.runner.launch(plan))


class SteadyStep:
    def __init__(self, step):
        self.step = step

    def result(self):
        return replace(self.step.result(), model_s=0.001, move_s=0.0)


@pytest.fixture(scope="module")
def load_on_cpu(llama):
    """Load the model in float32 for the CPU's kernels, whose compiler may not be installed."""

    def load():
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

    return load


def conversation(engine):
    """Chunked prompts, a shared prefix, a fork in the middle of a block, sampling, and two that outgrow the pool."""
    for request, first in ((4, 100), (5, 150)):
        engine.submit(request, list(range(first, first + 12)), temperature=1.0, top_p=0.9, seed=5, max_tokens=24)
    engine.run()
    engine.submit(1, [*SYSTEM, 60, 61, 62], max_tokens=6)
    while 1 not in engine.done:
        engine.step()
    engine.send(Fork(1, 9, 38))
    engine.submit(2, [90, 91], lease=9, base_len=38, max_tokens=4, repetition_penalty=1.3)
    engine.submit(3, [*SYSTEM, 80], max_tokens=3, temperature=0.7, seed=6, logit_bias=((77, 2.0),))
    return engine.run()


def test_the_answers_are_those_of_transformers_and_of_the_cpu(llama, load, real_engine, load_on_cpu):
    from transformers import LlamaForCausalLM

    gpu = conversation(real_engine(load(), CONFIG | {"steps_in_flight": 2}, wrap=lambda _: Steady(load().runner)))
    assert {done.reason for done in gpu.done.values()} == {FinishReason.MAX_OUTPUT_TOKENS}
    assert [gpu.done[request].num_cached_tokens for request in (1, 2, 3)] == [0, 38, 32]
    assert gpu.core.stats().num_preemptions >= 1
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    prompt = [*SYSTEM, 60, 61, 62]
    found = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert gpu.ids[1] == found[0, len(prompt) :].tolist()
    pytest.importorskip("numba")
    with use_backend("cpu"):
        cpu = conversation(real_engine(load_on_cpu(), CONFIG, wrap=Steady))
    assert gpu.ids == cpu.ids
    for request in gpu.ids:
        assert gpu.logprobs[request] == pytest.approx(cpu.logprobs[request], abs=1e-4)
