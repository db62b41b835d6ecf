"""The kernels before a draw: each row's likeliest token, how its weight is spread, and which tokens may be kept.

A program takes one part of one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chatd_kernels.sampling import state
from chatd_kernels.sampling.gpu_rows import (
    FLAGS,
    IS_BEAM,
    LOWEST_KEY,
    NUM_FIELDS,
    adjusted,
    drawn_row,
    float_field,
    key_id,
    load_logits,
    mass_of,
    order_key,
    row_key,
    scores_of,
    share_of,
    weight_of,
    wide_field,
)

MIN_P = tl.constexpr(state.MIN_P)
TOP_K = tl.constexpr(state.TOP_K)
TOP_P = tl.constexpr(state.TOP_P)
IS_GREEDY = tl.constexpr(state.IS_GREEDY)
HAS_LOGPROBS = tl.constexpr(state.HAS_LOGPROBS)
NUM_MARGINS = tl.constexpr(state.NUM_MARGINS)
MAX_CANDIDATES = tl.constexpr(state.MAX_CANDIDATES)


@triton.jit
def scan_parts(
    logits,
    table,
    words,
    biases,
    row_slots,
    part_keys,
    part_bad,
    part_max,
    part_sum,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):
    """A part's likeliest token, its logits that are not finite and, where wanted, its sum of exponentials."""
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_slot = tl.full((), 0, tl.int64)
    flags = tl.full((), 0, tl.int32)
    if not IS_PLAIN:
        i_slot += tl.load(row_slots + i_row)
        if i_slot < 0:
            return
        flags += tl.load(table + i_slot * NUM_FIELDS + FLAGS)
    p_fields = table + i_slot * NUM_FIELDS
    b_key = tl.full([BLOCK], LOWEST_KEY, tl.int64)
    b_bad = tl.zeros([BLOCK], tl.int32)
    b_max = tl.full([BLOCK], float("-inf"), tl.float32)
    for i_block in range(PART // BLOCK):
        o_v = i_part * PART + i_block * BLOCK + tl.arange(0, BLOCK)
        m_v = o_v < VOCAB
        # [BLOCK]
        b_x = load_logits(logits, i_row, o_v, VOCAB)
        b_bad += (m_v & ~(tl.abs(b_x) < float("inf"))).to(tl.int32)
        if not IS_PLAIN:
            b_max = tl.maximum(b_max, tl.where(m_v, b_x, float("-inf")))
            b_x = adjusted(b_x, o_v, words, biases, p_fields, i_slot, flags & ~IS_BEAM, VOCAB)
        b_key = tl.maximum(b_key, tl.where(m_v, order_key(b_x, o_v), LOWEST_KEY))
    i_out = i_row * NUM_PARTS + i_part
    tl.store(part_keys + i_out, tl.max(b_key, axis=0))
    tl.store(part_bad + i_out, tl.sum(b_bad, axis=0))
    if (flags & (HAS_LOGPROBS | IS_BEAM)) != 0:
        highest = tl.max(b_max, axis=0)
        b_sum = tl.zeros([BLOCK], tl.float32)
        for i_block in range(PART // BLOCK):
            o_v = i_part * PART + i_block * BLOCK + tl.arange(0, BLOCK)
            b_x = load_logits(logits, i_row, o_v, VOCAB)
            b_sum += tl.where(o_v < VOCAB, tl.exp(b_x - highest), 0.0)
        tl.store(part_max + i_out, highest)
        tl.store(part_sum + i_out, tl.sum(b_sum, axis=0))


@triton.jit
def weigh_parts(
    logits,
    table,
    words,
    biases,
    row_slots,
    part_keys,
    margins,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many tokens of a part lie within each margin below the row's maximum, and the sum of their weights.

    Where neither top-k nor top-p choose, what min-p drops weighs nothing.
    """
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_slot = tl.load(row_slots + i_row).to(tl.int64)
    if i_slot < 0:
        return
    p_fields = table + i_slot * NUM_FIELDS
    flags = tl.load(p_fields + FLAGS)
    if (flags & (IS_GREEDY | IS_BEAM)) != 0:
        return
    key = row_key(part_keys, i_row, NUM_PARTS, PARTS)
    row = drawn_row(logits, words, biases, p_fields, i_row, i_slot, flags, key)
    has_edge = (tl.load(p_fields + TOP_K) > 0) | (wide_field(p_fields, TOP_P) != 0)
    min_p = tl.where(has_edge, 0.0, float_field(p_fields, MIN_P))
    o_m = tl.arange(0, NUM_MARGINS)
    b_count = tl.zeros([NUM_MARGINS], tl.int64)
    b_mass = tl.zeros([NUM_MARGINS], tl.int64)
    for i_block in range(PART // BLOCK):
        o_v = i_part * PART + i_block * BLOCK + tl.arange(0, BLOCK)
        # [BLOCK]
        b_s = scores_of(row, o_v, VOCAB)
        b_w = weight_of(b_s)
        b_units = mass_of(tl.where(b_w >= min_p, b_w, 0.0))
        # [NUM_MARGINS, BLOCK]
        b_within = b_s[None, :] >= -margin_of(o_m)[:, None]
        b_count += tl.sum(b_within.to(tl.int32), axis=1)
        b_mass += tl.sum(tl.where(b_within, b_units[None, :], 0), axis=1)
    p_out = margins + (i_row * NUM_PARTS + i_part) * 2 * NUM_MARGINS + o_m
    tl.store(p_out, b_count)
    tl.store(p_out + NUM_MARGINS, b_mass)


@triton.jit
def margin_of(place):
    """The margin at a place, in nats; beyond the last one every weight is 0."""
    return (4 << place).to(tl.float32)


@triton.jit
def load_margins(margins, i_row, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr):
    """Counts and sums of weights of a row's parts."""
    o_p, o_m = tl.arange(0, PARTS), tl.arange(0, NUM_MARGINS)
    p_row = margins + (i_row * NUM_PARTS + o_p[:, None]) * 2 * NUM_MARGINS + o_m[None, :]
    # [PARTS, NUM_MARGINS], [PARTS, NUM_MARGINS]
    b_count = tl.load(p_row, mask=o_p[:, None] < NUM_PARTS, other=0)
    b_mass = tl.load(p_row + NUM_MARGINS, mask=o_p[:, None] < NUM_PARTS, other=0)
    return b_count, b_mass


@triton.jit
def choose_margin(b_count, b_mass, p_fields):
    """The first margin within which the edge must be, the tokens within it, and the weight of all tokens.

    Top-k's tokens are within it if so many are, or all that weigh anything; with top-p alone, if so much weight is.
    """
    o_m = tl.arange(0, NUM_MARGINS)
    # [NUM_MARGINS], [NUM_MARGINS]
    b_counts, b_masses = tl.sum(b_count, axis=0), tl.sum(b_mass, axis=0)
    whole = tl.max(b_masses, axis=0)
    top_k = tl.load(p_fields + TOP_K)
    needed = share_of(whole, wide_field(p_fields, TOP_P))
    b_enough = tl.where(top_k > 0, b_counts >= top_k, b_masses >= needed) | (o_m == NUM_MARGINS - 1)
    place = tl.min(tl.where(b_enough, o_m, NUM_MARGINS), axis=0)
    return place, tl.sum(tl.where(o_m == place, b_counts, 0), axis=0), whole


@triton.jit
def gather_candidates(
    logits,
    table,
    words,
    biases,
    row_slots,
    part_keys,
    margins,
    candidates,
    scores,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write down a part's tokens within the row's margin, in the order of ids, where all of the row's have a place."""
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_slot = tl.load(row_slots + i_row).to(tl.int64)
    if i_slot < 0:
        return
    p_fields = table + i_slot * NUM_FIELDS
    flags = tl.load(p_fields + FLAGS)
    if (flags & (IS_GREEDY | IS_BEAM)) != 0:
        return
    if (tl.load(p_fields + TOP_K) == 0) & (wide_field(p_fields, TOP_P) == 0):
        return
    b_count, b_mass = load_margins(margins, i_row, NUM_PARTS, PARTS)
    i_margin, count, _whole = choose_margin(b_count, b_mass, p_fields)
    if count > MAX_CANDIDATES:
        return
    o_p, o_m = tl.arange(0, PARTS), tl.arange(0, NUM_MARGINS)
    # [PARTS]
    b_counts = tl.sum(tl.where(o_m[None, :] == i_margin, b_count, 0), axis=1)
    if tl.sum(tl.where(o_p == i_part, b_counts, 0), axis=0) == 0:
        return
    begin = tl.sum(tl.where(o_p < i_part, b_counts, 0), axis=0).to(tl.int32)
    key = row_key(part_keys, i_row, NUM_PARTS, PARTS)
    row = drawn_row(logits, words, biases, p_fields, i_row, i_slot, flags, key)
    margin = margin_of(i_margin)
    for i_block in range(PART // BLOCK):
        o_v = i_part * PART + i_block * BLOCK + tl.arange(0, BLOCK)
        # [BLOCK]
        b_s = scores_of(row, o_v, VOCAB)
        m_c = b_s >= -margin
        b_place = i_row * MAX_CANDIDATES + begin + tl.cumsum(m_c.to(tl.int32), axis=0) - 1
        tl.store(candidates + b_place, o_v, mask=m_c)
        tl.store(scores + b_place, b_s, mask=m_c)
        begin += tl.sum(m_c.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["max_num_rows"])
def pick_likeliest(part_keys, part_bad, drawn, max_num_rows, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr):
    """Take a row's likeliest token."""
    i_row, o_p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    # [PARTS]
    b_bad = tl.load(part_bad + i_row * NUM_PARTS + o_p, mask=o_p < NUM_PARTS, other=0)
    num_bad = tl.sum(b_bad, axis=0).to(tl.int64)
    token = key_id(row_key(part_keys, i_row, NUM_PARTS, PARTS)).to(tl.int64)
    tl.store(drawn + i_row, tl.where(num_bad > 0, 0, token))
    tl.store(drawn + max_num_rows + i_row, num_bad)
