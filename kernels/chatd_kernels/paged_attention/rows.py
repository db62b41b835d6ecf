"""The arithmetic of attention on rows: scores, softmax, weighted sums, merges. Knows addresses, no blocks or tasks.

For each row (a token's query head), each segment, in this order and in float32:

    score[p]  = fma over the dimensions, from 0, of q * (scale * log2 e) and K
    m         = max of the scores;  w[p] = 2 ** (score[p] - m);  sum of w in 16 lanes, then the lanes in a tree
    o[d]      = fma over the positions, in order, of w[p] and V
    merge     in segment order: rescale the pair with the smaller m to the larger one's, add
    result    = o / sum

Every variant does these operations on a row's numbers in this order, so that tiles, runs, threads and batch-mates
change the speed and never a bit.
"""

from __future__ import annotations

import numpy as np

from chatd_kernels.jit import jit
from chatd_kernels.microkernels import FloatProduct, make_dot, make_dot_strided
from chatd_kernels.paged_attention.microkernels import make_weighted_rows
from chatd_kernels.vector import (
    hmax,
    hsum,
    load_f32,
    store_f32,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vload,
    vload_half,
    vmask,
    vmax,
    vmul,
    vsplat,
    vstore,
    vsub,
)

_scores = make_dot_strided(FloatProduct(half=False))
_scores_half = make_dot_strided(FloatProduct(half=True))
_scores_3x2 = make_dot(3, 2, half=False)
_scores_3x2_half = make_dot(3, 2, half=True)
_scores_1x4 = make_dot(1, 4, half=False)
_scores_1x4_half = make_dot(1, 4, half=True)
_weigh = make_weighted_rows(half=False)
_weigh_half = make_weighted_rows(half=True)

_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@jit
def score_group(q: int, rows: int, key: int, scores: int, head_dim: int, is_half: bool) -> None:
    """Scores of any number of rows against one group of 16 positions; rows of scores are 1024 bytes apart."""
    num_groups = (rows + 5) // 6
    for group in range(num_groups):
        row = rows * group // num_groups
        count = rows * (group + 1) // num_groups - row
        if is_half:
            _scores_half(count, q + row * head_dim * 4, head_dim * 4, key, scores + row * 1024, 1024, head_dim)
        else:
            _scores(count, q + row * head_dim * 4, head_dim * 4, key, scores + row * 1024, 1024, head_dim)


@jit
def score_three_rows(q: int, key0: int, key1: int, scores: int, head_dim: int, is_half: bool) -> None:
    """Scores of three rows against two groups: twice the independent sums of one group."""
    if is_half:
        _scores_3x2_half(q, head_dim * 4, key0, key1, scores, 1024, head_dim)
    else:
        _scores_3x2(q, head_dim * 4, key0, key1, scores, 1024, head_dim)


@jit
def score_one_row(
    q: int, key0: int, key1: int, key2: int, key3: int, scores: int, head_dim: int, is_half: bool
) -> None:
    """Scores of one row against four groups."""
    if is_half:
        _scores_1x4_half(q, head_dim * 4, key0, key1, key2, key3, scores, 1024, head_dim)
    else:
        _scores_1x4(q, head_dim * 4, key0, key1, key2, key3, scores, 1024, head_dim)


@jit
def weigh_stretch(weights: int, rows: int, value: int, out: int, head_dim: int, count: int, is_half: bool) -> None:
    """Add `count` weighted rows of V to any number of rows, all of which see all of these positions."""
    num_groups = (rows + 5) // 6
    for group in range(num_groups):
        row = rows * group // num_groups
        size = rows * (group + 1) // num_groups - row
        if is_half:
            _weigh_half(size, weights + row * 1024, value, out + row * head_dim * 4, head_dim, count)
        else:
            _weigh(size, weights + row * 1024, value, out + row * head_dim * 4, head_dim, count)


@jit
def softmax_row(scores: int, low: int, high: int, maximum: int, total: int) -> None:
    """Turn the scores of positions low <= p < high into weights, in place; write their maximum and sum.

    Scores of other positions are replaced before they are used: they may be of slots that hold anything.
    """
    first, end = low // 16 * 16, (high + 15) // 16 * 16
    most = vsplat(_NEGATIVE_INFINITY)
    for p in range(first, end, 16):
        v = vload(scores + p * 4)
        if p < low or p + 16 > high:
            v = vmask(v, low - p, high - p, _NEGATIVE_INFINITY)
        most = vmax(most, v)
    m = hmax(most)
    top = vsplat(m)
    sums = vsplat(_ZERO)
    for p in range(first, end, 16):
        v = vexp2(vsub(vload(scores + p * 4), top))
        if p < low or p + 16 > high:
            v = vmask(v, low - p, high - p, _ZERO)
        vstore(scores + p * 4, v)
        sums = vadd(sums, v)
    store_f32(maximum, m)
    store_f32(total, hsum(sums))


@jit
def merge(m: int, total: int, o: int, next_m: int, next_total: int, next_o: int, head_dim: int) -> None:
    """Merge the next segment's (maximum, sum, output) into the running one."""
    old, new = load_f32(m), load_f32(next_m)
    top = old if old > new else new
    a = vexp2(vsub(vsplat(old), vsplat(top)))
    b = vexp2(vsub(vsplat(new), vsplat(top)))
    store_f32(m, top)
    store_f32(total, hmax(vfma(vsplat(load_f32(next_total)), b, vmul(vsplat(load_f32(total)), a))))
    for d in range(0, head_dim * 4, 64):
        vstore(o + d, vfma(vload(next_o + d), b, vmul(vload(o + d), a)))


@jit
def finish(out: int, o: int, total: int, head_dim: int) -> None:
    """Write the result of a row."""
    divisor = vsplat(load_f32(total))
    for d in range(0, head_dim * 4, 64):
        vstore(out + d, vdiv(vload(o + d), divisor))


@jit
def widen(source: int, target: int, count: int, is_half: bool) -> None:
    """Copy `count` numbers as float32."""
    for i in range(0, count, 16):
        vstore(target + i * 4, vload_half(source + i * 2) if is_half else vload(source + i * 4))
