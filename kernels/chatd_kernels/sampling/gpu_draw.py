"""The kernel that draws: the edges of top-k and top-p, what min-p leaves, and one token of that.

A program takes one row: its candidates where `gather_candidates` wrote them down; the one part of the row in which the
draw falls, where neither top-k nor top-p choose; else the row itself, as often as it takes.

An edge is found by halving the range in which it lies, between two tokens' values at each turn, so that as many turns
are needed as it has bits or, with few distinct values, fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chatd_kernels.sampling import state
from chatd_kernels.sampling.gpu_kernels import (
    IS_GREEDY,
    MAX_CANDIDATES,
    MIN_P,
    TOP_K,
    TOP_P,
    choose_margin,
    load_margins,
)
from chatd_kernels.sampling.gpu_rows import (
    COUNT_MASK,
    FLAGS,
    IS_BEAM,
    NUM_FIELDS,
    WORST_DISTANCE,
    distance_of,
    drawn_row,
    float_field,
    key_id,
    mass_of,
    row_key,
    scores_of,
    share_of,
    weight_of,
    wide_field,
)

SEED = tl.constexpr(state.SEED)
POSITION = tl.constexpr(state.POSITION)
COUNTS = tl.constexpr(state.COUNTS)


@triton.jit
def _load_chunk(row, candidates, scores, num_listed, i_chunk, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Ids and scores of a part of a row's candidates if there are some, else of a part of the row itself."""
    o_v = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_id = o_v
    if num_listed > 0:
        # [CHUNK], [CHUNK]
        b_id = tl.load(candidates + o_v, mask=o_v < num_listed, other=0)
        b_s = tl.load(scores + o_v, mask=o_v < num_listed, other=float("-inf"))
    else:
        b_s = scores_of(row, o_v, VOCAB)
    return b_id, b_s


