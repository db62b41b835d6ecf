"""Attention over the paged KV cache, for decode rows and prefill chunks alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from chatd_kernels.dispatch import backend_of, launcher
from chatd_kernels.kv_cache import KVCache, KVCacheLayout
from chatd_kernels.paged_attention.batch import BlockTables

if TYPE_CHECKING:
    from chatd_kernels.paged_attention.gpu_schedule import GpuAttentionMetadata
    from chatd_kernels.paged_attention.schedule import AttentionMetadata

    Metadata = AttentionMetadata | GpuAttentionMetadata

__all__ = ["build_metadata", "paged_attention"]


def build_metadata(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    num_computed: Sequence[int] | npt.NDArray[np.integer],
    block_tables: BlockTables,
    *,
    layout: KVCacheLayout,
    num_q_heads: int,
    device: torch.device | str = "cpu",
    is_deterministic: bool = False,
) -> Any:
    """Build what attention needs to know of one step: an `AttentionMetadata`, or a `GpuAttentionMetadata` for a GPU.

    Args:
        cu_seqlens: `[S + 1]`; sequence s has the rows `cu_seqlens[s]` to `cu_seqlens[s + 1]` of the batch.
        num_computed: `[S]` positions of each sequence before its first row.
        block_tables: each sequence's block ids, in order, as a list of S or padded to `[S, max_blocks]`.
        layout: of the cache.
        num_q_heads: query heads, a multiple of the layout's KV heads.
        device: of the cache.
        is_deterministic: whether a row's result may depend on nothing but its own sequence; on CPUs it never
            depends on more.

    Raises:
        ValueError: the shapes do not agree, or a block table is too short for its sequence.
    """
    device = torch.device(device)
    build = launcher("paged_attention", device.type, "build_metadata")
    # The CPU's kernels know no other way.
    options = {} if backend_of(device.type) == "cpu" else {"is_deterministic": is_deterministic}
    return build(
        cu_seqlens, num_computed, block_tables, layout=layout, num_q_heads=num_q_heads, device=device, **options
    )


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    metadata: Metadata,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Write each token's causal attention over its sequence's cached K and V to `out`.

    A token at position p sees positions 0 to p, or the last `window` of them; slots beyond are not read into any
    result. On CPUs its result depends on nothing else: not on the batch, the tiles, the chunk it came in, or who shares
    its blocks; on GPUs so it is with metadata of the deterministic mode.

    Args:
        q: `[num_tokens, Hq, head_dim]`, rotated; float32, on GPUs of the cache's dtype, or any if that has 8 bits.
        kv_cache: holds K and V of every position up to the token's own.
        layer: the layer's index in the cache.
        metadata: of this step, from `build_metadata` for this device.
        out: `[num_tokens, Hq * head_dim]`, of the same dtype.
        scale: of the scores, usually `head_dim ** -0.5`.
        window: positions that a token sees, its own included; None for all.
        soft_cap: c of the scores' c tanh(s / c) before the softmax; None for none. GPUs only.

    Returns:
        `out`.

    Raises:
        ValueError: a shape or dtype is not as above, the layer is out of range, or the metadata is of another cache.
    """
    launcher("paged_attention", q.device.type)(q, kv_cache, layer, metadata, out, scale, window, soft_cap)
    return out
