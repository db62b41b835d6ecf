"""Models of random weights, made on the device without a file, and what a decode step of them takes at least."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chatd.bench.gpu.parts import NoRoom, free_memory
from chatd.engine.gpu_runner import GpuRunner
from chatd.models.decoder import Decoder
from chatd.models.loader import pack_decoder
from chatd.models.model_config import DecoderConfig, parse_decoder_config
from chatd.models.weights import expected_shapes
from chatd_kernels.kv_cache import KVCacheLayout, allocate_kv_cache, device_key_group
from chatd_kernels.stream import Stream

RawConfig = Mapping[str, Any]

QWEN3_8B: RawConfig = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA_31_8B: RawConfig = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DEVIATION = 0.02
_ROOM = 0.9  # of what is free, for the KV cache: steps allocate a little beside it


class _RandomTensors:
    """A model's tensors as a folder would have them: norms of one, the rest normal."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = expected_shapes(config)
        self._dtype = dtype
        self._device = device

    def read(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, _DEVIATION)


class RandomModel:
    """A decoder of random weights with a KV cache, and its runner.

    Args:
        stream: Of the device.
        raw: As config.json.
        max_num_seqs: Most requests of a step.
        max_model_len: Most tokens of a context.
        num_blocks: Of the cache, or a function of what fits; more than fits raises `NoRoom`.
        max_num_batched_tokens: Most rows of a step.
        kv_dtype: Of the cache; the model's where None.
        is_deterministic: As `GpuRunner`.

    Attributes:
        config: The flags.
        layout: Of the cache.
        num_blocks: Of the cache.
        runner: Executes plans; nothing is captured yet.
    """

    def __init__(
        self,
        stream: Stream,
        raw: RawConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int | Callable[[int], int],
        max_num_batched_tokens: int,
        kv_dtype: torch.dtype | None = None,
        is_deterministic: bool = False,
        block_size: int = 16,
    ) -> None:
        self.config = config = parse_decoder_config(raw)
        dtype = getattr(torch, config.dtype or "bfloat16")
        free_memory(stream)
        self._decoder: Decoder = pack_decoder(
            config,
            _RandomTensors(config, dtype, stream.device),
            quantization=_FORMATS[dtype],
            max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_model_len=max_model_len,
            max_num_logits=max_num_seqs,
            device=stream.device,
            dtype=dtype,
            is_deterministic=is_deterministic,
        )
        # The weights were made by another thread, in the order of its own stream.
        stream.synchronize()
        self.layout = KVCacheLayout(
            config.num_layers,
            config.num_kv_heads,
            block_size,
            config.head_dim,
            kv_dtype or dtype,
            device_key_group(stream.device),
        )
        most = int(stream.memory().free * _ROOM) // self.layout.block_bytes
        self.num_blocks = num_blocks(most) if callable(num_blocks) else num_blocks
        if self.num_blocks > most or self.num_blocks < 1:
            raise NoRoom(f"{stream.name} has room for {most} blocks, {self.num_blocks} are wanted")
        cache = allocate_kv_cache(
            self.num_blocks,
            config.num_layers,
            config.num_kv_heads,
            block_size,
            config.head_dim,
            self.layout.dtype,
            stream.device,
        )
        if not self.layout.is_quantized:
            cache.data.normal_()
        self._decoder.bind_kv_cache(cache)
        self.runner = GpuRunner(self._decoder, stream, max_num_seqs=max_num_seqs, is_deterministic=is_deterministic)

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs of decode steps of so many requests, ascending."""
        self.runner.capture(sizes, lambda _progress: None)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card reaches.

    Attributes:
        bandwidth: Bytes read and written each second by a large copy.
        flops: Operations each second of a large product of 16-bit numbers.
    """

    bandwidth: float
    flops: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time of so much work."""
        return max(num_bytes / self.bandwidth, flops / self.flops)


def roofline_s(config: DecoderConfig, layout: KVCacheLayout, batch: int, context: int, rates: Rates) -> float:
    """The least time of a decode step: each product and each layer's attention, one after the other.

    Args:
        config: Of the model, whose weights and activations have 16 bits.
        layout: Of the cache.
        batch: Requests.
        context: Tokens that each attends to.
        rates: Of the card.
    """
    attended = config.num_heads * config.head_dim

    def product(outputs: int, inputs: int) -> float:
        return rates.seconds(2 * (outputs * inputs + batch * (outputs + inputs)), 2 * batch * outputs * inputs)

    attention = rates.seconds(
        batch * context * layout.layer_stride // layout.block_size * layout.element_bytes,
        4 * batch * context * attended,
    )
    layer = (
        product(config.qkv_size, config.hidden_size)
        + attention
        + product(config.hidden_size, attended)
        + product(2 * config.intermediate_size, config.hidden_size)
        + product(config.hidden_size, config.intermediate_size)
    )
    return config.num_layers * layer + product(config.vocab_size, config.hidden_size)
