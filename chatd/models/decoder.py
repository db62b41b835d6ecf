"""The native decoder of the Llama family: one forward over one flattened batch, logits for the rows that sample.

What differs between the architectures is in the flags of `DecoderConfig` and in which weights there are. A step runs
4 * num_layers + 1 linear products, whatever it mixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatd.models.attention import Attention, AttentionScratch, ForwardInput, RotaryTables
from chatd.models.layers import GatedMLP, rotary_tables
from chatd_kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from chatd.models.model_config import DecoderConfig
    from chatd.models.quantization import PackedLinear
    from chatd_kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: attention and MLP, each behind a norm and added to the residual stream.

    Attributes:
        input_norm: `[hidden_size]` float32.
        attention: See there.
        post_attention_norm: `[hidden_size]` float32.
        mlp: See there.
    """

    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: GatedMLP


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model.

    Attributes:
        embedding: `[vocab_size, hidden_size]`, float32, float16 or bfloat16.
        layers: In order.
        final_norm: `[hidden_size]` float32.
        output: `[vocab_size, hidden_size]`.
    """

    embedding: torch.Tensor
    layers: Sequence[DecoderLayer]
    final_norm: torch.Tensor
    output: PackedLinear


class _Buffers:
    """Activations of the largest step, allocated once and shared by all layers."""

    def __init__(
        self, config: DecoderConfig, num_tokens: int, num_logits: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def rows(*shape: int) -> torch.Tensor:
            # Zeros, since nothing attends for the rows that fill up a captured batch.
            return torch.zeros((num_tokens, *shape), dtype=dtype, device=device)

        self.residual = rows(config.hidden_size)
        self.normed = rows(config.hidden_size)
        self.delta = rows(config.hidden_size)
        self.qkv = rows(config.qkv_size)
        self.query = rows(config.num_heads, config.head_dim)
        self.attended = rows(config.num_heads * config.head_dim)
        self.gate_up = rows(2 * config.intermediate_size)
        self.activation = rows(config.intermediate_size)
        self.logits = torch.empty((num_logits, config.vocab_size), dtype=dtype, device=device)

    def logits_rows(self, num_rows: int) -> torch.Tensor:
        """Return space for the logits of a step, which grows where more rows sample than there was room for."""
        if num_rows > self.logits.shape[0]:
            self.logits = self.logits.new_empty((num_rows, self.logits.shape[1]))
        return self.logits[:num_rows]


class Decoder:
    """A model that is ready to run, and the KV cache that is bound to it.

    Args:
        config: Its flags.
        weights: Its weights, on `device`.
        device: Where it runs.
        dtype: Of activations and logits; float32 on the CPU.
        max_num_batched_tokens: Most rows of a step; sizes the activations.
        max_model_len: Positions for which rotary tables are made; at most `config.max_context`.
        max_num_logits: Rows of logits that there is room for from the start: what a captured graph writes cannot grow.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_logits: int = 0,
    ) -> None:
        assert max_model_len <= config.max_context, f"{max_model_len} positions, the model has {config.max_context}"
        self.config = config
        self.device = device
        self.dtype = dtype
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._weights = weights
        self._rotary = RotaryTables(*rotary_tables(config, max_model_len, device))
        self._buffers = _Buffers(config, max_num_batched_tokens, max_num_logits, dtype, device)
        self._kv_cache: KVCache | None = None

    @property
    def kv_cache(self) -> KVCache:
        """The bound cache."""
        assert self._kv_cache is not None, "no KV cache is bound"
        return self._kv_cache

    def bind_kv_cache(self, kv_cache: KVCache) -> None:
        """Use this cache from now on; its layout must be the model's.

        Raises:
            ValueError: Another number of layers or heads, or another head size.
        """
        config, layout = self.config, kv_cache.layout
        found = (layout.num_layers, layout.num_kv_heads, layout.head_dim)
        if found != (config.num_layers, config.num_kv_heads, config.head_dim):
            raise ValueError(f"a cache of (layers, KV heads, head size) {found} does not fit {config}")
        self._kv_cache = kv_cache

    @torch.inference_mode()
    def forward(self, inputs: ForwardInput) -> torch.Tensor:
        """Run one step: write K and V of all rows, return logits `[num_logits, vocab_size]` of the model's dtype.

        Rows of one sequence may come in one batch or in several: a row sees the slots of its block table up to its own.
        The next call overwrites what this one returned.
        """
        num_tokens = inputs.token_ids.shape[0]
        assert num_tokens <= self.max_num_batched_tokens, f"{num_tokens} rows of {self.max_num_batched_tokens}"
        weights, eps, buffers = self._weights, self.config.rms_norm_eps, self._buffers
        residual, normed = buffers.residual[:num_tokens], buffers.normed[:num_tokens]
        delta = buffers.delta[:num_tokens]
        attention_scratch = AttentionScratch(
            buffers.qkv[:num_tokens], buffers.query[:num_tokens], buffers.attended[:num_tokens]
        )
        gate_up, activation = buffers.gate_up[:num_tokens], buffers.activation[:num_tokens]

        residual.copy_(torch.nn.functional.embedding(inputs.token_ids, weights.embedding))
        for index, layer in enumerate(weights.layers):
            # What the sublayer before computed joins the residual stream in the norm of the next one.
            if index == 0:
                rms_norm(residual, layer.input_norm, eps, out=normed)
            else:
                rms_norm(delta, layer.input_norm, eps, out=normed, residual=residual)
            layer.attention.forward(normed, inputs, self._rotary, self.kv_cache, attention_scratch, delta)
            rms_norm(delta, layer.post_attention_norm, eps, out=normed, residual=residual)
            layer.mlp.forward(normed, gate_up, activation, delta)
        rows = inputs.logits_rows
        last = residual[rows].add_(delta[rows])
        rms_norm(last, weights.final_norm, eps, out=last)
        return weights.output(last, buffers.logits_rows(rows.shape[0]))
