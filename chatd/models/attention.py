"""One layer's attention over the paged KV cache: fused projection, rotation, KV write, attention, output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatd_kernels.paged_attention import paged_attention
from chatd_kernels.rope_kv_write import rope_kv_write

if TYPE_CHECKING:
    from chatd.models.quantization import PackedLinear
    from chatd_kernels.kv_cache import KVCache
    from chatd_kernels.paged_attention import Metadata


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One flattened batch: every row of every chunk of a step, prefill and decode alike, without padding.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64, of each token in its own sequence.
        slot_mapping: `[num_tokens]` int64, where each token's K and V go: block * block_size + offset.
        attention: Which blocks each row reads; built from the chunks by chatd_kernels' `build_metadata`.
        logits_rows: `[num_logits]` int64, the rows that a token is drawn from.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: Metadata
    logits_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """cos and sin of every position, each `[num_positions, head_dim / 2]` float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Activations that no layer keeps, all of the model's dtype.

    Attributes:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`.
        query: `[num_tokens, num_heads, head_dim]`.
        attended: `[num_tokens, num_heads * head_dim]`.
    """

    qkv: torch.Tensor
    query: torch.Tensor
    attended: torch.Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights of one layer's attention.

    Attributes:
        layer: Index in the KV cache.
        qkv: `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`: the rows of q, of k, of v.
        output: `[hidden_size, num_heads * head_dim]`.
        scale: Of the scores.
        window: Positions that a row sees, its own included; None sees all.
        q_norm: `[head_dim]` float32 where heads are normed before the rotation (Qwen3), else None.
        k_norm: Likewise.
        eps: Of those norms.
    """

    layer: int
    qkv: PackedLinear
    output: PackedLinear
    scale: float
    window: int | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float

    def forward(
        self,
        x: torch.Tensor,
        inputs: ForwardInput,
        rotary: RotaryTables,
        kv_cache: KVCache,
        scratch: AttentionScratch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the rows' K and V into their slots, and what they attend to into `out`, which is returned.

        Args:
            x: `[num_tokens, hidden_size]` of the model's dtype, normed.
            inputs: The batch.
            rotary: The model's tables.
            kv_cache: All layers' blocks.
            scratch: Of `num_tokens` rows.
            out: `[num_tokens, hidden_size]` likewise; not `x`.
        """
        rope_kv_write(
            self.qkv(x, scratch.qkv),
            inputs.positions,
            inputs.slot_mapping,
            rotary.cos,
            rotary.sin,
            kv_cache,
            self.layer,
            q_out=scratch.query,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
        )
        paged_attention(
            scratch.query, kv_cache, self.layer, inputs.attention, scratch.attended, self.scale, self.window
        )
        return self.output(scratch.attended, out)
