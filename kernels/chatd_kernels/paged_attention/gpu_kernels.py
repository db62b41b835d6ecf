"""The kernels of attention on GPUs.

A tile is a few consecutive tokens of one sequence. A program takes one tile, one KV head and one split of the tile's
positions: the query heads that share the KV head are packed beside the tokens into the rows of one matrix, so that a
decoded token fills more than one row. Its softmax runs over blocks of positions with a running maximum (Milakov and
Gimelshein 2018; Dao 2023, FlashAttention-2), in base 2. Where positions are split over programs, a second kernel merges
what they found by their maxima and sums (Dao et al. 2023, Flash-Decoding).

Blocks of positions begin at multiples of BLOCK_N, whatever the tile: a position outside a row's sight adds exact zeros
to it, so a row's bits do not depend on the tile that it is in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chatd_kernels.kv_codes import decode, factor_of


@triton.jit
def _attend_block(
    b_acc,
    b_max,
    b_sum,
    b_q,
    b_position,
    p_k_head,
    p_k_scale_head,
    p_table,
    i_begin,
    i_stop,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add the positions from `i_begin` on, at most BLOCK_N and below `i_stop`, to what rows have gathered."""
    o_n = i_begin + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n < i_stop
    if IS_MASKED:
        # [BLOCK_N]
        b_block = tl.load(p_table + o_n // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64)
    else:
        # [BLOCK_N]
        b_block = tl.load(p_table + o_n // BLOCK_SIZE).to(tl.int64)
    b_tile = b_block * BLOCK_STRIDE
    b_row = b_tile + (o_n % BLOCK_SIZE) * HEAD_DIM
    p_k = p_k_head + b_row[None, :] + o_d[:, None]
    p_v = p_k_head + KV_STRIDE + b_row[:, None] + o_d[None, :]
    # Slots beyond the sequence may hold anything, NaN too; a weight of 0 would not hide that.
    if IS_MASKED:
        # [BLOCK_D, BLOCK_N]
        b_k = tl.load(p_k, mask=m_n[None, :] & (o_d < HEAD_DIM)[:, None], other=0)
        # [BLOCK_N, BLOCK_D]
        b_v = tl.load(p_v, mask=m_n[:, None] & (o_d < HEAD_DIM)[None, :], other=0)
    elif BLOCK_D != HEAD_DIM:
        # [BLOCK_D, BLOCK_N]
        b_k = tl.load(p_k, mask=(o_d < HEAD_DIM)[:, None], other=0)
        # [BLOCK_N, BLOCK_D]
        b_v = tl.load(p_v, mask=(o_d < HEAD_DIM)[None, :], other=0)
    else:
        # [BLOCK_D, BLOCK_N]
        b_k = tl.load(p_k)
        # [BLOCK_N, BLOCK_D]
        b_v = tl.load(p_v)
    if FORMAT != "float":
        b_k = decode(b_k, b_q.dtype, FORMAT)
        b_v = decode(b_v, b_q.dtype, FORMAT)

    # [BLOCK_M, BLOCK_N]
    b_s = tl.dot(b_q, b_k, input_precision="ieee")
    if FORMAT != "float":
        # A tile's scales lie behind its codes; every stride is a multiple of their 4 bytes.
        p_scale = p_k_scale_head + (b_tile + BLOCK_SIZE * HEAD_DIM) // 4 + o_n % BLOCK_SIZE
        if IS_MASKED:
            # [BLOCK_N], [BLOCK_N]
            b_k_scale = tl.load(p_scale, mask=m_n, other=0.0)
            b_v_scale = tl.load(p_scale + KV_STRIDE // 4, mask=m_n, other=0.0)
        else:
            # [BLOCK_N], [BLOCK_N]
            b_k_scale = tl.load(p_scale)
            b_v_scale = tl.load(p_scale + KV_STRIDE // 4)
        b_s *= (b_k_scale * factor_of(FORMAT))[None, :]
    if SOFT_CAP > 0:
        # cap tanh(s / cap) = cap (1 - 2 / (1 + exp(2 s / cap))); `scale` is that of s in base 2.
        b_s = (SOFT_CAP * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + tl.exp2(b_s * (scale * (2.0 / SOFT_CAP)))))
    else:
        b_s *= scale
    if IS_MASKED:
        m_s = (o_n[None, :] <= b_position[:, None]) & m_n[None, :]
        if WINDOW > 0:
            m_s = m_s & (o_n[None, :] > b_position[:, None] - WINDOW)
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    b_base = b_new_max
    if IS_MASKED:
        # A row that has seen nothing yet keeps zeros.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_alpha = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_alpha[:, None]
    if FORMAT != "float":
        b_p *= (b_v_scale * factor_of(FORMAT))[None, :]
    b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, b_new_max, b_sum


@triton.jit
def _merge_weights(b_max, b_new_max):
    """What the two sides of a merge count: maxima to weights relative to the new maximum, 0 where nothing was seen."""
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    return tl.exp2(b_max - b_base)


@triton.jit(do_not_specialize=["layer", "table_stride", "num_splits"])
def attend_tiles(
    q,
    cache,
    scales,
    tiles,
    block_tables,
    out,
    partials,
    partial_max,
    partial_sum,
    scale,
    layer,
    table_stride,
    num_splits,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """softmax(scale Q Kᵀ) V of a tile's rows over the positions of one split, or over all.

    A tile is (row of the block table, first token of the batch, tokens, position of the first). SEGMENT is 0 where a
    tile's positions are divided evenly among its splits. Else a split is one segment of so many positions; where they
    are not split, one program gathers segment after segment and merges them as `merge_splits` does in order.
    """
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    i_tile = tl.program_id(0)
    i_head = tl.program_id(1)
    i_split = tl.program_id(2)
    p_tile = tiles + i_tile * 4
    i_table, i_first = tl.load(p_tile), tl.load(p_tile + 1).to(tl.int64)
    num_rows, i_position = tl.load(p_tile + 2), tl.load(p_tile + 3)
    if num_rows == 0:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_row = o_m // GROUP
    m_m = o_row < num_rows
    b_position = i_position + o_row
    b_place = ((i_first + o_row) * NUM_Q_HEADS + i_head * GROUP + o_m % GROUP) * HEAD_DIM
    m_q = m_m[:, None] & (o_d < HEAD_DIM)[None, :]
    # [BLOCK_M, BLOCK_D]
    b_q = tl.load(q + b_place[:, None] + o_d[None, :], mask=m_q, other=0.0)

    i_end = i_position + num_rows
    i_low = 0
    if WINDOW > 0:
        i_low = tl.maximum(i_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if SEGMENT == 0:
        i_size = tl.cdiv(tl.cdiv(i_end - i_low, num_splits), BLOCK_N) * BLOCK_N
        i_begin = i_low + i_split * i_size
        i_stop = tl.minimum(i_begin + i_size, i_end)
    elif IS_SPLIT:
        i_begin = tl.maximum(i_split * SEGMENT, i_low)
        i_stop = tl.minimum((i_split + 1) * SEGMENT, i_end)
    else:
        i_begin = i_low
        i_stop = i_end

    p_table = block_tables + i_table.to(tl.int64) * table_stride
    i_head_place = layer.to(tl.int64) * LAYER_STRIDE + i_head * HEAD_STRIDE
    p_k_head = cache + i_head_place
    p_k_scale_head = scales + i_head_place // 4

    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SEGMENT > 0:
        if IS_SPLIT:
            for i_n in range(i_begin, i_stop, BLOCK_N):
                b_acc, b_max, b_sum = _attend_block(
                    b_acc, b_max, b_sum, b_q, b_position, p_k_head, p_k_scale_head, p_table, i_n, i_stop, scale,
                    HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, KV_STRIDE, WINDOW, SOFT_CAP, FORMAT, True,
                )  # fmt: skip
        else:
            for i_segment in range(i_begin // SEGMENT, tl.cdiv(i_stop, SEGMENT)):
                b_part = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
                b_part_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                b_part_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
                i_segment_stop = tl.minimum((i_segment + 1) * SEGMENT, i_stop)
                for i_n in range(tl.maximum(i_segment * SEGMENT, i_begin), i_segment_stop, BLOCK_N):
                    b_part, b_part_max, b_part_sum = _attend_block(
                        b_part, b_part_max, b_part_sum, b_q, b_position, p_k_head, p_k_scale_head, p_table, i_n,
                        i_segment_stop, scale,
                        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, KV_STRIDE, WINDOW, SOFT_CAP, FORMAT, True,
                    )  # fmt: skip
                b_new_max = tl.maximum(b_max, b_part_max)
                b_old_weight = _merge_weights(b_max, b_new_max)
                b_part_weight = _merge_weights(b_part_max, b_new_max)
                b_acc = b_acc * b_old_weight[:, None] + b_part * b_part_weight[:, None]
                b_sum = b_sum * b_old_weight + b_part_sum * b_part_weight
                b_max = b_new_max
    else:
        # Every row sees the positions up to the first row's.
        i_full = i_begin
        if WINDOW == 0:
            i_full = tl.maximum(i_begin, tl.minimum(i_stop, i_position + 1) // BLOCK_N * BLOCK_N)
        for i_n in range(i_begin, i_full, BLOCK_N):
            b_acc, b_max, b_sum = _attend_block(
                b_acc, b_max, b_sum, b_q, b_position, p_k_head, p_k_scale_head, p_table, i_n, i_stop, scale,
                HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, KV_STRIDE, WINDOW, SOFT_CAP, FORMAT, False,
            )  # fmt: skip
        for i_n in range(i_full, i_stop, BLOCK_N):
            b_acc, b_max, b_sum = _attend_block(
                b_acc, b_max, b_sum, b_q, b_position, p_k_head, p_k_scale_head, p_table, i_n, i_stop, scale,
                HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, KV_STRIDE, WINDOW, SOFT_CAP, FORMAT, True,
            )  # fmt: skip

    if IS_SPLIT:
        i_base = ((i_tile * NUM_KV_HEADS + i_head).to(tl.int64) * num_splits + i_split) * (TILE_ROWS * GROUP)
        tl.store(partial_max + i_base + o_m, b_max, mask=m_m)
        tl.store(partial_sum + i_base + o_m, b_sum, mask=m_m)
        if i_begin < i_stop:
            tl.store(partials + (i_base + o_m)[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=m_q)
    else:
        tl.store(out + b_place[:, None] + o_d[None, :], (b_acc / b_sum[:, None]).to(out.dtype.element_ty), mask=m_q)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    tiles,
    out,
    partials,
    partial_max,
    partial_sum,
    num_splits,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_ORDERED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row and query head: Σ weight partial / Σ weight sum, weight = 2^(maximum - largest maximum).

    In order, one split after another with a running maximum; else BLOCK_S splits at once.
    """
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    i_tile, i_row = tl.program_id(0) // TILE_ROWS, tl.program_id(0) % TILE_ROWS
    i_head = tl.program_id(1)
    p_tile = tiles + i_tile * 4
    i_first, num_rows = tl.load(p_tile + 1).to(tl.int64), tl.load(p_tile + 2)
    if i_row >= num_rows:
        return
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    i_base = (i_tile * NUM_KV_HEADS + i_head // GROUP).to(tl.int64) * num_splits * (TILE_ROWS * GROUP)
    i_base += i_row * GROUP + i_head % GROUP
    b_acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_max = float("-inf")
    b_sum = 0.0
    if IS_ORDERED:
        for i_split in range(num_splits):
            i_part = i_base + i_split * (TILE_ROWS * GROUP)
            b_part_max = tl.load(partial_max + i_part)
            b_new_max = tl.maximum(b_max, b_part_max)
            b_old_weight = _merge_weights(b_max, b_new_max)
            b_part_weight = _merge_weights(b_part_max, b_new_max)
            # What no program wrote is not read: a split that saw nothing wrote its maximum only.
            m_part = tl.where(m_d, b_part_max, float("-inf")) > float("-inf")
            # [BLOCK_D]
            b_part = tl.load(partials + i_part * HEAD_DIM + o_d, mask=m_part, other=0.0)
            b_acc = b_acc * b_old_weight + b_part * b_part_weight
            b_sum = b_sum * b_old_weight + tl.load(partial_sum + i_part) * b_part_weight
            b_max = b_new_max
    else:
        for i_split in range(0, num_splits, BLOCK_S):
            o_s = i_split + tl.arange(0, BLOCK_S)
            m_s = o_s < num_splits
            o_part = i_base + o_s * (TILE_ROWS * GROUP)
            # [BLOCK_S]
            b_part_max = tl.load(partial_max + o_part, mask=m_s, other=float("-inf"))
            # [BLOCK_S]
            b_part_sum = tl.load(partial_sum + o_part, mask=m_s, other=0.0)
            m_part = (b_part_max > float("-inf"))[:, None] & m_d[None, :]
            # [BLOCK_S, BLOCK_D]
            b_part = tl.load(partials + o_part[:, None] * HEAD_DIM + o_d[None, :], mask=m_part, other=0.0)
            b_new_max = tl.maximum(b_max, tl.max(b_part_max, axis=0))
            b_old_weight = _merge_weights(b_max, b_new_max)
            b_weight = _merge_weights(b_part_max, b_new_max)
            b_acc = b_acc * b_old_weight + tl.sum(b_part * b_weight[:, None], axis=0)
            b_sum = b_sum * b_old_weight + tl.sum(b_part_sum * b_weight, axis=0)
            b_max = b_new_max
    p_out = out + ((i_first + i_row) * NUM_Q_HEADS + i_head) * HEAD_DIM + o_d
    tl.store(p_out, (b_acc / b_sum).to(out.dtype.element_ty), mask=m_d)
