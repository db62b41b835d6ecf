"""Paged attention on CPUs: one row function over fixed segments of 256 positions.

For each row (a token's query head), each segment, in this order and in float32:

    score[p]  = fma over the dimensions, from 0, of q * (scale * log2 e) and K
    m         = max of the scores;  w[p] = 2 ** (score[p] - m);  l = sum of w in 16 lanes, then the lanes in a tree
    o[d]      = fma over the positions, in order, of w[p] and V
    merge     in segment order: rescale the pair with the smaller m to the larger one's, add
    result    = o / l

Every variant below does these operations on a row's numbers in this order, so that tiles, runs, threads and batch-mates
change the speed and never a bit. Positions at or past a row's end are masked by selection before the softmax and skipped
after it: what those slots hold, NaN included, is never an operand of the row.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from chatd_kernels.checks import check_tensor
from chatd_kernels.kv_cache import KVCache
from chatd_kernels.microkernels import make_dot
from chatd_kernels.paged_attention.microkernels import make_weighted_sum
from chatd_kernels.paged_attention.schedule import AttentionMetadata
from chatd_kernels.runtime import argument, claim_worker, float_bits, kernel, next_item
from chatd_kernels.vector import (
    copy_bytes,
    fetch_add,
    hmax,
    hsum,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
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

_LOG2_E = 1.4426950408889634
# Below this many (row, position) pairs a parallel region costs more than it saves.
_PARALLEL_FROM = 4096

_scores_6 = make_dot(6, 1, False)
_scores_4 = make_dot(4, 1, False)
_scores_3 = make_dot(3, 1, False)
_scores_1 = make_dot(1, 1, False)
_scores_6_half = make_dot(6, 1, True)
_scores_4_half = make_dot(4, 1, True)
_scores_3_half = make_dot(3, 1, True)
_scores_1_half = make_dot(1, 1, True)
_scores_3x2 = make_dot(3, 2, False)
_scores_3x2_half = make_dot(3, 2, True)
_scores_1x4 = make_dot(1, 4, False)
_scores_1x4_half = make_dot(1, 4, True)
_sum_6 = make_weighted_sum(6, 1, False)
_sum_4 = make_weighted_sum(4, 1, False)
_sum_3 = make_weighted_sum(3, 1, False)
_sum_1 = make_weighted_sum(1, 1, False)
_sum_6_half = make_weighted_sum(6, 1, True)
_sum_4_half = make_weighted_sum(4, 1, True)
_sum_3_half = make_weighted_sum(3, 1, True)
_sum_1_half = make_weighted_sum(1, 1, True)
_sum_3x2 = make_weighted_sum(3, 2, False)
_sum_3x2_half = make_weighted_sum(3, 2, True)
_sum_1x4 = make_weighted_sum(1, 4, False)
_sum_1x4_half = make_weighted_sum(1, 4, True)

_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_WIDE_ROWS = 13  # from three row groups on, widening a K or V group once into float32 scratch pays


@njit  # type: ignore[untyped-decorator]
def _score_rows(q: int, q_stride: int, rows: int, key: int, scores: int, head_dim: int, is_half: bool) -> None:
    """Scores of any number of rows against one group of 16 positions."""
    row = 0
    while row < rows:
        left = rows - row
        at, to = q + row * q_stride, scores + row * 1024
        if left >= 6:
            if is_half:
                _scores_6_half(at, q_stride, key, to, 1024, head_dim)
            else:
                _scores_6(at, q_stride, key, to, 1024, head_dim)
            row += 6
        elif left >= 4:
            if is_half:
                _scores_4_half(at, q_stride, key, to, 1024, head_dim)
            else:
                _scores_4(at, q_stride, key, to, 1024, head_dim)
            row += 4
        elif left == 3:
            if is_half:
                _scores_3_half(at, q_stride, key, to, 1024, head_dim)
            else:
                _scores_3(at, q_stride, key, to, 1024, head_dim)
            row += 3
        else:
            if is_half:
                _scores_1_half(at, q_stride, key, to, 1024, head_dim)
            else:
                _scores_1(at, q_stride, key, to, 1024, head_dim)
            row += 1


@njit  # type: ignore[untyped-decorator]
def _weigh_rows(
    weights: int, rows: int, value: int, value_stride: int, out: int, head_dim: int, count: int, is_half: bool
) -> None:
    """Add `count` weighted rows of V to any number of rows; all of them see all of these positions."""
    stride = head_dim * 4
    element = 2 if is_half else 4
    row = 0
    while row < rows:
        left = rows - row
        w, o = weights + row * 1024, out + row * stride
        if left >= 6:
            for d in range(0, head_dim, 16):
                if is_half:
                    _sum_6_half(w, value + d * element, value_stride, o + d * 4, stride, count)
                else:
                    _sum_6(w, value + d * element, value_stride, o + d * 4, stride, count)
            row += 6
        elif left >= 4:
            for d in range(0, head_dim, 16):
                if is_half:
                    _sum_4_half(w, value + d * element, value_stride, o + d * 4, stride, count)
                else:
                    _sum_4(w, value + d * element, value_stride, o + d * 4, stride, count)
            row += 4
        elif left == 3:
            d = 0
            while d + 32 <= head_dim:
                if is_half:
                    _sum_3x2_half(w, value + d * element, value_stride, o + d * 4, stride, count)
                else:
                    _sum_3x2(w, value + d * element, value_stride, o + d * 4, stride, count)
                d += 32
            if d < head_dim:
                if is_half:
                    _sum_3_half(w, value + d * element, value_stride, o + d * 4, stride, count)
                else:
                    _sum_3(w, value + d * element, value_stride, o + d * 4, stride, count)
            row += 3
        else:
            d = 0
            while d + 64 <= head_dim:
                if is_half:
                    _sum_1x4_half(w, value + d * element, value_stride, o + d * 4, stride, count)
                else:
                    _sum_1x4(w, value + d * element, value_stride, o + d * 4, stride, count)
                d += 64
            while d < head_dim:
                if is_half:
                    _sum_1_half(w, value + d * element, value_stride, o + d * 4, stride, count)
                else:
                    _sum_1(w, value + d * element, value_stride, o + d * 4, stride, count)
                d += 16
            row += 1


@njit  # type: ignore[untyped-decorator]
def _softmax_row(scores: int, low: int, high: int, maximum: int, total: int) -> None:
    """Turn the scores of positions low <= p < high into weights, in place; write their maximum and sum."""
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


@njit  # type: ignore[untyped-decorator]
def _merge(m: int, l: int, o: int, next_m: int, next_l: int, next_o: int, head_dim: int) -> None:
    """Merge the next segment's (maximum, sum, output) into the running one."""
    old, new = load_f32(m), load_f32(next_m)
    top = old if old > new else new
    a = vexp2(vsub(vsplat(old), vsplat(top)))
    b = vexp2(vsub(vsplat(new), vsplat(top)))
    store_f32(m, top)
    store_f32(l, hmax(vfma(vsplat(load_f32(next_l)), b, vmul(vsplat(load_f32(l)), a))))
    for d in range(0, head_dim * 4, 64):
        vstore(o + d, vfma(vload(next_o + d), b, vmul(vload(o + d), a)))


