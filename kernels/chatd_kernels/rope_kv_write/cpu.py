"""Rotary embedding and KV write on CPUs: one pass over each token's heads; an item is a few tokens."""

from __future__ import annotations

import numpy as np
import torch

from chatd_kernels.checks import check_key_group, check_tensor
from chatd_kernels.jit import jit
from chatd_kernels.kv_cache import GROUP, KVCache
from chatd_kernels.rms_norm.cpu import norm_row
from chatd_kernels.runtime import argument, float_bits, kernel, next_item
from chatd_kernels.vector import (
    fetch_add,
    load_f32,
    load_f64,
    load_i64,
    store_f32,
    vfma,
    vload,
    vmul,
    vscatter,
    vscatter_half,
    vsplat,
    vstore,
    vstore_half,
    vsub,
)

_TOKENS_PER_ITEM = 4
_PARALLEL_FROM = 1 << 15


@jit
def _rotate(source: int, target: int, cos: int, sin: int, half: int, head_dim: int) -> None:
    """Rotate one head; `target` may be `source`."""
    zero = vsplat(np.float32(0.0))
    whole = half // 16 * 64
    high = half * 4
    for offset in range(0, whole, 64):
        a, b = vload(source + offset), vload(source + high + offset)
        c, s = vload(cos + offset), vload(sin + offset)
        vstore(target + offset, vfma(a, c, vsub(zero, vmul(b, s))))
        vstore(target + high + offset, vfma(b, c, vmul(a, s)))
    for offset in range(whole, high, 4):
        x, y = load_f32(source + offset), load_f32(source + high + offset)
        c1, s1 = load_f32(cos + offset), load_f32(sin + offset)
        store_f32(target + offset, x * c1 - y * s1)
        store_f32(target + high + offset, y * c1 + x * s1)
    if target != source:
        for offset in range(2 * high, head_dim * 4, 4):
            store_f32(target + offset, load_f32(source + offset))


@kernel
def rope_kv_write_tokens(frame: int) -> None:
    """Items are runs of tokens. K is normed and rotated inside `qkv` itself, then scattered into its tile.

    A token whose position or slot is out of range is skipped and counted in the frame's second counter.
    """
    qkv, positions, slots = argument(frame, 0), argument(frame, 1), argument(frame, 2)
    cos, sin, half = argument(frame, 3), argument(frame, 4), argument(frame, 5)
    cache, is_half = argument(frame, 6), argument(frame, 7) != 0
    block_stride, kv_stride = argument(frame, 8), argument(frame, 9)
    head_stride, block_size = argument(frame, 10), argument(frame, 11)
    q_out, q_norm, k_norm = (argument(frame, 12), argument(frame, 13), argument(frame, 14))
    num_tokens, num_q, num_kv, head_dim = (
        argument(frame, 15),
        argument(frame, 16),
        argument(frame, 17),
        argument(frame, 18),
    )
    max_positions, num_slots = argument(frame, 19), argument(frame, 20)
    eps = load_f64(frame + 23 * 8)
    head_bytes = head_dim * 4
    element = 2 if is_half else 4
    while True:
        first = next_item(frame) * 4
        if first >= num_tokens:
            break
        for token in range(first, min(first + 4, num_tokens)):
            source = qkv + token * (num_q + 2 * num_kv) * head_bytes
            position = load_i64(positions + token * 8)
            slot = load_i64(slots + token * 8)
            if position < 0 or position >= max_positions or slot < 0 or slot >= num_slots:
                fetch_add(frame + 8, 1)
                continue
            turn = position * half * 4
            block = slot // block_size
            offset = slot - block * block_size
            for head in range(num_q):
                q = source + head * head_bytes
                if q_norm != 0:
                    norm_row(q, q_norm, q, head_dim, eps)
                _rotate(q, q_out + (token * num_q + head) * head_bytes, cos + turn, sin + turn, half, head_dim)
            key_tile = cache + (block * block_stride + offset // 16 * head_dim * 16 + offset % 16) * element
            value_row = cache + (block * block_stride + kv_stride + offset * head_dim) * element
            for head in range(num_kv):
                k = source + (num_q + head) * head_bytes
                v = source + (num_q + num_kv + head) * head_bytes
                if k_norm != 0:
                    norm_row(k, k_norm, k, head_dim, eps)
                _rotate(k, k, cos + turn, sin + turn, half, head_dim)
                key_target = key_tile + head * head_stride * element
                value_target = value_row + head * head_stride * element
                for i in range(0, head_dim, 16):
                    if is_half:
                        vscatter_half(key_target + i * 32, 32, vload(k + i * 4))
                        vstore_half(value_target + i * 2, vload(v + i * 4))
                    else:
                        vscatter(key_target + i * 64, 64, vload(k + i * 4))
                        vstore(value_target + i * 4, vload(v + i * 4))


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """The contract of `chatd_kernels.rope_kv_write.rope_kv_write`; `qkv`'s Q and K are scratch afterwards."""
    layout = kv_cache.layout
    num_tokens, num_q_heads, head_dim = q_out.shape
    num_kv_heads = layout.num_kv_heads
    max_positions, half = cos.shape
    if head_dim != layout.head_dim or 2 * half > head_dim:
        raise ValueError(f"head dimension {head_dim} does not fit the cache's {layout.head_dim} or rotary {2 * half}")
    check_key_group(layout, GROUP)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not in the cache of {layout.num_layers} layers")
    refused = rope_kv_write_tokens.launch(
        num_tokens > _TOKENS_PER_ITEM and qkv.numel() >= _PARALLEL_FROM,
        check_tensor("qkv", qkv, (num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)),
        check_tensor("positions", positions, (num_tokens,), torch.int64),
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64),
        check_tensor("cos", cos, (max_positions, half)),
        check_tensor("sin", sin, (max_positions, half)),
        half,
        kv_cache.data.data_ptr() + layer * layout.layer_stride * layout.element_bytes,
        int(layout.dtype == torch.float16),
        layout.block_stride,
        layout.kv_stride,
        layout.head_stride,
        layout.block_size,
        check_tensor("q_out", q_out, (num_tokens, num_q_heads, head_dim)),
        0 if q_norm is None else check_tensor("q_norm", q_norm, (head_dim,)),
        0 if k_norm is None else check_tensor("k_norm", k_norm, (head_dim,)),
        num_tokens,
        num_q_heads,
        num_kv_heads,
        head_dim,
        max_positions,
        kv_cache.num_blocks * layout.block_size,
        float_bits(eps),
    )
    if refused:
        raise ValueError(f"{refused} of {num_tokens} tokens have a position or a slot out of range")
