"""Attention over the paged KV cache, for decode rows and prefill chunks alike."""

from __future__ import annotations

import torch

from chatd_kernels.dispatch import launcher
from chatd_kernels.kv_cache import KVCache
from chatd_kernels.paged_attention.schedule import AttentionMetadata, build_metadata

__all__ = ["AttentionMetadata", "build_metadata", "paged_attention"]


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Write each token's causal attention over its sequence's cached K and V to `out`.

    A token at position p sees positions 0 to p, or the last `window` of them; slots beyond are not read into any
    result. Its result depends on nothing else: not on the batch, the tiles, the chunk it came in, or who shares its
    blocks.

    Args:
        q: `[num_tokens, Hq, head_dim]` float32, rotated.
        kv_cache: holds K and V of every position up to the token's own.
        layer: the layer's index in the cache.
        metadata: of this step, from `build_metadata`.
        out: `[num_tokens, Hq * head_dim]` float32.
        scale: of the scores, usually `head_dim ** -0.5`.
        window: positions that a token sees, its own included; None for all.

    Returns:
        `out`.

    Raises:
        ValueError: a shape or dtype is not as above, the layer is out of range, or the metadata is of another cache.
    """
    launcher("paged_attention", q.device.type)(q, kv_cache, layer, metadata, out, scale, window)
    return out
