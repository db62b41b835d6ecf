"""The work list of one step's attention, built once and used by every layer.

    token     a row of the batch; its query heads (of one KV head) are rows of a tile
    segment   256 positions of a sequence, aligned from position 0: the unit of the softmax
    task      one segment for a list of tokens
    run       a range of a task's 16-position groups whose blocks are the same for a range of the task's tokens
    item      what a thread takes: one task, or all the tasks of a tile of tokens in order (`fold`)

A sequence with many rows (a prefill chunk) makes tiles of its own. All others are ordered so that sequences with equal
block ids lie side by side, and a task holds the sequences that start its segment with the same block; inside, runs split
where the ids do. So the blocks of a system prompt that many sessions share are read once for all of them.

A token's result does not depend on any of this: see `cpu.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit


from chatd_kernels.kv_cache import KVCacheLayout
from chatd_kernels.paged_attention.microkernels import SEGMENT
from chatd_kernels.runtime import argument, kernel, num_threads
from chatd_kernels.vector import array_i32, array_i64

MAX_TILE_ROWS = 128
"""Rows of a tile: their scores of one segment (128 KiB) stay in the L2 cache."""

_WIDE_ROWS = 24
TASK_FIELDS = 6  # segment, first token, end token (in the token list), first run, end run, first token of the tile
RUN_FIELDS = 5  # first group, end group, first token, end token (in the token list), sequence
ITEM_FIELDS = 3  # first task, end task, fold

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know of a step; made by `build_metadata`, read by every layer.

    It also owns the kernels' scratch memory, so one metadata serves one call at a time.

    Attributes:
        num_tokens: rows of the batch.
        num_q_heads: query heads.
        layout: of the cache it was built for.
        lengths: `[num_tokens]` positions that each token sees, its own included.
        sequence_of: `[num_tokens]` each token's sequence.
        block_tables: `[num_sequences, max_blocks]`.
        num_items: items, before they are multiplied by the KV heads.
        work: total (token, position) pairs.
    """

    num_tokens: int
    num_q_heads: int
    layout: KVCacheLayout
    lengths: Int64Array
    sequence_of: Int64Array
    block_tables: Int32Array
    tasks: Int32Array
    runs: Int32Array
    tokens: Int32Array
    items: Int32Array
    num_items: int
    max_task_rows: int
    partial_bases: Int64Array
    counters: Int64Array
    partials: npt.NDArray[np.float32]
    workspace: npt.NDArray[np.uint8]
    workspace_bytes: int
    work: int


