"""Rotary embedding, per-head norms and the KV write on GPUs: a program takes some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chatd_kernels.checks import check_key_group, check_tensor
from chatd_kernels.gpu_device import DeviceFacts, device_facts
from chatd_kernels.kv_cache import KVCache
from chatd_kernels.kv_codes import code_format, encode, scale_of
from chatd_kernels.launch import Launch, check_activation, next_power_of_2

_HEADS = 8
"""Heads of a program."""


@triton.jit
def _norm_weights(q_norm, k_norm, o_d, m_d, is_q, is_k, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr):
    """The weight [H, D'] of each head and dimension; 1 where a head has no norm."""
    b_w = tl.full([is_q.shape[0], o_d.shape[0]], 1.0, dtype=tl.float32)
    if HAS_Q_NORM:
        # [D']
        b_q = tl.load(q_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_w = tl.where(is_q[:, None], b_q[None, :], b_w)
    if HAS_K_NORM:
        # [D']
        b_k = tl.load(k_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_w = tl.where(is_k[:, None], b_k[None, :], b_w)
    return b_w


@triton.jit
def _store_kv(cache, b_row, o_d, b_x, m_x, b_inverse, FORMAT: tl.constexpr):
    """Write a part [H, D'] of some heads' vectors to dimensions `o_d` of the rows at `b_row`, as numbers or codes."""
    p_x = cache + b_row[:, None] + o_d[None, :]
    if FORMAT == "float":
        tl.store(p_x, b_x.to(cache.dtype.element_ty), mask=m_x)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        # Where the inverse is 0 the vector may hold NaN, and no code may be made of it.
        b_scaled = tl.where(b_inverse[:, None] > 0.0, b_x * b_inverse[:, None], 0.0)
        tl.store(p_x, encode(tl.minimum(tl.maximum(b_scaled, -LARGEST), LARGEST), FORMAT), mask=m_x)


@triton.jit(do_not_specialize=["layer", "max_positions", "num_slots"])
def rope_kv_write_heads(
    qkv,
    positions,
    slot_mapping,
    cos,
    sin,
    cache,
    scales,
    q_out,
    q_norm,
    k_norm,
    eps,
    layer,
    max_positions,
    num_slots,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Turn (low, high) by the position's angles: low cos - high sin, high cos + low sin (Su et al. 2021)."""
    i_token = tl.program_id(0).to(tl.int64)
    # The heads of a token are its Q, its K, its V.
    o_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    m_h = o_h < NUM_Q_HEADS + 2 * NUM_KV_HEADS
    is_q = o_h < NUM_Q_HEADS
    is_k = (o_h >= NUM_Q_HEADS) & (o_h < NUM_Q_HEADS + NUM_KV_HEADS)
    is_v = (o_h >= NUM_Q_HEADS + NUM_KV_HEADS) & m_h
    HAS_REST: tl.constexpr = 2 * HALF < HEAD_DIM
    o_low = tl.arange(0, BLOCK_HALF)
    o_high = HALF + o_low
    o_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    m_half = o_low < HALF
    m_rest = o_rest < HEAD_DIM

    p_x = qkv + (i_token * (NUM_Q_HEADS + 2 * NUM_KV_HEADS) + o_h)[:, None] * HEAD_DIM
    m_x = m_h[:, None] & m_half[None, :]
    # [HEADS, BLOCK_HALF]
    b_low = tl.load(p_x + o_low[None, :], mask=m_x, other=0.0).to(tl.float32)
    # [HEADS, BLOCK_HALF]
    b_high = tl.load(p_x + o_high[None, :], mask=m_x, other=0.0).to(tl.float32)
    # [HEADS, BLOCK_REST]
    b_rest = tl.zeros([HEADS, BLOCK_REST], dtype=tl.float32)
    if HAS_REST:
        b_rest = tl.load(p_x + o_rest[None, :], mask=m_h[:, None] & m_rest[None, :], other=0.0).to(tl.float32)

    if HAS_Q_NORM or HAS_K_NORM:
        b_squares = tl.sum(b_low * b_low, axis=1) + tl.sum(b_high * b_high, axis=1)
        if HAS_REST:
            b_squares += tl.sum(b_rest * b_rest, axis=1)
        is_normed = (is_q & HAS_Q_NORM) | (is_k & HAS_K_NORM)
        b_factor = tl.where(is_normed, 1.0 / tl.sqrt(b_squares / HEAD_DIM + eps), 1.0)[:, None]
        b_low *= b_factor * _norm_weights(q_norm, k_norm, o_low, m_half, is_q, is_k, HAS_Q_NORM, HAS_K_NORM)
        b_high *= b_factor * _norm_weights(q_norm, k_norm, o_high, m_half, is_q, is_k, HAS_Q_NORM, HAS_K_NORM)
        if HAS_REST:
            b_rest *= b_factor * _norm_weights(q_norm, k_norm, o_rest, m_rest, is_q, is_k, HAS_Q_NORM, HAS_K_NORM)

    # Padding may name any position.
    i_position = tl.minimum(tl.maximum(tl.load(positions + i_token), 0), max_positions - 1)
    # [1, BLOCK_HALF]
    b_cos = tl.load(cos + i_position * HALF + o_low, mask=m_half, other=1.0)[None, :]
    # [1, BLOCK_HALF]
    b_sin = tl.load(sin + i_position * HALF + o_low, mask=m_half, other=0.0)[None, :]
    is_turned = (is_q | is_k)[:, None]
    b_new_low = tl.where(is_turned, b_low * b_cos - b_high * b_sin, b_low)
    b_new_high = tl.where(is_turned, b_high * b_cos + b_low * b_sin, b_high)

    p_q = q_out + (i_token * NUM_Q_HEADS + o_h)[:, None] * HEAD_DIM
    m_q = is_q[:, None] & m_half[None, :]
    tl.store(p_q + o_low[None, :], b_new_low.to(q_out.dtype.element_ty), mask=m_q)
    tl.store(p_q + o_high[None, :], b_new_high.to(q_out.dtype.element_ty), mask=m_q)
    if HAS_REST:
        tl.store(p_q + o_rest[None, :], b_rest.to(q_out.dtype.element_ty), mask=is_q[:, None] & m_rest[None, :])

    i_slot = tl.load(slot_mapping + i_token)
    # Q is written to no slot, and nothing of padding, whose slot is -1.
    b_slot = tl.where(is_k | is_v, i_slot, -1)
    m_kv = (b_slot >= 0) & (b_slot < num_slots)
    i_offset = i_slot % BLOCK_SIZE
    b_tile = (i_slot // BLOCK_SIZE) * BLOCK_STRIDE + layer.to(tl.int64) * LAYER_STRIDE
    b_tile += tl.where(
        is_v, KV_STRIDE + (o_h - NUM_Q_HEADS - NUM_KV_HEADS) * HEAD_STRIDE, (o_h - NUM_Q_HEADS) * HEAD_STRIDE
    )
    b_row = b_tile + i_offset * HEAD_DIM
    b_inverse = tl.zeros([HEADS], dtype=tl.float32)
    if FORMAT != "float":
        b_maximum = tl.maximum(tl.max(tl.abs(b_new_low), axis=1), tl.max(tl.abs(b_new_high), axis=1))
        b_spoilt = tl.sum(b_new_low * 0.0, axis=1) + tl.sum(b_new_high * 0.0, axis=1)
        if HAS_REST:
            b_maximum = tl.maximum(b_maximum, tl.max(tl.abs(b_rest), axis=1))
            b_spoilt += tl.sum(b_rest * 0.0, axis=1)
        b_scale, b_inverse = scale_of(b_maximum, b_spoilt, FORMAT)
        # Scales are float32 behind the tile's codes; every stride is a multiple of their 4 bytes.
        tl.store(scales + (b_tile + BLOCK_SIZE * HEAD_DIM) // 4 + i_offset, b_scale, mask=m_kv)
    m_kv_half = m_kv[:, None] & m_half[None, :]
    _store_kv(cache, b_row, o_low, b_new_low, m_kv_half, b_inverse, FORMAT)
    _store_kv(cache, b_row, o_high, b_new_high, m_kv_half, b_inverse, FORMAT)
    if HAS_REST:
        _store_kv(cache, b_row, o_rest, b_rest, m_kv[:, None] & m_rest[None, :], b_inverse, FORMAT)


def launches(
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
    *,
    facts: DeviceFacts,
) -> list[Launch]:
    """What `rope_kv_write` starts on such a device.

    Raises:
        ValueError: a shape or dtype is not supported, or the layer is out of range.
    """
    layout = kv_cache.layout
    num_tokens, num_q_heads, head_dim = q_out.shape
    max_positions, half = cos.shape
    if head_dim != layout.head_dim or 2 * half > head_dim:
        raise ValueError(f"head dimension {head_dim} does not fit the cache's {layout.head_dim} or rotary {2 * half}")
    check_key_group(layout, 1)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not in the cache of {layout.num_layers} layers")
    num_heads = num_q_heads + 2 * layout.num_kv_heads
    check_activation("qkv", qkv, (num_tokens, num_heads * head_dim))
    check_activation("q_out", q_out, (num_tokens, num_q_heads, head_dim))
    check_tensor("positions", positions, (num_tokens,), torch.int64)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    check_tensor("cos", cos, (max_positions, half))
    check_tensor("sin", sin, (max_positions, half))
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_activation(name, weight, (head_dim,))
    if num_tokens == 0:
        return []
    arguments = {
        "qkv": qkv,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "cos": cos,
        "sin": sin,
        "cache": kv_cache.data,
        "scales": kv_cache.scales if layout.is_quantized else cos,
        "q_out": q_out,
        "q_norm": cos if q_norm is None else q_norm,
        "k_norm": cos if k_norm is None else k_norm,
        "eps": eps,
        "layer": layer,
        "max_positions": max_positions,
        "num_slots": kv_cache.num_blocks * layout.block_size,
        "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_SIZE": layout.block_size,
        "BLOCK_STRIDE": layout.block_stride,
        "LAYER_STRIDE": layout.layer_stride,
        "KV_STRIDE": layout.kv_stride,
        "HEAD_STRIDE": layout.head_stride,
        "HAS_Q_NORM": q_norm is not None,
        "HAS_K_NORM": k_norm is not None,
        "FORMAT": code_format(layout.dtype, facts),
        "HEADS": _HEADS,
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK_REST": next_power_of_2(head_dim - 2 * half),
    }
    return [Launch(rope_kv_write_heads, (num_tokens, -(-num_heads // _HEADS)), arguments)]


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
    """The contract of `chatd_kernels.rope_kv_write.rope_kv_write`, without a check of positions and slots.

    A token whose slot is -1 (padding of a captured batch) is written nowhere; `qkv`, `q_out` and the norms' weights may
    each be float16, bfloat16 or float32; `qkv` stays as it is.
    """
    for launch in launches(
        qkv, positions, slot_mapping, cos, sin, kv_cache, layer, q_out, q_norm, k_norm, eps,
        facts=device_facts(qkv.device),
    ):  # fmt: skip
        launch.run()
