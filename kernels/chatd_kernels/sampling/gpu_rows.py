"""Inside sampling's kernels: the logits of a row after all that changes them, their order, and their weights.

Multiplications and additions of these must not be fused (`Launch.fuses_multiply_add`): bits count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chatd_kernels.sampling import state

FLAGS = tl.constexpr(state.FLAGS)
TEMPERATURE = tl.constexpr(state.TEMPERATURE)
REPETITION = tl.constexpr(state.REPETITION)
PRESENCE = tl.constexpr(state.PRESENCE)
FREQUENCY = tl.constexpr(state.FREQUENCY)
NUM_FIELDS = tl.constexpr(state.NUM_FIELDS)
ADJUSTS = tl.constexpr(state.ADJUSTS)
FORBIDS = tl.constexpr(state.FORBIDS)
IS_BEAM = tl.constexpr(state.IS_BEAM)
STOP_BIT = tl.constexpr(state.STOP_BIT)
COUNT_MASK = tl.constexpr(state.STOP_BIT - 1)
SEEN_MASK = tl.constexpr(state.PROMPT_BIT | state.STOP_BIT - 1)
BIAS_SHIFT = tl.constexpr(state.BIAS_SHIFT)
MAX_BIASES = tl.constexpr(state.MAX_BIASES)

LOWEST_KEY = tl.constexpr(-(1 << 63))
WORST_DISTANCE = tl.constexpr(0x7F800000)
"""The distance of minus infinity, see `distance_of`."""


@triton.jit
def float_field(p_fields, PLACE: tl.constexpr):
    """A field of a slot that is a float32."""
    return tl.load(p_fields + PLACE).to(tl.float32, bitcast=True)


@triton.jit
def wide_field(p_fields, PLACE: tl.constexpr):
    """Two fields of a slot as 64 bits without a sign."""
    low = tl.load(p_fields + PLACE).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(p_fields + PLACE + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def load_logits(logits, i_row, o_v, VOCAB: tl.constexpr):
    """Logits as the model gave them, as float32; 0 beyond the vocabulary."""
    return tl.load(logits + i_row * VOCAB + o_v, mask=o_v < VOCAB, other=0.0).to(tl.float32)


@triton.jit
def _penalized(b_x, b_word, p_fields):
    """Logits after the repetition penalty (Keskar et al. 2019, CTRL)."""
    penalty = float_field(p_fields, REPETITION)
    b_seen = (b_word & SEEN_MASK) != 0
    b_changed = tl.where(b_x < 0, b_x * penalty, tl.div_rn(b_x, penalty))
    return tl.where(b_seen, b_changed, b_x)


@triton.jit
def adjusted(b_x, o_v, words, biases, p_fields, i_slot, flags, VOCAB: tl.constexpr):
    """Logits of a slot after penalties, bias and forbidden ids: of beams, bias goes before the penalty."""
    if (flags & ADJUSTS) != 0:
        # [BLOCK]
        b_word = tl.load(words + i_slot * VOCAB + o_v, mask=o_v < VOCAB, other=0)
        b_place = (b_word >> BIAS_SHIFT) & 0x7FF
        # [BLOCK]
        b_bias = tl.load(biases + i_slot * MAX_BIASES + b_place - 1, mask=b_place > 0, other=0.0)
        if (flags & IS_BEAM) != 0:
            b_x = _penalized(b_x + b_bias, b_word, p_fields)
        else:
            b_x = _penalized(b_x, b_word, p_fields)
            b_count = (b_word & COUNT_MASK).to(tl.float32)
            b_x -= tl.where(b_count > 0, float_field(p_fields, PRESENCE), 0.0)
            b_x -= b_count * float_field(p_fields, FREQUENCY)
            b_x += b_bias
        b_x = tl.where(((b_word & STOP_BIT) != 0) & ((flags & FORBIDS) != 0), float("-inf"), b_x)
    return b_x


@triton.jit
def order_key(b_x, o_v):
    """Numbers that order tokens: the larger logit first, of equal ones the lower id; no two are equal."""
    b_x = tl.where(b_x == 0.0, 0.0, b_x)  # the two zeros are equal
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_bits = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    return (b_bits.to(tl.int64) << 32) | (0x7FFFFFFF - o_v).to(tl.int64)


@triton.jit
def key_id(key):
    """The id in an `order_key`."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def key_logit(key):
    """The logit in an `order_key`."""
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_key(part_keys, i_row, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr):
    """The `order_key` of a row's likeliest token."""
    o_p = tl.arange(0, PARTS)
    # [PARTS]
    return tl.max(tl.load(part_keys + i_row * NUM_PARTS + o_p, mask=o_p < NUM_PARTS, other=LOWEST_KEY), axis=0)


@triton.jit
def log_sum(part_max, part_sum, i_row, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr):
    """The maximum of a row as the model gave it, and the logarithm of the sum of exponentials relative to it."""
    o_p = tl.arange(0, PARTS)
    # [PARTS]
    b_max = tl.load(part_max + i_row * NUM_PARTS + o_p, mask=o_p < NUM_PARTS, other=float("-inf"))
    # [PARTS]
    b_sum = tl.load(part_sum + i_row * NUM_PARTS + o_p, mask=o_p < NUM_PARTS, other=0.0)
    highest = tl.max(b_max, axis=0)
    return highest, tl.log(tl.sum(b_sum * tl.exp(b_max - highest), axis=0))


@triton.jit
def drawn_row(logits, words, biases, p_fields, i_row, i_slot, flags, key):
    """What scores of a row are made of, by the `order_key` of its likeliest token."""
    temperature = float_field(p_fields, TEMPERATURE)
    return logits, words, biases, p_fields, i_row, i_slot, flags, key_logit(key), temperature


@triton.jit
def scores_of(row, o_v, VOCAB: tl.constexpr):
    """`(logit - maximum) / temperature`, at most 0; minus infinity beyond the vocabulary.

    `row` is what `drawn_row` returns.
    """
    logits, words, biases, p_fields, i_row, i_slot, flags, highest, temperature = row
    b_x = adjusted(load_logits(logits, i_row, o_v, VOCAB), o_v, words, biases, p_fields, i_slot, flags, VOCAB)
    b_s = tl.div_rn(b_x - highest, temperature)
    return tl.where(o_v < VOCAB, b_s, float("-inf"))


@triton.jit
def distance_of(b_s):
    """Scores as integers of the opposite order, from 0 to that of minus infinity."""
    return b_s.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weight_of(b_s):
    """Scores to weights within 0 and 1; an approximated exponential may be above 1 for what is below 0."""
    return tl.minimum(tl.exp(b_s), 1.0)


@triton.jit
def mass_of(b_w):
    """Weights in units of 2^-44."""
    return (b_w * 17592186044416.0).to(tl.int64)


@triton.jit
def share_of(whole, share):
    """`ceil(whole * share / 2^64)`, at least 1."""
    part = tl.umulhi(whole.to(tl.uint64), share)
    rest = whole.to(tl.uint64) * share
    return tl.maximum((part + tl.where(rest != 0, 1, 0).to(tl.uint64)).to(tl.int64), 1)
