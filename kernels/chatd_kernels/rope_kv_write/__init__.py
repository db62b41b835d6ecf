"""Rotary embedding of Q and K, per-head norms where the model has them, and the write of K and V into the cache."""

from __future__ import annotations

import torch

from chatd_kernels.dispatch import launcher
from chatd_kernels.kv_cache import KVCache


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    *,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Norm (if weights are given) and rotate Q and K, write each token's K and V into its slot and Q to `q_out`.

    The rotation is transformers' `rotate_half`: dimension i turns with dimension i + rotary/2; dimensions from `rotary`
    on are left as they are. On GPUs a token whose slot is -1 (padding) is written nowhere, positions and slots are not
    checked, and `qkv`, `q_out` and the norms' weights may be float16 or bfloat16; a cache in 8 bits gets codes and
    scales.

    Args:
        qkv: `[num_tokens, (Hq + 2 Hkv) * head_dim]` float32: a token's Q heads, its K heads, its V heads.
            Q and K are scratch afterwards.
        positions: `[num_tokens]` int64, rows of `cos` and `sin`.
        slot_mapping: `[num_tokens]` int64, block * block_size + offset.
        cos: `[max_positions, rotary / 2]` float32.
        sin: like `cos`.
        kv_cache: written at `layer`.
        layer: the layer's index in the cache.
        q_out: `[num_tokens, Hq, head_dim]` float32.
        q_norm: `[head_dim]` float32, the RMSNorm weight of each Q head (Qwen3).
        k_norm: the same for each K head.
        eps: of those norms.

    Returns:
        `q_out`.

    Raises:
        ValueError: a shape or dtype is not as above, or a position, slot or layer is out of range.
    """
    launcher("rope_kv_write", qkv.device.type)(
        qkv, positions, slot_mapping, cos, sin, kv_cache, layer, q_out, q_norm, k_norm, eps
    )
    return q_out
