"""The attention kernel: takes items of the work list, follows block tables, and calls the arithmetic of `rows.py`.

Positions at or past a row's end, or before its window, are masked by selection before the softmax and skipped after it:
what their slots hold, NaN included, is never an operand of the row.
"""

from __future__ import annotations

import numpy as np

from chatd_kernels.jit import jit
from chatd_kernels.paged_attention.rows import (
    finish,
    merge,
    score_group,
    score_one_row,
    score_three_rows,
    softmax_row,
    weigh_stretch,
    widen,
)
from chatd_kernels.runtime import argument, claim_worker, kernel, next_item
from chatd_kernels.vector import (
    copy_bytes,
    fetch_add,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
    vload,
    vmul,
    vsplat,
    vstore,
)

_ZERO = np.float32(0.0)
# From three groups of rows on it pays to widen K and V once into float32, V in stretches of several blocks.
_WIDE_ROWS = 13

# The kernel's arguments, by their place in the frame.
_Q, _OUT, _CACHE, _IS_HALF, _BLOCK_STRIDE, _KV_STRIDE, _HEAD_STRIDE, _BLOCK_SIZE, _HEAD_DIM = range(9)
_NUM_Q, _NUM_KV, _TASKS, _RUNS, _TOKENS, _ITEMS, _NUM_ITEMS, _TABLE, _TABLE_WIDTH = range(9, 18)
_LENGTHS, _BASES, _COUNTERS, _PARTIALS, _WORKSPACE, _WORKSPACE_BYTES, _MAX_ROWS, _WINDOW, _SCALE = range(18, 27)

Space = tuple[int, ...]
"""A thread's scratch memory: addresses of scores, queries, outputs, running outputs, widened K or V, maxima, sums, and
the running maxima and sums."""


