import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Read when torch loads its OpenMP library: threads that spin while they wait make these tests 20 times slower on a
# busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from safetensors.torch import save_file

from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.host_buffer import HostBuffer
from chatd.engine.messages import Done, Submit, Tokens
from chatd.engine.model_runner import ModelRunner
from chatd.engine.options import EngineOptions
from chatd.engine.sampling import SamplingParams
from chatd.engine.startup import LoadedModel, load_model
from chatd.models.model_config import parse_decoder_config
from chatd.models.registry import resolve
from chatd.models.weights import expected_shapes
from chatd.testing.engine import NAMESPACE, FakeClock

MIB = 2**20
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def write_llama(tmp_path_factory) -> Callable[[dict], Path]:
    """Write a folder with a Llama of random weights, large enough to be sensitive to every input."""

    def write(config: dict) -> Path:
        folder = tmp_path_factory.mktemp("models") / "tiny-llama"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(7)
        tensors = {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.3
            for name, shape in expected_shapes(parse_decoder_config(config)).items()
        }
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def tiny_model(write_llama) -> Path:
    """A folder with a Llama of random weights."""
    return write_llama(TINY_CONFIG)


def options_for(folder: Path, **fields) -> EngineOptions:
    values = {"model_id": folder.name, "model_path": str(folder), "model_digest": "d", "kv_memory_bytes": 8 * MIB}
    return EngineOptions(**(values | fields))


@pytest.fixture(scope="session")
def load_tiny(tiny_model):
    """Load the tiny model in a weight format, once each."""
    loaded: dict[str, LoadedModel] = {}

    def load(quantization: str) -> LoadedModel:
        if quantization not in loaded:
            loaded[quantization] = load_model(options_for(tiny_model, quantization=quantization), lambda *_: None)
        return loaded[quantization]

    return load


@pytest.fixture(scope="session")
def load_smollm2():
    """Load the small real model in a weight format, one at a time."""
    files = resolve("smollm2-135m")
    loaded: dict[str, LoadedModel] = {}

    def load(quantization: str) -> LoadedModel:
        if quantization not in loaded:
            loaded.clear()
            options = options_for(files.path, quantization=quantization, kv_memory_bytes=256 * MIB)
            loaded[quantization] = load_model(options, lambda *_: None)
        return loaded[quantization]

    return load


@dataclass
class RealEngine:
    """An engine core on a real model, and a front that keeps what it is told.

    Attributes:
        ids: By request, the answer.
        logprobs: By request, of each token of the answer, as it was told: equal only if all logits' bits are.
        done: By request, its end.
    """

    model: LoadedModel
    config: dict = field(default_factory=dict)
    wrap: object = None
    disk: object = None
    ids: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    done: dict = field(default_factory=dict)
    messages: list = field(default_factory=list)

    def __post_init__(self):
        pool = self.model.pool
        values = {"num_blocks": pool.num_blocks, "namespace": NAMESPACE, "max_model_len": pool.max_model_len}
        layout = self.model.decoder.kv_cache.layout
        num_slots = self.config.get("host_slots", 0)
        self.host = HostBuffer(num_slots, layout) if num_slots else None
        self.runner = ModelRunner(self.model.decoder, self.host)
        self.clock = FakeClock()
        runner = self.runner if self.wrap is None else self.wrap(self.runner)
        disk = None if self.disk is None else self.disk(self.host, layout)
        self.core = EngineCore(EngineConfig(**(values | self.config)), runner, self.clock, disk=disk)

    def submit(self, request, new_ids, *, lease=None, base_len=0, tenant="acme", num_answered=0, **params):
        sampling = SamplingParams(**({"max_tokens": 12, "logprobs": 0} | params))
        lease = request if lease is None else lease
        submit = Submit(request, lease, tenant, base_len, new_ids, sampling, num_answered=num_answered)
        self._keep(self.core.handle(submit, self.clock.now))

    def send(self, message):
        self._keep(self.core.handle(message, self.clock.now))

    def step(self):
        self.clock.advance(0.01)
        if self.disk is not None:
            # A disk has its time, not that of a clock which goes on with each look at it.
            self.core.tiers.disk.settle(10.0)
        self._keep(self.core.step(self.clock.now))

    def run(self, max_steps=5000):
        while self.core.has_work:
            max_steps -= 1
            assert max_steps, "the engine does not come to an end"
            self.step()
        self.core.check_invariants()
        return self

    def settle(self, max_slices=100_000):
        """Let the engine do all that it does when idle; a disk is given the time that it takes."""
        while not self.core.is_checked:
            max_slices -= 1
            assert max_slices, "an idle engine does not come to rest"
            if self.disk is not None:
                self.core.tiers.disk.settle(10.0)
            self._keep(self.core.idle(self.clock.now))
        return self

    def _keep(self, said):
        self.messages += said
        for message in said:
            if isinstance(message, Tokens):
                for delta in message.deltas:
                    self.ids.setdefault(delta.request, []).extend(delta.ids)
                    self.logprobs.setdefault(delta.request, []).extend(p for p, _ in delta.logprobs or [])
            elif isinstance(message, Done):
                self.done[message.request] = message


@pytest.fixture
def real_engine():
    """Make engines on loaded models."""
    return RealEngine
