"""The launcher of attention on CPUs. The kernel is in `items.py`, its arithmetic in `rows.py`."""

from __future__ import annotations

import torch

from chatd_kernels.checks import check_key_group, check_tensor
from chatd_kernels.kv_cache import GROUP, KVCache
from chatd_kernels.paged_attention.items import attention_items
from chatd_kernels.paged_attention.schedule import AttentionMetadata, build_metadata
from chatd_kernels.runtime import float_bits

__all__ = ["build_metadata", "paged_attention"]

_LOG2_E = 1.4426950408889634
# Below this many (row, position) pairs a parallel region costs more than it saves.
_PARALLEL_FROM = 4096


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """The contract of `chatd_kernels.paged_attention.paged_attention`; no scores are capped here."""
    layout = kv_cache.layout
    num_tokens, num_q_heads = metadata.num_tokens, metadata.num_q_heads
    if layout != metadata.layout:
        raise ValueError(f"metadata was built for {metadata.layout}, the cache is {layout}")
    check_key_group(layout, GROUP)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not in the cache of {layout.num_layers} layers")
    if soft_cap is not None:
        raise ValueError(f"soft cap {soft_cap}: scores are capped on GPUs only")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is below 1")
    if metadata.max_block >= kv_cache.num_blocks:
        raise ValueError(f"block {metadata.max_block} is not in the cache of {kv_cache.num_blocks} blocks")
    attention_items.launch(
        metadata.num_items * layout.num_kv_heads > 1 and metadata.work * num_q_heads >= _PARALLEL_FROM,
        check_tensor("q", q, (num_tokens, num_q_heads, layout.head_dim)),
        check_tensor("out", out, (num_tokens, num_q_heads * layout.head_dim)),
        kv_cache.data.data_ptr() + layer * layout.layer_stride * layout.element_bytes,
        int(layout.dtype == torch.float16),
        layout.block_stride,
        layout.kv_stride,
        layout.head_stride,
        layout.block_size,
        layout.head_dim,
        num_q_heads,
        layout.num_kv_heads,
        *metadata.kernel_arguments,
        1 << 40 if window is None else window,
        float_bits(scale * _LOG2_E),
        num_threads=metadata.num_threads,
    )
