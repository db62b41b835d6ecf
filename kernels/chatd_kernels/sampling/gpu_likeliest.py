"""The kernels that rank a row's tokens: the likeliest of each part, then of the row, with log probabilities.

Log probabilities are of the row as the model gave it; those of a beam's candidates are changed after that, and ranked
then. A list is made by taking, so many times, the largest key below the last one taken.
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
    key_id,
    key_logit,
    load_logits,
    log_sum,
    order_key,
)

NUM_LIKELIEST = tl.constexpr(state.NUM_LIKELIEST)
MAX_LIKELIEST = tl.constexpr(state.MAX_LIKELIEST)
HAS_LOGPROBS = tl.constexpr(state.HAS_LOGPROBS)
HIGHEST_KEY = tl.constexpr((1 << 63) - 1)


@triton.jit
def list_part_likeliest(
    logits,
    table,
    words,
    biases,
    row_slots,
    part_max,
    part_sum,
    part_likeliest,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """The likeliest tokens of a part, so many as its row wants."""
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_slot = tl.load(row_slots + i_row).to(tl.int64)
    if i_slot < 0:
        return
    p_fields = table + i_slot * NUM_FIELDS
    num_likeliest = tl.load(p_fields + NUM_LIKELIEST)
    if num_likeliest == 0:
        return
    flags = tl.load(p_fields + FLAGS)
    o_v = i_part * PART + tl.arange(0, PART)
    # [PART]
    b_x = load_logits(logits, i_row, o_v, VOCAB)
    if (flags & IS_BEAM) != 0:
        highest, log_of_sum = log_sum(part_max, part_sum, i_row, NUM_PARTS, PARTS)
        b_x = adjusted((b_x - highest) - log_of_sum, o_v, words, biases, p_fields, i_slot, flags, VOCAB)
    b_key = tl.where(o_v < VOCAB, order_key(b_x, o_v), LOWEST_KEY)
    p_out = part_likeliest + (i_row * NUM_PARTS + i_part) * MAX_LIKELIEST
    last = tl.full((), HIGHEST_KEY, tl.int64)
    for i in range(num_likeliest):
        last = tl.max(tl.where(b_key < last, b_key, LOWEST_KEY), axis=0)
        tl.store(p_out + i, last)


@triton.jit
def list_likeliest(
    logits,
    table,
    row_slots,
    part_max,
    part_sum,
    part_likeliest,
    drawn,
    likeliest,
    logprobs,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A row's likeliest tokens with their log probabilities, and that of its drawn token."""
    i_row = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(row_slots + i_row).to(tl.int64)
    if i_slot < 0:
        return
    p_fields = table + i_slot * NUM_FIELDS
    flags = tl.load(p_fields + FLAGS)
    if (flags & (HAS_LOGPROBS | IS_BEAM)) == 0:
        return
    highest, log_of_sum = log_sum(part_max, part_sum, i_row, NUM_PARTS, PARTS)
    p_logprobs = logprobs + i_row * (MAX_LIKELIEST + 1)
    if (flags & HAS_LOGPROBS) != 0:
        token = tl.load(drawn + i_row)
        tl.store(p_logprobs, (tl.load(logits + i_row * VOCAB + token).to(tl.float32) - highest) - log_of_sum)
    num_likeliest = tl.load(p_fields + NUM_LIKELIEST)
    o_p, o_n = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    m_k = (o_p[:, None] < NUM_PARTS) & (o_n[None, :] < num_likeliest)
    # [PARTS, WIDTH]
    b_key = tl.load(
        part_likeliest + (i_row * NUM_PARTS + o_p[:, None]) * MAX_LIKELIEST + o_n[None, :], mask=m_k, other=LOWEST_KEY
    )
    b_key = tl.reshape(b_key, [PARTS * WIDTH])
    last = tl.full((), HIGHEST_KEY, tl.int64)
    for i in range(num_likeliest):
        last = tl.max(tl.where(b_key < last, b_key, LOWEST_KEY), axis=0)
        value = key_logit(last)
        if (flags & IS_BEAM) == 0:
            value = (value - highest) - log_of_sum
        tl.store(likeliest + i_row * MAX_LIKELIEST + i, key_id(last))
        tl.store(p_logprobs + 1 + i, value)