@njit  # type: ignore[untyped-decorator]
def _finish(out: int, o: int, l: int, head_dim: int) -> None:
    """Write the result of a row."""
    total = vsplat(load_f32(l))
    for d in range(0, head_dim * 4, 64):
        vstore(out + d, vdiv(vload(o + d), total))


@njit  # type: ignore[untyped-decorator]
def _widen(source: int, target: int, count: int, is_half: bool) -> None:
    """Copy `count` numbers as float32."""
    for i in range(0, count, 16):
        if is_half:
            vstore(target + i * 4, vload_half(source + i * 2))
        else:
            vstore(target + i * 4, vload(source + i * 4))


@kernel
def attention_items(frame: int) -> None:
    """Items are (work item, KV head); the heads of one item follow each other."""
    q, out = argument(frame, 0), argument(frame, 1)
    cache, is_half = argument(frame, 2), argument(frame, 3) != 0
    block_stride, kv_stride, head_stride = argument(frame, 4), argument(frame, 5), argument(frame, 6)
    block_size, head_dim = argument(frame, 7), argument(frame, 8)
    num_q, num_kv = argument(frame, 9), argument(frame, 10)
    tasks, runs, tokens, items = argument(frame, 11), argument(frame, 12), argument(frame, 13), argument(frame, 14)
    num_items, table, table_width = argument(frame, 15), argument(frame, 16), argument(frame, 17)
    lengths, bases, counters, partials = (
        argument(frame, 18),
        argument(frame, 19),
        argument(frame, 20),
        argument(frame, 21),
    )
    workspace, workspace_bytes, max_rows = argument(frame, 22), argument(frame, 23), argument(frame, 24)
    window = argument(frame, 25)
    scale = np.float32(load_f64(frame + 28 * 8))

    element = 2 if is_half else 4
    group = num_q // num_kv
    row_bytes = head_dim * 4
    groups_per_block = block_size // 16
    blocks_per_segment = 256 // block_size
    partial_bytes = row_bytes + 64
    scale_vector = vsplat(scale)
    zero = vsplat(_ZERO)

    base = (workspace + claim_worker(frame) * workspace_bytes + 63) // 64 * 64
    scores = base
    queries = scores + max_rows * 1024
    outputs = queries + max_rows * row_bytes
    state_o = outputs + max_rows * row_bytes
    key_scratch = state_o + max_rows * row_bytes
    value_scratch = key_scratch + row_bytes * 16
    row_m = value_scratch + row_bytes * 64
    row_l = row_m + max_rows * 4
    state_m = row_l + max_rows * 4
    state_l = state_m + max_rows * 4

    while True:
        number = next_item(frame)
        if number >= num_items * num_kv:
            break
        item, head = items + number // num_kv * 12, number % num_kv
        first_task, end_task, fold = load_i32(item), load_i32(item + 4), load_i32(item + 8) != 0
        keys = cache + head * head_stride * element
        values = keys + kv_stride * element
        for task_index in range(first_task, end_task):
            task = tasks + task_index * 24
            segment, first, end = load_i32(task), load_i32(task + 4), load_i32(task + 8)
            first_run, end_run, tile_first = load_i32(task + 12), load_i32(task + 16), load_i32(task + 20)
            rows = (end - first) * group
            origin = segment * 256

            for index in range(first, end):
                token = load_i32(tokens + index * 4)
                source = q + (token * num_q + head * group) * row_bytes
                target = queries + (index - first) * group * row_bytes
                for offset in range(0, group * row_bytes, 64):
                    vstore(target + offset, vmul(vload(source + offset), scale_vector))
            for offset in range(0, rows * row_bytes, 64):
                vstore(outputs + offset, zero)

            for run_index in range(first_run, end_run):
                run = runs + run_index * 20
                low_group, high_group = load_i32(run), load_i32(run + 4)
                run_first, run_end = load_i32(run + 8), load_i32(run + 12)
                blocks = table + (load_i32(run + 16) * table_width + segment * blocks_per_segment) * 4
                row = (run_first - first) * group
                run_rows = (run_end - run_first) * group
                at, to = queries + row * row_bytes, scores + row * 1024
                g = low_group
                while g < high_group:
                    block = load_i32(blocks + g // groups_per_block * 4)
                    key = keys + (block * block_stride + g % groups_per_block * head_dim * 16) * element
                    if run_rows >= _WIDE_ROWS:
                        if is_half:
                            _widen(key, key_scratch, head_dim * 16, is_half)
                            _score_rows(at, row_bytes, run_rows, key_scratch, to + g * 64, head_dim, False)
                        else:
                            _score_rows(at, row_bytes, run_rows, key, to + g * 64, head_dim, False)
                        g += 1
                    elif run_rows == 3 and g + 1 < high_group:
                        block = load_i32(blocks + (g + 1) // groups_per_block * 4)
                        key1 = keys + (block * block_stride + (g + 1) % groups_per_block * head_dim * 16) * element
                        if is_half:
                            _scores_3x2_half(at, row_bytes, key, key1, to + g * 64, 1024, head_dim)
                        else:
                            _scores_3x2(at, row_bytes, key, key1, to + g * 64, 1024, head_dim)
                        g += 2
                    elif run_rows == 1 and g + 3 < high_group:
                        block = load_i32(blocks + (g + 1) // groups_per_block * 4)
                        key1 = keys + (block * block_stride + (g + 1) % groups_per_block * head_dim * 16) * element
                        block = load_i32(blocks + (g + 2) // groups_per_block * 4)
                        key2 = keys + (block * block_stride + (g + 2) % groups_per_block * head_dim * 16) * element
                        block = load_i32(blocks + (g + 3) // groups_per_block * 4)
                        key3 = keys + (block * block_stride + (g + 3) % groups_per_block * head_dim * 16) * element
                        if is_half:
                            _scores_1x4_half(at, row_bytes, key, key1, key2, key3, to + g * 64, 1024, head_dim)
                        else:
                            _scores_1x4(at, row_bytes, key, key1, key2, key3, to + g * 64, 1024, head_dim)
                        g += 4
                    else:
                        _score_rows(at, row_bytes, run_rows, key, to + g * 64, head_dim, is_half)
                        g += 1

            for index in range(first, end):
                length = load_i64(lengths + load_i32(tokens + index * 4) * 8)
                high = min(256, length - origin)
                low = max(0, length - window - origin)
                for row in range((index - first) * group, (index - first + 1) * group):
                    if low < high:
                        _softmax_row(scores + row * 1024, low, high, row_m + row * 4, row_l + row * 4)

            for run_index in range(first_run, end_run):
                run = runs + run_index * 20
                low_group, high_group = load_i32(run), load_i32(run + 4)
                run_first, run_end = load_i32(run + 8), load_i32(run + 12)
                blocks = table + (load_i32(run + 16) * table_width + segment * blocks_per_segment) * 4
                is_wide = (run_end - run_first) * group >= _WIDE_ROWS
                g = low_group
                while g < high_group:
                    if is_wide:
                        # Several blocks' V, widened, as one stretch of up to 64 positions.
                        count = min(4, high_group - g)
                        for i in range(count):
                            block = load_i32(blocks + (g + i) // groups_per_block * 4)
                            value = (
                                values + (block * block_stride + (g + i) % groups_per_block * 16 * head_dim) * element
                            )
                            _widen(value, value_scratch + i * 16 * row_bytes, 16 * head_dim, is_half)
                        value, stride, narrow = value_scratch, row_bytes, False
                    else:
                        block = load_i32(blocks + g // groups_per_block * 4)
                        offset = g % groups_per_block
                        count = min(groups_per_block - offset, high_group - g)
                        value = values + (block * block_stride + offset * 16 * head_dim) * element
                        stride, narrow = head_dim * element, is_half
                    start, stop = g * 16, (g + count) * 16
                    index = run_first
                    while index < run_end:
                        # Neighbours that see all of this stretch go together, any other token alone over what it sees.
                        upto = index
                        low, high = start, stop
                        while upto < run_end:
                            length = load_i64(lengths + load_i32(tokens + upto * 4) * 8)
                            low = max(start, length - window - origin)
                            high = min(stop, length - origin)
                            if low > start or high < stop:
                                break
                            upto += 1
                        if upto == index:
                            upto = index + 1
                        else:
                            low, high = start, stop
                        row = (index - first) * group
                        if low < high:
                            _weigh_rows(
                                scores + row * 1024 + low * 4,
                                (upto - index) * group,
                                value + (low - start) * stride,
                                stride,
                                outputs + row * row_bytes,
                                head_dim,
                                high - low,
                                narrow,
                            )
                        index = upto
                    g += count

            for index in range(first, end):
                token = load_i32(tokens + index * 4)
                length = load_i64(lengths + token * 8)
                num_segments = (length + 255) // 256
                # The first segment that the window lets the token see starts its sums.
                first_segment = max(0, length - window) // 256
                for h in range(group):
                    row = (index - first) * group + h
                    o, m, l = outputs + row * row_bytes, row_m + row * 4, row_l + row * 4
                    target = out + (token * num_q + head * group + h) * row_bytes
                    if fold:
                        state = (index - tile_first) * group + h
                        so, sm, sl = state_o + state * row_bytes, state_m + state * 4, state_l + state * 4
                        if segment == first_segment:
                            copy_bytes(so, o, row_bytes)
                            store_f32(sm, load_f32(m))
                            store_f32(sl, load_f32(l))
                        elif segment > first_segment:
                            _merge(sm, sl, so, m, l, o, head_dim)
                        if segment == num_segments - 1:
                            _finish(target, so, sl, head_dim)
                    elif num_segments == 1:
                        _finish(target, o, l, head_dim)
                    else:
                        partial = (
                            partials
                            + ((load_i64(bases + token * 8) + segment) * num_q + head * group + h) * partial_bytes
                        )
                        store_f32(partial, load_f32(m))
                        store_f32(partial + 4, load_f32(l))
                        copy_bytes(partial + 64, o, row_bytes)
                if not fold and num_segments > 1:
                    # The last segment to arrive merges them all. The count goes on over layers, a multiple a layer.
                    arrived = fetch_add(counters + (token * num_kv + head) * 8, 1) + 1
                    if arrived % num_segments == 0:
                        for h in range(group):
                            partial = (
                                partials
                                + ((load_i64(bases + token * 8) + first_segment) * num_q + head * group + h)
                                * partial_bytes
                            )
                            following = partial
                            for _ in range(first_segment + 1, num_segments):
                                following += num_q * partial_bytes
                                _merge(
                                    partial,
                                    partial + 4,
                                    partial + 64,
                                    following,
                                    following + 4,
                                    following + 64,
                                    head_dim,
                                )
                            target = out + (token * num_q + head * group + h) * row_bytes
                            _finish(target, partial + 64, partial + 4, head_dim)


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> None:
    """The contract of `chatd_kernels.paged_attention.paged_attention`."""
    layout = kv_cache.layout
    num_tokens, num_q_heads = metadata.num_tokens, metadata.num_q_heads
    if layout != metadata.layout:
        raise ValueError(f"metadata was built for {metadata.layout}, the cache is {layout}")
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not in the cache of {layout.num_layers} layers")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is below 1")
    num_threads = len(metadata.workspace) // metadata.workspace_bytes
    attention_items.launch(
        metadata.num_items * layout.num_kv_heads > 1 and metadata.work * num_q_heads >= _PARALLEL_FROM,
        check_tensor("q", q, (num_tokens, num_q_heads, layout.head_dim)),
        check_tensor("out", out, (num_tokens, num_q_heads * layout.head_dim)),
        kv_cache.data.data_ptr() + layer * layout.layer_stride * layout.element_bytes,
        int(layout.dtype == torch.float16),
        layout.block_stride,
        layout.kv_stride,
        layout.head_stride,
        layout.block_size,
        layout.head_dim,
        num_q_heads,
        layout.num_kv_heads,
        metadata.tasks.ctypes.data,
        metadata.runs.ctypes.data,
        metadata.tokens.ctypes.data,
        metadata.items.ctypes.data,
        metadata.num_items,
        metadata.block_tables.ctypes.data,
        metadata.block_tables.shape[1],
        metadata.lengths.ctypes.data,
        metadata.partial_bases.ctypes.data,
        metadata.counters.ctypes.data,
        metadata.partials.ctypes.data,
        metadata.workspace.ctypes.data,
        metadata.workspace_bytes,
        metadata.max_task_rows,
        1 << 40 if window is None else window,
        float_bits(scale * _LOG2_E),
        num_threads=num_threads,
    )
