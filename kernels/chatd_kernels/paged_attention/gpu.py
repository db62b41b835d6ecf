"""The launcher of attention on GPUs, and its metadata. The kernels are in `gpu_kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chatd_kernels.checks import check_key_group
from chatd_kernels.gpu_device import DeviceFacts, device_facts
from chatd_kernels.kv_cache import KVCache, KVCacheLayout
from chatd_kernels.kv_codes import code_format
from chatd_kernels.launch import Launch, check_activation, next_power_of_2
from chatd_kernels.paged_attention.batch import BlockTables, check_batch
from chatd_kernels.paged_attention.gpu_kernels import attend_tiles, merge_splits
from chatd_kernels.paged_attention.gpu_schedule import GpuAttentionMetadata, TileBatch, build_tiles, tile_shapes

_LOG2_E = 1.4426950408889634
LARGEST_HEAD_DIM = 256
_MERGED_AT_ONCE = 16  # splits


def build_metadata(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    num_computed: Sequence[int] | npt.NDArray[np.integer],
    block_tables: BlockTables,
    *,
    layout: KVCacheLayout,
    num_q_heads: int,
    device: torch.device,
    is_deterministic: bool = False,
) -> GpuAttentionMetadata:
    """The contract of `chatd_kernels.paged_attention.build_metadata`, for one step that no graph replays."""
    facts = device_facts(device)
    shapes = tile_shapes(layout, num_q_heads, facts, is_deterministic=is_deterministic)
    batch = check_batch(cu_seqlens, num_computed, block_tables, layout.block_size)
    host = build_tiles(batch, shapes, layout.num_kv_heads, facts)
    return GpuAttentionMetadata.from_host(host, shapes, layout, num_q_heads, device)


def launches(
    q: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    metadata: GpuAttentionMetadata,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    facts: DeviceFacts,
) -> list[Launch]:
    """What `paged_attention` starts on such a device.

    Raises:
        ValueError: a shape or dtype is not supported, the layer is out of range, or the metadata is of another cache.
    """
    layout, num_q_heads = kv_cache.layout, metadata.num_q_heads
    if layout != metadata.layout:
        raise ValueError(f"metadata was built for {metadata.layout}, the cache is {layout}")
    check_key_group(layout, 1)
    if layout.head_dim > LARGEST_HEAD_DIM:
        raise ValueError(f"head dimension {layout.head_dim} is beyond {LARGEST_HEAD_DIM}")
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not in the cache of {layout.num_layers} layers")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is below 1")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft cap {soft_cap} is not above 0")
    check_activation("q", q, (metadata.num_tokens, num_q_heads, layout.head_dim))
    check_activation("out", out, (metadata.num_tokens, num_q_heads * layout.head_dim))
    if not layout.is_quantized and q.dtype != layout.dtype:
        raise ValueError(f"q is {q.dtype}, the cache {layout.dtype}: both must be the same, or the cache in 8 bits")
    common: dict[str, Any] = {
        "q": q,
        "cache": kv_cache.data,
        "scales": kv_cache.scales if layout.is_quantized else kv_cache.data,
        "block_tables": metadata.block_tables,
        "out": out,
        "scale": scale * _LOG2_E,
        "layer": layer,
        "table_stride": metadata.block_tables.stride(0),
        "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": layout.head_dim,
        "BLOCK_SIZE": layout.block_size,
        "BLOCK_STRIDE": layout.block_stride,
        "LAYER_STRIDE": layout.layer_stride,
        "KV_STRIDE": layout.kv_stride,
        "HEAD_STRIDE": layout.head_stride,
        "FORMAT": code_format(layout.dtype, facts),
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap or 0.0,
        "SEGMENT": metadata.segment,
        "BLOCK_D": next_power_of_2(layout.head_dim),
    }
    found: list[Launch] = []
    for batch in (metadata.decode, metadata.prefill):
        if len(batch.tiles):
            found += _batch_launches(batch, common)
    return found


def _batch_launches(batch: TileBatch, common: dict[str, Any]) -> list[Launch]:
    """The launches for the tiles of one kind."""
    shape, num_kv_heads, segment = batch.shape, common["NUM_KV_HEADS"], common["SEGMENT"]
    is_split = batch.partials.numel() > 0
    # Where bits count, a product and a sum are rounded alike wherever they are compiled.
    fuses = segment == 0
    partials = {
        "partials": batch.partials,
        "partial_max": batch.partial_max,
        "partial_sum": batch.partial_sum,
        "num_splits": batch.num_splits,
        "TILE_ROWS": shape.tokens,
    }
    attend = Launch(
        attend_tiles,
        (len(batch.tiles), num_kv_heads, batch.num_splits),
        {
            **common,
            **partials,
            "tiles": batch.tiles,
            "IS_SPLIT": is_split,
            "BLOCK_M": shape.rows,
            "BLOCK_N": shape.positions,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        fuses_multiply_add=fuses,
    )
    if not is_split:
        return [attend]
    merge = Launch(
        merge_splits,
        (len(batch.tiles) * shape.tokens, common["NUM_Q_HEADS"]),
        {
            **{name: common[name] for name in ("out", "NUM_Q_HEADS", "NUM_KV_HEADS", "HEAD_DIM", "BLOCK_D")},
            **partials,
            "tiles": batch.tiles,
            "IS_ORDERED": segment > 0,
            "BLOCK_S": _MERGED_AT_ONCE,
        },
        fuses_multiply_add=fuses,
    )
    return [attend, merge]


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    metadata: GpuAttentionMetadata,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """The contract of `chatd_kernels.paged_attention.paged_attention`.

    `q` and `out` are of the cache's dtype, or of any float dtype where the cache is in 8 bits. A NaN in K or V spoils
    the rows that see it, and may spoil others of the same sequence that are computed in the same call.
    """
    for launch in launches(
        q, kv_cache, layer, metadata, out, scale, window, soft_cap, facts=device_facts(q.device)
    ):  # fmt: skip
        launch.run()