@jit
def _group_address(frame: int, tile: int, blocks: int, group: int) -> int:
    """Where a head's 16 positions number `group` of a segment lie, given its tile in block 0 and its block ids."""
    groups_per_block = argument(frame, _BLOCK_SIZE) // 16
    block: int = load_i32(blocks + group // groups_per_block * 4)
    offset: int = block * argument(frame, _BLOCK_STRIDE) + group % groups_per_block * argument(frame, _HEAD_DIM) * 16
    return tile + offset * (2 if argument(frame, _IS_HALF) != 0 else 4)


@jit
def _run_blocks(frame: int, run: int, segment: int) -> int:
    """Address of the block ids that a run follows, from its segment's first block on."""
    column = segment * (256 // argument(frame, _BLOCK_SIZE))
    sequence: int = load_i32(run + 16)
    blocks: int = argument(frame, _TABLE) + (sequence * argument(frame, _TABLE_WIDTH) + column) * 4
    return blocks


@jit
def _token_bounds(frame: int, index: int, segment: int) -> tuple[int, int]:
    """The positions of a segment, from 0 to 256, that a listed token sees: low <= position < high."""
    length = load_i64(argument(frame, _LENGTHS) + load_i32(argument(frame, _TOKENS) + index * 4) * 8)
    return max(0, length - argument(frame, _WINDOW) - segment * 256), min(256, length - segment * 256)


@jit
def _gather_queries(frame: int, head: int, first: int, end: int, target: int) -> None:
    """Copy the scaled query rows of the listed tokens first to end."""
    num_q, num_kv = argument(frame, _NUM_Q), argument(frame, _NUM_KV)
    group, row_bytes = num_q // num_kv, argument(frame, _HEAD_DIM) * 4
    scale = vsplat(np.float32(load_f64(frame + (2 + _SCALE) * 8)))
    for index in range(first, end):
        token = load_i32(argument(frame, _TOKENS) + index * 4)
        source = argument(frame, _Q) + (token * num_q + head * group) * row_bytes
        for offset in range(0, group * row_bytes, 64):
            vstore(target + offset, vmul(vload(source + offset), scale))
        target += group * row_bytes


@jit
def _score_run(frame: int, segment: int, keys: int, run: int, q: int, scores: int, scratch: int) -> None:
    """Scores of a run's rows against its groups of positions."""
    head_dim, is_half = argument(frame, _HEAD_DIM), argument(frame, _IS_HALF) != 0
    group = argument(frame, _NUM_Q) // argument(frame, _NUM_KV)
    g, high_group, rows = load_i32(run), load_i32(run + 4), (load_i32(run + 12) - load_i32(run + 8)) * group
    blocks = _run_blocks(frame, run, segment)
    while g < high_group:
        key = _group_address(frame, keys, blocks, g)
        target = scores + g * 64
        if rows == 3 and g + 1 < high_group:
            score_three_rows(q, key, _group_address(frame, keys, blocks, g + 1), target, head_dim, is_half)
            g += 2
        elif rows == 1 and g + 3 < high_group:
            key1 = _group_address(frame, keys, blocks, g + 1)
            key2 = _group_address(frame, keys, blocks, g + 2)
            key3 = _group_address(frame, keys, blocks, g + 3)
            score_one_row(q, key, key1, key2, key3, target, head_dim, is_half)
            g += 4
        else:
            is_widened = is_half and rows >= _WIDE_ROWS
            if is_widened:
                widen(key, scratch, 16 * head_dim, is_half)
                key = scratch
            score_group(q, rows, key, target, head_dim, is_half and not is_widened)
            g += 1


@jit
def _weigh_tokens(
    frame: int,
    segment: int,
    first: int,
    end: int,
    start: int,
    stop: int,
    weights: int,
    value: int,
    out: int,
    is_half: bool,
) -> None:
    """Add V of the positions start to stop of a segment to the rows of the listed tokens first to end.

    Neighbours that see all of the stretch go together, any other token alone over what it sees.
    """
    head_dim = argument(frame, _HEAD_DIM)
    group = argument(frame, _NUM_Q) // argument(frame, _NUM_KV)
    stride = head_dim * (2 if is_half else 4)
    index = first
    while index < end:
        upto = index
        low, high = start, stop
        while upto < end:
            low, high = _token_bounds(frame, upto, segment)
            if low > start or high < stop:
                break
            upto += 1
        if upto > index:
            low, high = start, stop
        else:
            low, high = max(low, start), min(high, stop)
            upto = index + 1
        if low < high:
            row = (index - first) * group
            weigh_stretch(
                weights + row * 1024 + low * 4,
                (upto - index) * group,
                value + (low - start) * stride,
                out + row * head_dim * 4,
                head_dim,
                high - low,
                is_half,
            )
        index = upto


@jit
def _weigh_run(frame: int, segment: int, values: int, run: int, weights: int, out: int, scratch: int) -> None:
    """Add a run's V to its tokens' rows, group after group."""
    head_dim, is_half = argument(frame, _HEAD_DIM), argument(frame, _IS_HALF) != 0
    groups_per_block = argument(frame, _BLOCK_SIZE) // 16
    group = argument(frame, _NUM_Q) // argument(frame, _NUM_KV)
    g, high_group, first, end = (load_i32(run), load_i32(run + 4), load_i32(run + 8), load_i32(run + 12))
    blocks = _run_blocks(frame, run, segment)
    is_wide = (end - first) * group >= _WIDE_ROWS
    while g < high_group:
        if is_wide:
            count = min(4, high_group - g)
            for i in range(count):
                source = _group_address(frame, values, blocks, g + i)
                widen(source, scratch + i * head_dim * 64, 16 * head_dim, is_half)
            value = scratch
        else:
            count = min(groups_per_block - g % groups_per_block, high_group - g)
            value = _group_address(frame, values, blocks, g)
        is_narrow = is_half and not is_wide
        _weigh_tokens(frame, segment, first, end, g * 16, (g + count) * 16, weights, value, out, is_narrow)
        g += count


@jit
def _partial(frame: int, token: int, segment: int, q_head: int) -> int:
    """Address of a row's partial result of one segment: maximum, sum, padding to 64 bytes, output."""
    base: int = load_i64(argument(frame, _BASES) + token * 8)
    number = (base + segment) * argument(frame, _NUM_Q) + q_head
    partial: int = argument(frame, _PARTIALS) + number * (argument(frame, _HEAD_DIM) * 4 + 64)
    return partial


@jit
def _store_partials(frame: int, head: int, token: int, segment: int, length: int, m: int, total: int, o: int) -> None:
    """Keep a token's results of a segment; whoever brings its last one merges them all.

    The count of arrivals goes on from layer to layer, by the number of segments each.
    """
    head_dim, num_q, num_kv = (argument(frame, _HEAD_DIM), argument(frame, _NUM_Q), argument(frame, _NUM_KV))
    group = num_q // num_kv
    for h in range(group):
        partial = _partial(frame, token, segment, head * group + h)
        store_f32(partial, load_f32(m + h * 4))
        store_f32(partial + 4, load_f32(total + h * 4))
        copy_bytes(partial + 64, o + h * head_dim * 4, head_dim * 4)
    num_segments = (length + 255) // 256
    arrived = fetch_add(argument(frame, _COUNTERS) + (token * num_kv + head) * 8, 1) + 1
    if arrived % num_segments != 0:
        return
    first_segment = max(0, length - argument(frame, _WINDOW)) // 256
    for h in range(group):
        q_head = head * group + h
        state = _partial(frame, token, first_segment, q_head)
        for other in range(first_segment + 1, num_segments):
            new = _partial(frame, token, other, q_head)
            merge(state, state + 4, state + 64, new, new + 4, new + 64, head_dim)
        finish(argument(frame, _OUT) + (token * num_q + q_head) * head_dim * 4, state + 64, state + 4, head_dim)


@jit
def _fold(frame: int, head: int, token: int, segment: int, length: int, row: int, state: int, space: Space) -> None:
    """Merge a token's results of a segment (from `row` on) into its running ones (from `state` on).

    The token's last segment finishes them.
    """
    head_dim, num_q, num_kv = argument(frame, _HEAD_DIM), argument(frame, _NUM_Q), argument(frame, _NUM_KV)
    group = num_q // num_kv
    _, _, outputs, states, _, maxima, totals, state_maxima, state_totals = space
    first_segment, last_segment = max(0, length - argument(frame, _WINDOW)) // 256, (length - 1) // 256
    for h in range(group):
        m, total, o = maxima + (row + h) * 4, totals + (row + h) * 4, outputs + (row + h) * head_dim * 4
        sm, st = state_maxima + (state + h) * 4, state_totals + (state + h) * 4
        so = states + (state + h) * head_dim * 4
        if segment == first_segment:
            copy_bytes(so, o, head_dim * 4)
            store_f32(sm, load_f32(m))
            store_f32(st, load_f32(total))
        elif segment > first_segment:
            merge(sm, st, so, m, total, o, head_dim)
        if segment == last_segment:
            finish(argument(frame, _OUT) + (token * num_q + head * group + h) * head_dim * 4, so, st, head_dim)


@jit
def _task(frame: int, head: int, task: int, fold: bool, space: Space) -> None:
    """One segment for a list of tokens."""
    head_dim = argument(frame, _HEAD_DIM)
    group, row_bytes = argument(frame, _NUM_Q) // argument(frame, _NUM_KV), head_dim * 4
    element = 2 if argument(frame, _IS_HALF) != 0 else 4
    keys = argument(frame, _CACHE) + head * argument(frame, _HEAD_STRIDE) * element
    values = keys + argument(frame, _KV_STRIDE) * element
    scores, queries, outputs, _, scratch, maxima, totals, _, _ = space
    segment, first, end = load_i32(task), load_i32(task + 4), load_i32(task + 8)
    first_run, end_run, tile_first = load_i32(task + 12), load_i32(task + 16), load_i32(task + 20)

    # With a window, whole segments may be out of sight.
    is_seen = False
    for index in range(first, end):
        low, high = _token_bounds(frame, index, segment)
        is_seen |= low < high
    if is_seen:
        _gather_queries(frame, head, first, end, queries)
        for run_index in range(first_run, end_run):
            run = argument(frame, _RUNS) + run_index * 20
            row = (load_i32(run + 8) - first) * group
            _score_run(frame, segment, keys, run, queries + row * row_bytes, scores + row * 1024, scratch)

        for index in range(first, end):
            low, high = _token_bounds(frame, index, segment)
            if low < high:
                for row in range((index - first) * group, (index - first + 1) * group):
                    softmax_row(scores + row * 1024, low, high, maxima + row * 4, totals + row * 4)

        zero = vsplat(_ZERO)
        for offset in range(0, (end - first) * group * row_bytes, 64):
            vstore(outputs + offset, zero)
        for run_index in range(first_run, end_run):
            run = argument(frame, _RUNS) + run_index * 20
            row = (load_i32(run + 8) - first) * group
            _weigh_run(frame, segment, values, run, scores + row * 1024, outputs + row * row_bytes, scratch)

    for index in range(first, end):
        token = load_i32(argument(frame, _TOKENS) + index * 4)
        length = load_i64(argument(frame, _LENGTHS) + token * 8)
        row = (index - first) * group
        if fold or length <= 256:
            _fold(frame, head, token, segment, length, row, (index - tile_first) * group, space)
        else:
            m, total, o = maxima + row * 4, totals + row * 4, outputs + row * row_bytes
            _store_partials(frame, head, token, segment, length, m, total, o)


@kernel
def attention_items(frame: int) -> None:
    """Items are (work item, KV head); the heads of one item follow each other."""
    num_kv, max_rows = argument(frame, _NUM_KV), argument(frame, _MAX_ROWS)
    row_bytes = argument(frame, _HEAD_DIM) * 4
    scores = argument(frame, _WORKSPACE) + claim_worker(frame) * argument(frame, _WORKSPACE_BYTES)
    queries = scores + max_rows * 1024
    outputs = queries + max_rows * row_bytes
    states = outputs + max_rows * row_bytes
    scratch = states + max_rows * row_bytes
    maxima = scratch + row_bytes * 64
    totals = maxima + max_rows * 4
    space = (scores, queries, outputs, states, scratch, maxima, totals, totals + max_rows * 4, totals + max_rows * 8)
    while True:
        number = next_item(frame)
        if number >= argument(frame, _NUM_ITEMS) * num_kv:
            break
        item, head = argument(frame, _ITEMS) + number // num_kv * 12, number % num_kv
        for task in range(load_i32(item), load_i32(item + 4)):
            _task(frame, head, argument(frame, _TASKS) + task * 24, load_i32(item + 8) != 0, space)