def workspace_bytes(rows: int, head_dim: int) -> int:
    """Scratch memory of one thread, see `cpu.attention_items`."""
    row_floats = SEGMENT + 3 * head_dim + 4
    scratch_floats = head_dim * 16 + 64 * head_dim
    return -(-(rows * row_floats + scratch_floats) * 4 // 64) * 64 + 64


def build_metadata(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    num_computed: Sequence[int] | npt.NDArray[np.integer],
    block_tables: Sequence[npt.NDArray[np.integer] | Sequence[int]] | npt.NDArray[np.integer],
    *,
    layout: KVCacheLayout,
    num_q_heads: int,
) -> AttentionMetadata:
    """Build the work list of one step.

    Args:
        cu_seqlens: `[S + 1]`; sequence s has the rows `cu_seqlens[s]` to `cu_seqlens[s + 1]` of the batch.
        num_computed: `[S]` positions of each sequence before its first row.
        block_tables: each sequence's block ids, in order, as a list of S or padded to `[S, max_blocks]`.
        layout: of the cache.
        num_q_heads: query heads, a multiple of the layout's KV heads.

    Raises:
        ValueError: the shapes do not agree, or a block table is too short for its sequence.
    """
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    before = np.asarray(num_computed, dtype=np.int64)
    num_sequences = len(before)
    if len(bounds) != num_sequences + 1 or len(block_tables) != num_sequences:
        raise ValueError(
            f"{len(bounds)} bounds, {num_sequences} computed counts and {len(block_tables)} block tables do not agree"
        )
    if num_q_heads % layout.num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are no multiple of {layout.num_kv_heads} KV heads")
    query_lens = np.diff(bounds)
    if num_sequences == 0 or bounds[0] != 0 or query_lens.min() < 0 or before.min() < 0:
        raise ValueError("bounds must rise from 0 and computed counts must not be negative")
    table = _padded(block_tables, (before + query_lens) * (query_lens > 0), layout.block_size)

    group = num_q_heads // layout.num_kv_heads
    num_tokens = int(bounds[-1])
    sequence_of = np.repeat(np.arange(num_sequences), query_lens)
    lengths = before[sequence_of] + np.arange(1, num_tokens + 1) - bounds[sequence_of]
    token_segments = -(-lengths // SEGMENT)
    segments = -(-(before + query_lens) // SEGMENT) * (query_lens > 0)
    tile_tokens = max(1, MAX_TILE_ROWS // group)
    wide = query_lens * group >= _WIDE_ROWS
    tiles = -(-query_lens // tile_tokens)
    order, shared = _order(table, np.flatnonzero(~wide & (query_lens > 0)))
    wide_sequences = np.flatnonzero(wide)
    sequences = np.concatenate((order, wide_sequences))

    # Upper bounds: a trie with n leaves has at most 2 n - 1 nodes, and nodes are the runs of a segment.
    max_tasks = int((segments * np.where(wide, tiles, 1)).sum())
    max_runs = int((segments * np.where(wide, tiles, 2)).sum())
    max_listed = int((query_lens * np.where(wide, 1, segments)).sum())
    tasks = np.empty(max_tasks * TASK_FIELDS, dtype=np.int32)
    runs = np.empty(max_runs * RUN_FIELDS, dtype=np.int32)
    tokens = np.empty(max_listed, dtype=np.int32)
    items = np.empty(max_tasks * ITEM_FIELDS, dtype=np.int32)
    scratch = np.empty(4 * num_sequences + max_tasks + 1, dtype=np.int64)
    counts = np.zeros(4, dtype=np.int64)
    work = int(lengths.sum())
    build_work_list.launch(
        False,
        bounds.ctypes.data,
        before.ctypes.data,
        len(sequences),
        table.ctypes.data,
        table.shape[1],
        layout.block_size,
        tile_tokens,
        max(1, work * layout.num_kv_heads // (4 * num_threads())),
        tasks.ctypes.data,
        runs.ctypes.data,
        tokens.ctypes.data,
        items.ctypes.data,
        counts.ctypes.data,
        sequences.ctypes.data,
        shared.ctypes.data,
        max_tasks,
        max_runs,
        max_listed,
        len(wide_sequences),
        scratch.ctypes.data,
        len(bounds),
    )
    max_rows = int(counts[3]) * group
    scratch_bytes = workspace_bytes(max_rows, layout.head_dim)
    partial_bases = np.zeros(num_tokens + 1, dtype=np.int64)
    np.cumsum(token_segments, out=partial_bases[1:])
    # Tokens of folded tiles and of one segment write no partials; sizing for all keeps the index simple.
    partial_floats = int(partial_bases[-1]) * num_q_heads * (layout.head_dim + 16) if counts[2] else 0
    return AttentionMetadata(
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        layout=layout,
        lengths=lengths,
        sequence_of=sequence_of,
        block_tables=table,
        tasks=tasks,
        runs=runs,
        tokens=tokens,
        items=items,
        num_items=int(counts[1]),
        max_task_rows=max_rows,
        partial_bases=partial_bases,
        counters=np.zeros(num_tokens * layout.num_kv_heads, dtype=np.int64),
        partials=np.empty(partial_floats, dtype=np.float32),
        workspace=np.empty(scratch_bytes * num_threads(), dtype=np.uint8),
        workspace_bytes=scratch_bytes,
        work=work,
    )


def _padded(
    block_tables: Sequence[npt.NDArray[np.integer] | Sequence[int]] | npt.NDArray[np.integer],
    lengths: Int64Array,
    block_size: int,
) -> Int32Array:
    """The block tables as one contiguous int32 `[S, max_blocks]`."""
    needed = -(-lengths // block_size)
    if isinstance(block_tables, np.ndarray):
        if block_tables.ndim != 2 or block_tables.shape[1] < needed.max():
            raise ValueError(f"block tables {block_tables.shape} are too short for {int(needed.max())} blocks")
        columns = np.arange(block_tables.shape[1])
        return np.where(columns < needed[:, None], block_tables, -1).astype(np.int32)
    table = np.full((len(block_tables), max(1, int(needed.max()))), -1, dtype=np.int32)
    for index, (blocks, count) in enumerate(zip(block_tables, needed.tolist(), strict=True)):
        if len(blocks) < count:
            raise ValueError(f"block table {index} has {len(blocks)} blocks, its sequence needs {count}")
        table[index, :count] = blocks[:count]
    return table


def _order(table: Int32Array, sequences: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Sequences ordered so that common beginnings of block tables are neighbours, and the blocks shared with the last.

    Padding (-1) sorts first and is shared with nobody.
    """
    shared = np.zeros(len(sequences) + 1, dtype=np.int64)
    if len(sequences) < 2:
        return sequences, shared
    rows = table[sequences]
    # Big-endian ids compare as bytes: the sort is a memcmp.
    keys = (rows + 1).astype(">u4")
    ranks = sorted(range(len(sequences)), key=lambda index: keys[index].tobytes())
    ordered = rows[ranks]
    differs = (ordered[1:] != ordered[:-1]) | (ordered[1:] < 0)
    shared[1:-1] = np.where(differs.any(axis=1), differs.argmax(axis=1), table.shape[1])
    return sequences[ranks], shared


@kernel
def build_work_list(frame: int) -> None:
    """Fill tasks, runs, tokens and items; counts = tasks, items, items that are not folded, most tokens of a task."""
    num_sequences, table_width = argument(frame, 2), argument(frame, 4)
    num_bounds = argument(frame, 20)
    bounds, before = array_i64(argument(frame, 0), num_bounds), array_i64(argument(frame, 1), num_bounds - 1)
    block_size, tile_tokens, fold_below = argument(frame, 5), argument(frame, 6), argument(frame, 7)
    max_tasks = argument(frame, 15)
    tasks, runs = array_i32(argument(frame, 8), max_tasks * 6), array_i32(argument(frame, 9), argument(frame, 16) * 5)
    tokens, items = array_i32(argument(frame, 10), argument(frame, 17)), array_i32(argument(frame, 11), max_tasks * 3)
    counts = array_i64(argument(frame, 12), 4)
    num_narrow = num_sequences - argument(frame, 18)
    order, shared = array_i64(argument(frame, 13), num_sequences), array_i64(argument(frame, 14), num_narrow + 1)
    scratch = array_i64(argument(frame, 19), 4 * num_sequences + max_tasks + 1)
    costs = scratch[4 * num_sequences + 1 : 4 * num_sequences + 1 + max_tasks]
    blocks_per_segment, groups_per_block = 256 // block_size, block_size // 16
    num_tasks, num_runs, num_listed, num_items, num_partial, most = 0, 0, 0, 0, 0, 0

    # Wide sequences: even tiles, each over all of its segments.
    for sequence in order[num_narrow:]:
        count = bounds[sequence + 1] - bounds[sequence]
        num_tiles = (count + tile_tokens - 1) // tile_tokens
        for tile in range(num_tiles):
            first, end = count * tile // num_tiles, count * (tile + 1) // num_tiles
            start = num_listed
            cost = 0
            for index in range(first, end):
                tokens[num_listed] = bounds[sequence] + index
                num_listed += 1
                cost += before[sequence] + index + 1
            most = max(most, end - first)
            first_task = num_tasks
            length = before[sequence] + end
            for segment in range((length + 255) // 256):
                # Tokens that see position 256 * segment: those at or after it.
                skipped = max(0, segment * 256 - before[sequence] - first)
                seen = min(256, length - segment * 256)
                _put(tasks, num_tasks * 6, segment, start + skipped, num_listed, num_runs, num_runs + 1)
                tasks[num_tasks * 6 + 5] = start
                _put(runs, num_runs * 5, 0, (seen + 15) // 16, start + skipped, num_listed, sequence)
                num_runs += 1
                num_tasks += 1
            if num_tasks - first_task == 1 or cost <= fold_below:
                items[num_items * 3], items[num_items * 3 + 1], items[num_items * 3 + 2] = first_task, num_tasks, 1
                costs[num_items] = cost
                num_items += 1
            else:
                for task in range(first_task, num_tasks):
                    items[num_items * 3], items[num_items * 3 + 1], items[num_items * 3 + 2] = task, task + 1, 0
                    costs[num_items] = (tasks[task * 6 + 2] - tasks[task * 6 + 1]) * 256
                    num_items += 1
                    num_partial += 1

    # Narrow sequences, in an order in which those that share blocks are neighbours.
    members, common = scratch[:num_sequences], scratch[num_sequences : 2 * num_sequences]
    offsets, open_runs = scratch[2 * num_sequences : 3 * num_sequences + 1], scratch[3 * num_sequences + 1 :]
    longest = 0
    for sequence in order[:num_narrow]:
        longest = max(longest, before[sequence] + bounds[sequence + 1] - bounds[sequence])
    for segment in range((longest + 255) // 256):
        # Members: sequences that reach this segment; `common` blocks with the member before.
        num_members = 0
        least = 0
        for index in range(num_narrow):
            sequence = order[index]
            least = min(least, shared[index]) if num_members > 0 else 0
            if before[sequence] + bounds[sequence + 1] - bounds[sequence] > segment * 256:
                members[num_members], common[num_members] = sequence, least
                num_members += 1
                least = 1 << 40
        first_column = segment * blocks_per_segment
        group = 0
        while group < num_members:
            # A group: neighbours that share the segment's first block, as many as a tile holds.
            start = num_listed
            end = group
            while end < num_members:
                sequence = members[end]
                skipped = max(0, segment * 256 - before[sequence])
                size = bounds[sequence + 1] - bounds[sequence] - skipped
                if end > group and (common[end] <= first_column or num_listed - start + size > tile_tokens):
                    break
                offsets[end] = num_listed
                for token in range(bounds[sequence] + skipped, bounds[sequence + 1]):
                    tokens[num_listed] = token
                    num_listed += 1
                end += 1
            offsets[end] = num_listed
            most = max(most, num_listed - start)
            first_run = num_runs
            for index in range(group, end):
                open_runs[index] = -1
            for column in range(first_column, first_column + blocks_per_segment):
                low = group
                while low < end:
                    if _length(before, bounds, members[low]) <= column * block_size:
                        low += 1
                        continue
                    high = low + 1
                    while high < end and common[high] > column:
                        high += 1
                    run = open_runs[low]
                    group_end = (column - first_column + 1) * groups_per_block
                    if (
                        run >= 0
                        and runs[run * 5 + 3] == offsets[high]
                        and (runs[run * 5 + 1] == group_end - groups_per_block)
                    ):
                        runs[run * 5 + 1] = group_end
                    else:
                        _put(
                            runs,
                            num_runs * 5,
                            group_end - groups_per_block,
                            group_end,
                            offsets[low],
                            offsets[high],
                            members[low],
                        )
                        open_runs[low] = num_runs
                        num_runs += 1
                    low = high
            _put(tasks, num_tasks * 6, segment, start, num_listed, first_run, num_runs)
            tasks[num_tasks * 6 + 5] = start
            items[num_items * 3], items[num_items * 3 + 1], items[num_items * 3 + 2] = num_tasks, num_tasks + 1, 0
            cost = 0
            for run in range(first_run, num_runs):
                cost += (runs[run * 5 + 1] - runs[run * 5]) * 16 * (runs[run * 5 + 3] - runs[run * 5 + 2] + 2)
            costs[num_items] = cost
            num_items += 1
            num_partial += 1
            num_tasks += 1
            group = end

    # Expensive items first, so that the threads end together. Shell sort: short, in place, good for thousands.
    gap = 1
    while gap < num_items:
        gap = gap * 3 + 1
    while gap > 0:
        for index in range(gap, num_items):
            cost, first, end, fold = costs[index], items[index * 3], items[index * 3 + 1], items[index * 3 + 2]
            place = index
            while place >= gap and costs[place - gap] < cost:
                costs[place] = costs[place - gap]
                for field in range(3):
                    items[place * 3 + field] = items[(place - gap) * 3 + field]
                place -= gap
            costs[place] = cost
            items[place * 3], items[place * 3 + 1], items[place * 3 + 2] = first, end, fold
        gap //= 3
    counts[0], counts[1], counts[2], counts[3] = num_tasks, num_items, num_partial, most


@njit  # type: ignore[untyped-decorator]
def _put(target: Int32Array, at: int, a: int, b: int, c: int, d: int, e: int) -> None:
    """Write five fields."""
    target[at], target[at + 1], target[at + 2], target[at + 3], target[at + 4] = a, b, c, d, e


@njit  # type: ignore[untyped-decorator]
def _length(before: Int64Array, bounds: Int64Array, sequence: int) -> int:
    """Positions of a sequence, those of this step included."""
    return before[sequence] + bounds[sequence + 1] - bounds[sequence]