@triton.jit
def _edge_of_top_k(
    row, candidates, scores, num_listed, num_chunks, top_k, worst, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """The distance of the k-th likeliest token; there are so many that are not infinitely far."""
    # The answer is within `below` and `above`; either becomes the distance of a token at each turn.
    below, above = worst * 0, worst
    while below < above:
        middle = below + (above - below) // 2
        num_in, nearest, farthest = worst * 0, above, below
        for i_chunk in range(num_chunks):
            _ids, b_s = _load_chunk(row, candidates, scores, num_listed, i_chunk, VOCAB, CHUNK)
            b_d = distance_of(b_s)
            num_in += tl.sum((b_d <= middle).to(tl.int32), axis=0)
            farthest = tl.maximum(farthest, tl.max(tl.where(b_d <= middle, b_d, below), axis=0))
            nearest = tl.minimum(nearest, tl.min(tl.where(b_d > middle, b_d, above), axis=0))
        below = tl.where(num_in >= top_k, below, nearest)
        above = tl.where(num_in >= top_k, farthest, above)
    return above


@triton.jit
def _sum_units(row, candidates, scores, num_listed, num_chunks, limit, edge, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The weight of the tokens no farther than `limit` whose weights, as bits, are at least `edge`."""
    total = tl.full((), 0, tl.int64)
    for i_chunk in range(num_chunks):
        _ids, b_s = _load_chunk(row, candidates, scores, num_listed, i_chunk, VOCAB, CHUNK)
        b_w = weight_of(b_s)
        m_in = (distance_of(b_s) <= limit) & (b_w.to(tl.int32, bitcast=True) >= edge)
        total += tl.sum(tl.where(m_in, mass_of(b_w), 0), axis=0)
    return total


@triton.jit
def _edge_of_top_p(
    row, candidates, scores, num_listed, num_chunks, limit, needed, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """The largest weight, as bits, such that the tokens with at least that weigh as much as is needed."""
    below, above = limit * 0, limit * 0 + 0x3F800000
    while below < above:
        middle = below + (above - below + 1) // 2
        total, nearest, farthest = needed * 0, below, above
        for i_chunk in range(num_chunks):
            _ids, b_s = _load_chunk(row, candidates, scores, num_listed, i_chunk, VOCAB, CHUNK)
            b_w = weight_of(b_s)
            b_bits = b_w.to(tl.int32, bitcast=True)
            m_in = distance_of(b_s) <= limit
            m_heavy = m_in & (b_bits >= middle)
            total += tl.sum(tl.where(m_heavy, mass_of(b_w), 0), axis=0)
            farthest = tl.minimum(farthest, tl.min(tl.where(m_heavy, b_bits, above), axis=0))
            nearest = tl.maximum(nearest, tl.max(tl.where(m_in & (b_bits < middle), b_bits, below), axis=0))
        below = tl.where(total >= needed, farthest, below)
        above = tl.where(total >= needed, above, nearest)
    return above


@triton.jit
def _kept_units(b_s, limit, edge, num_tied, num_seen, min_p):
    """Weights of the tokens of a chunk that are kept, and how many at the edge of top-p were seen with this chunk."""
    b_w = weight_of(b_s)
    b_bits = b_w.to(tl.int32, bitcast=True)
    m_in = distance_of(b_s) <= limit
    b_tied = (m_in & (b_bits == edge)).to(tl.int32)
    m_tied = (b_tied != 0) & (num_seen + tl.cumsum(b_tied, axis=0) <= num_tied)
    m_in = m_in & (b_w >= min_p) & ((b_bits > edge) | m_tied)
    return tl.where(m_in, mass_of(b_w), 0), num_seen + tl.sum(b_tied, axis=0)


@triton.jit
def _edges(row, candidates, scores, num_listed, num_chunks, count, whole, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """What top-k and top-p keep: tokens no farther than a limit, of a weight above an edge, and so many of that weight.

    Args:
        row: See `drawn_row`.
        candidates: The row's, and how far they are; see `_load_chunk`.
        scores: Likewise.
        num_listed: Likewise.
        num_chunks: Of the candidates or of the row.
        count: Tokens within the margin of the candidates.
        whole: The weight of all tokens.
        VOCAB: Tokens of a row.
        CHUNK: Tokens that are looked at together.
    """
    p_fields = row[3]
    top_k, top_p = tl.load(p_fields + TOP_K), wide_field(p_fields, TOP_P)
    limit = num_listed * 0 + WORST_DISTANCE
    edge, num_tied = num_listed * 0 - 1, num_listed * 0
    # Where fewer than k tokens weigh anything, all of them are kept.
    if (top_k > 0) & (count >= top_k):
        limit = _edge_of_top_k(row, candidates, scores, num_listed, num_chunks, top_k, limit, VOCAB, CHUNK)
        whole = _sum_units(row, candidates, scores, num_listed, num_chunks, limit, edge, VOCAB, CHUNK)
    if top_p != 0:
        needed = share_of(whole, top_p)
        edge = _edge_of_top_p(row, candidates, scores, num_listed, num_chunks, limit, needed, VOCAB, CHUNK)
        heavier = _sum_units(row, candidates, scores, num_listed, num_chunks, limit, edge + 1, VOCAB, CHUNK)
        unit = mass_of(edge.to(tl.float32, bitcast=True))
        num_tied = ((needed - heavier + unit - 1) // unit).to(tl.int32)
    return limit, edge, num_tied


@triton.jit
def _uniform(p_fields):
    """The number of the slot's draw in units of 2^-64, with 53 bits: that of `engine.philox`."""
    position = wide_field(p_fields, POSITION)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    seed = wide_field(p_fields, SEED).to(tl.int64)
    word_0, word_1, _word_2, _word_3 = tl.philox(seed, low, high, low * 0, low * 0)
    return ((word_0.to(tl.uint64) << 32) | word_1.to(tl.uint64)) >> 11 << 11


@triton.jit
def _draw(
    row,
    candidates,
    scores,
    margins,
    token,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token of a row's draw; `token` is the likeliest one."""
    p_fields, i_row = row[3], row[4]
    number = _uniform(p_fields)
    min_p = float_field(p_fields, MIN_P)
    b_count, b_mass = load_margins(margins, i_row, NUM_PARTS, PARTS)
    # Neither top-k nor top-p: the part is found by the weights of the parts.
    o_p = tl.arange(0, PARTS)
    b_masses = tl.max(b_mass, axis=1)
    goal = tl.umulhi(tl.sum(b_masses, axis=0).to(tl.uint64), number).to(tl.int64)
    i_part = tl.sum((tl.cumsum(b_masses, axis=0) <= goal).to(tl.int32), axis=0)
    goal -= tl.sum(tl.where(o_p < i_part, b_masses, 0), axis=0)
    first, stop = i_part * (PART // CHUNK), (i_part + 1) * (PART // CHUNK)
    num_listed = i_part * 0
    limit = i_part * 0 + WORST_DISTANCE
    edge, num_tied = i_part * 0 - 1, i_part * 0
    if (tl.load(p_fields + TOP_K) > 0) | (wide_field(p_fields, TOP_P) != 0):
        _margin, count, whole = choose_margin(b_count, b_mass, p_fields)
        num_listed = tl.where(count > MAX_CANDIDATES, 0, count).to(tl.int32)
        num_looked_at = tl.where(count > MAX_CANDIDATES, VOCAB, num_listed)
        first, stop = first * 0, (num_looked_at + CHUNK - 1) // CHUNK
        limit, edge, num_tied = _edges(row, candidates, scores, num_listed, stop, count, whole, VOCAB, CHUNK)
        # What min-p leaves of that is the whole now.
        whole, num_seen = goal * 0, first * 0
        for i_chunk in range(stop):
            _ids, b_s = _load_chunk(row, candidates, scores, num_listed, i_chunk, VOCAB, CHUNK)
            b_units, num_seen = _kept_units(b_s, limit, edge, num_tied, num_seen, min_p)
            whole += tl.sum(b_units, axis=0)
        goal = tl.umulhi(whole.to(tl.uint64), number).to(tl.int64)
    num_seen = first * 0
    for i_chunk in range(first, stop):
        b_id, b_s = _load_chunk(row, candidates, scores, num_listed, i_chunk, VOCAB, CHUNK)
        b_units, num_seen = _kept_units(b_s, limit, edge, num_tied, num_seen, min_p)
        total = tl.sum(b_units, axis=0)
        if (goal >= 0) & (goal < total):
            place = tl.sum((tl.cumsum(b_units, axis=0) <= goal).to(tl.int32), axis=0)
            token = tl.sum(tl.where(tl.arange(0, CHUNK) == place, b_id, 0), axis=0)
        # Below 0 from the drawn token on.
        goal -= total
    return token


@triton.jit(do_not_specialize=["max_num_rows"])
def draw_tokens(
    logits,
    table,
    words,
    biases,
    row_slots,
    part_keys,
    part_bad,
    margins,
    candidates,
    scores,
    drawn,
    max_num_rows,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_DRAWS: tl.constexpr,
):
    """Draw a row's token, and count it in what is known of its request."""
    i_row = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(row_slots + i_row).to(tl.int64)
    if i_slot < 0:
        return
    p_fields = table + i_slot * NUM_FIELDS
    flags = tl.load(p_fields + FLAGS)
    o_p = tl.arange(0, PARTS)
    num_bad = tl.sum(tl.load(part_bad + i_row * NUM_PARTS + o_p, mask=o_p < NUM_PARTS, other=0), axis=0)
    tl.store(drawn + max_num_rows + i_row, num_bad.to(tl.int64))
    if (num_bad > 0) | ((flags & IS_BEAM) != 0):
        tl.store(drawn + i_row, tl.full((), 0, tl.int64))
        return
    key = row_key(part_keys, i_row, NUM_PARTS, PARTS)
    token = key_id(key)
    if HAS_DRAWS:  # noqa: SIM102
        # The outer condition is known when this is compiled.
        if (flags & IS_GREEDY) == 0:
            row = drawn_row(logits, words, biases, p_fields, i_row, i_slot, flags, key)
            p_candidates, p_scores = candidates + i_row * MAX_CANDIDATES, scores + i_row * MAX_CANDIDATES
            token = _draw(row, p_candidates, p_scores, margins, token, VOCAB, NUM_PARTS, PARTS, PART, CHUNK)
    tl.store(drawn + i_row, token.to(tl.int64))
    position = wide_field(p_fields, POSITION) + 1
    tl.store(p_fields + POSITION, position.to(tl.uint32).to(tl.int32, bitcast=True))
    tl.store(p_fields + POSITION + 1, (position >> 32).to(tl.uint32).to(tl.int32, bitcast=True))
    if (flags & COUNTS) != 0:
        p_word = words + i_slot * VOCAB + token
        word = tl.load(p_word)
        # A count that has no more bits stays.
        tl.store(p_word, tl.where((word & COUNT_MASK) == COUNT_MASK, word, word + 1))
