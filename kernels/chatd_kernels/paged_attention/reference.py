"""Attention over the paged cache, slow and obvious: gather, mask, softmax, a token at a time, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatd_kernels.kv_cache import KVCache
from chatd_kernels.paged_attention.batch import Batch

if TYPE_CHECKING:
    from chatd_kernels.paged_attention.schedule import AttentionMetadata


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    metadata: AttentionMetadata | Batch,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """The contract of `chatd_kernels.paged_attention.paged_attention`."""
    layout = kv_cache.layout
    group = q.shape[1] // layout.num_kv_heads
    for token, length in enumerate(metadata.lengths.tolist()):
        table = metadata.block_tables[metadata.sequence_of[token]]
        first = max(0, length - window) if window else 0
        slots = [
            int(table[p // layout.block_size]) * layout.block_size + p % layout.block_size for p in range(first, length)
        ]
        pairs = [kv_cache.read_slot(slot, layer) for slot in slots]
        keys = torch.stack([k for k, _ in pairs], dim=1).double().repeat_interleave(group, dim=0)
        values = torch.stack([v for _, v in pairs], dim=1).double().repeat_interleave(group, dim=0)
        scores = torch.einsum("hd,hpd->hp", q[token].double(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        out[token] = torch.einsum("hp,hpd->hd", scores.softmax(-1), values).reshape(-1)
