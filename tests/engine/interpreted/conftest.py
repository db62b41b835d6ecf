"""These tests run the engine's whole path on a GPU under Triton's interpreter, on tensors of the CPU."""

import random

import pytest
import torch

from chatd.engine.gpu_runner import GpuRunner
from chatd.engine.options import EngineOptions
from chatd.engine.plan import Chunk, Plan, SampleSpec
from chatd.engine.sampling import SamplingParams
from chatd.engine.startup import LoadedModel, load_model
from chatd.models.loader import load_decoder
from chatd_kernels.dispatch import use_backend
from chatd_kernels.interpreted_tests import *  # noqa: F403
from chatd_kernels.kv_cache import allocate_kv_cache
from chatd_kernels.stream import InterpretedStream

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def gpu_backend():
    """The kernels of GPUs run everything."""
    with use_backend("gpu"):
        yield


@pytest.fixture(scope="session")
def llama(write_llama):
    """A folder with a Llama of random weights that shares KV heads."""
    return write_llama(TINY_CONFIG)


@pytest.fixture(scope="session")
def load(llama):
    """Load the model with some options, once each; its requests leave only blocks that nobody trusts."""
    loaded = {}

    def load_once(**fields) -> LoadedModel:
        key = tuple(sorted(fields.items()))
        if key not in loaded:
            values = {
                "model_id": "tiny",
                "model_path": str(llama),
                "model_digest": "d",
                "dtype": "float32",
                "kv_memory_bytes": 2**20,
                "max_num_seqs": 2,
                "max_num_batched_tokens": 16,
            }
            options = EngineOptions(**(values | fields))
            loaded[key] = load_model(options, lambda *_: None, stream=InterpretedStream())
        return loaded[key]

    return load_once


class Requests:
    """Requests whose plans a test makes itself, at random places of a cache that holds NaN where nobody has written.

    Attributes:
        ids: By request, all its tokens.
        tables: By request, its blocks.
        logprobs: By request, of each token that was drawn, where they are wanted.
    """

    def __init__(self, runner, cache, has_logprobs):
        self.runner = runner
        self.cache = cache
        self.params = SamplingParams(max_tokens=99, logprobs=0 if has_logprobs else None)
        self.ids = {}
        self.tables = {}
        self.logprobs = {}
        self._free = random.Random(3).sample(range(cache.num_blocks), cache.num_blocks)
        self._computed = {}

    def free_block(self):
        return self._free.pop()

    def chunk(self, request, end, token_ids=None):
        """Return a chunk from what is computed to `end`; it draws where that is all that there is."""
        start, size = self._computed.get(request, 0), self.cache.layout.block_size
        table = self.tables.setdefault(request, [])
        while len(table) * size < end:
            table.append(self.free_block())
        self._computed[request] = end
        known = self.ids[request]
        spec = SampleSpec(self.params, 0) if end >= len(known) else None
        return Chunk(request, start, known[start:end] if token_ids is None else token_ids, list(table), spec)

    def plan(self, *chunks):
        return Plan(0, chunks, (), self.cache.layout.block_size)

    def step(self, *chunks):
        self.keep(self.runner.execute(self.plan(*chunks)))

    def keep(self, output):
        for request, token in output.sampled.items():
            self.ids[request].append(token)
            if self.params.logprobs is not None:
                self.logprobs.setdefault(request, []).append(output.logprobs[request].logprob)

    def prefill(self, request, ids, rows=16):
        self.ids[request] = list(ids)
        for end in range(rows, len(ids) + rows, rows):
            self.step(self.chunk(request, min(end, len(ids))))

    def decode(self, *requests, num_tokens=1):
        for _ in range(num_tokens):
            self.step(*(self.chunk(request, len(self.ids[request])) for request in requests))


@pytest.fixture(scope="session")
def requests_on(llama):
    """Make requests on a runner whose formats and features a test chooses."""

    def make(
        dtype="float32",
        kv_dtype=None,
        weights="fp32",
        *,
        has_logprobs=False,
        is_deterministic=False,
        sizes=(1, 2, 4),
        host=None,
    ):
        stream = InterpretedStream()
        decoder = load_decoder(
            llama,
            quantization=weights,
            max_num_batched_tokens=32,
            max_num_logits=4,
            device=stream.device,
            dtype=getattr(torch, dtype),
            is_deterministic=is_deterministic,
        )
        config = decoder.config
        layout = (config.num_layers, config.num_kv_heads, 16, config.head_dim)
        cache = allocate_kv_cache(24, *layout, getattr(torch, kv_dtype or dtype))
        if cache.layout.is_quantized:
            cache.scales.fill_(float("nan"))
        else:
            cache.data.fill_(float("nan"))
        decoder.bind_kv_cache(cache)
        buffer = None if host is None else host(cache.layout)
        runner = GpuRunner(decoder, stream, max_num_seqs=4, is_deterministic=is_deterministic, host=buffer)
        if sizes:
            runner.capture(sizes, lambda progress: None)
        return Requests(runner, cache, has_logprobs)

    return make
