"""The kernels of matrix products on GPUs.

A program computes a tile of some rows and outputs. Weights are the left operand, so that few rows waste little of a
matrix instruction and int8 codes become numbers in registers. The input features are cut into segments, each summed
from zero and added to the sum of those before it: by one program, or by a program a segment and a second kernel. Both
add the same numbers in the same order.

Sizes are arguments, so that one compilation serves every layer; they come as multiples of what divides them, so that
the compiler knows how addresses are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chatd_kernels.kv_codes import decode

FEATURES = tl.constexpr(16)
"""Input features are a multiple of this."""


@triton.jit
def _sum_features(
    p_w,
    p_x,
    m_m,
    o_k,
    i_begin,
    i_stop,
    b_part,
    IS_MASKED: tl.constexpr,
    HAS_CODES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the products of the input features from `i_begin` to `i_stop`."""
    for i_k in range(i_begin, i_stop, BLOCK_K):
        # Rows that are not there are not read: of few rows, the repeated ones would cost as much as the weights.
        if IS_MASKED:
            # [BLOCK_N, BLOCK_K]
            b_w = tl.load(p_w + i_k, mask=(o_k < i_stop - i_k)[None, :], other=0.0)
            # [BLOCK_K, BLOCK_M]
            b_x = tl.load(p_x + i_k, mask=m_m[None, :] & (o_k < i_stop - i_k)[:, None], other=0.0)
        else:
            # [BLOCK_N, BLOCK_K]
            b_w = tl.load(p_w + i_k)
            # [BLOCK_K, BLOCK_M]
            b_x = tl.load(p_x + i_k, mask=m_m[None, :], other=0.0)
        if HAS_CODES:
            b_w = decode(b_w, b_x.dtype, "int8")
        b_part = tl.dot(b_w, b_x, b_part, input_precision="ieee")
    return b_part


@triton.jit(do_not_specialize=["num_rows", "in_units", "out_units", "segment_steps"])
def product_tiles(
    x,
    weight,
    scales,
    bias,
    out,
    partials,
    num_rows,
    in_units,
    out_units,
    segment_steps,
    OUT_UNIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`out[m, n] = Σ_k x[m, k] weight[n, k]`, times `scales[n]`, plus `bias[n]`; or a segment's sums alone.

    There are `in_units * FEATURES` input features and `out_units * OUT_UNIT` outputs; a segment has `segment_steps`
    times BLOCK_K features. Split, a program takes one segment; gathered, all of them; else there is only one.
    """
    num_in, num_out = in_units * FEATURES, out_units * OUT_UNIT
    # Programs that run together share GROUP tiles of rows, and pass the weights' tiles.
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    i_group = tl.program_id(0) // (GROUP * num_n)
    group_size = tl.minimum(num_m - i_group * GROUP, GROUP)
    i_inside = tl.program_id(0) % (GROUP * num_n)
    i_m = i_group * GROUP + i_inside % group_size
    i_n = i_inside // group_size

    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    first_m = i_m.to(tl.int64) * BLOCK_M
    first_n = i_n.to(tl.int64) * BLOCK_N
    left_m, left_n = num_rows - i_m * BLOCK_M, num_out - i_n * BLOCK_N
    m_m = o_m < left_m
    p_x = x + first_m * num_in + o_m[None, :] * num_in + o_k[:, None]
    # What lies beyond the outputs repeats the last: its sums are not stored.
    p_w = weight + first_n * num_in + tl.minimum(o_n, left_n - 1)[:, None] * num_in + o_k[None, :]

    size = segment_steps * BLOCK_K
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if IS_GATHERED:
        for i_begin in range(0, num_in, size):
            i_stop = tl.minimum(i_begin + size, num_in)
            b_part = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            b_sum += _sum_features(p_w, p_x, m_m, o_k, i_begin, i_stop, b_part, IS_MASKED, HAS_SCALES, BLOCK_K)
    elif IS_SPLIT:
        i_begin = tl.program_id(1) * size
        i_stop = tl.minimum(i_begin + size, num_in)
        b_sum = _sum_features(p_w, p_x, m_m, o_k, i_begin, i_stop, b_sum, IS_MASKED, HAS_SCALES, BLOCK_K)
    else:
        b_sum = _sum_features(p_w, p_x, m_m, o_k, 0, num_in, b_sum, IS_MASKED, HAS_SCALES, BLOCK_K)

    m_n = o_n < left_n
    m_out = m_m[None, :] & m_n[:, None]
    o_out = o_m[None, :] * num_out + o_n[:, None]
    if IS_SPLIT:
        p_part = partials + (tl.program_id(1).to(tl.int64) * num_rows + first_m) * num_out + first_n
        tl.store(p_part + o_out, b_sum, mask=m_out)
    else:
        if HAS_SCALES:
            b_sum *= tl.load(scales + first_n + o_n, mask=m_n, other=0.0)[:, None]
        if HAS_BIAS:
            b_sum += tl.load(bias + first_n + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        tl.store(out + first_m * num_out + first_n + o_out, b_sum.to(out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["num_rows", "out_units"])
def sum_segments(
    partials,
    scales,
    bias,
    out,
    num_rows,
    out_units,
    OUT_UNIT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK outputs of one row: the segments' sums, added in order; times `scales`, plus `bias`."""
    num_out = out_units * OUT_UNIT
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < num_out
    # [BLOCK]
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i_segment in tl.static_range(NUM_SEGMENTS):
        b_sum += tl.load(partials + (i_segment * num_rows + i_row) * num_out + o_n, mask=m_n, other=0.0)
    if HAS_SCALES:
        b_sum *= tl.load(scales + o_n, mask=m_n, other=0.0)
    if HAS_BIAS:
        b_sum += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out + i_row * num_out + o_n, b_sum.to(out.dtype.element_ty), mask=m_n)
