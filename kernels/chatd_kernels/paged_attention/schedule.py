"""What attention needs to know of a step, built once and used by every layer.

A sequence with many rows (a prefill chunk) makes tiles of its own. All others are ordered so that sequences with equal
block ids lie side by side and share tiles as far as their blocks are the same (`work_list.py`): the blocks of a system
prompt that many sessions share are read once for all of them. A token's result does not depend on any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chatd_kernels.kv_cache import KVCacheLayout
from chatd_kernels.paged_attention.batch import BlockTables, Int32Array, Int64Array, check_batch
from chatd_kernels.paged_attention.microkernels import SEGMENT
from chatd_kernels.paged_attention.work_list import (
    ITEM_FIELDS,
    MOST_TOKENS,
    NUM_COUNTS,
    NUM_ITEMS,
    NUM_PARTIAL,
    RUN_FIELDS,
    TASK_FIELDS,
    build_work_list,
)
from chatd_kernels.runtime import num_threads

MAX_TILE_ROWS = 128
"""Rows of a tile: their scores of one segment (128 KiB) stay in the L2 cache."""

_WIDE_ROWS = 24


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know of a step; made by `build_metadata`, read by every layer.

    It also owns the kernel's scratch memory, so one metadata serves one call at a time.

    Attributes:
        num_tokens: rows of the batch.
        num_q_heads: query heads.
        layout: of the cache it was built for.
        lengths: `[num_tokens]` positions that each token sees, its own included.
        sequence_of: `[num_tokens]` each token's sequence.
        block_tables: `[num_sequences, max_blocks]`, -1 beyond each sequence's blocks.
        max_block: the largest block id.
        num_items: items, before they are multiplied by the KV heads.
        work: total (token, position) pairs.
        num_threads: threads that there is scratch memory for.
        buffers: arrays that the kernel reads and writes, by name.
        kernel_arguments: their addresses and sizes, in the kernel's order.
    """

    num_tokens: int
    num_q_heads: int
    layout: KVCacheLayout
    lengths: Int64Array
    sequence_of: Int64Array
    block_tables: Int32Array
    max_block: int
    num_items: int
    work: int
    num_threads: int
    buffers: dict[str, npt.NDArray[Any]]
    kernel_arguments: tuple[int, ...]


def workspace_bytes(rows: int, head_dim: int) -> int:
    """Scratch memory of one thread, as `items.attention_items` divides it, in whole cache lines."""
    row_floats = SEGMENT + 3 * head_dim + 4
    return -(-(rows * row_floats + 64 * head_dim) * 4 // 64) * 64


def build_metadata(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    num_computed: Sequence[int] | npt.NDArray[np.integer],
    block_tables: BlockTables,
    *,
    layout: KVCacheLayout,
    num_q_heads: int,
    device: torch.device | None = None,
) -> AttentionMetadata:
    """The contract of `chatd_kernels.paged_attention.build_metadata`: the work list of one step, on the host."""
    assert device is None or device.type == "cpu", f"metadata of CPUs for {device}"
    if num_q_heads % layout.num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are no multiple of {layout.num_kv_heads} KV heads")
    batch = check_batch(cu_seqlens, num_computed, block_tables, layout.block_size)
    bounds, before, table, query_lens = batch.bounds, batch.before, batch.block_tables, batch.query_lens
    lengths, num_tokens = batch.lengths, batch.num_tokens

    group = num_q_heads // layout.num_kv_heads
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
    costs = np.empty(max_tasks, dtype=np.int64)
    scratch = np.empty(4 * len(order) + 1, dtype=np.int64)
    counts = np.zeros(NUM_COUNTS, dtype=np.int64)
    work = int(lengths.sum())
    build_work_list.launch(
        False,
        bounds.ctypes.data,
        before.ctypes.data,
        len(bounds),
        layout.block_size,
        tile_tokens,
        max(1, work // (4 * num_threads())),
        sequences.ctypes.data,
        len(order),
        len(wide_sequences),
        shared.ctypes.data,
        tasks.ctypes.data,
        max_tasks,
        runs.ctypes.data,
        max_runs,
        tokens.ctypes.data,
        max_listed,
        items.ctypes.data,
        costs.ctypes.data,
        counts.ctypes.data,
        scratch.ctypes.data,
    )
    threads = num_threads()
    max_rows = int(counts[MOST_TOKENS]) * group
    scratch_bytes = workspace_bytes(max_rows, layout.head_dim)
    bases = np.zeros(num_tokens + 1, dtype=np.int64)
    np.cumsum(-(-lengths // SEGMENT), out=bases[1:])
    # Tokens of folded tiles and of one segment write no partials; memory for all of them is reserved but not touched.
    partial_floats = int(bases[-1]) * num_q_heads * (layout.head_dim + 16) if counts[NUM_PARTIAL] else 0
    buffers: dict[str, npt.NDArray[Any]] = {
        "tasks": tasks,
        "runs": runs,
        "tokens": tokens,
        "items": items,
        "bases": bases,
        "counters": np.zeros(num_tokens * layout.num_kv_heads, dtype=np.int64),
        "partials": np.empty(partial_floats, dtype=np.float32),
        "workspace": np.empty(scratch_bytes * threads, dtype=np.uint8),
    }
    num_items = int(counts[NUM_ITEMS])
    return AttentionMetadata(
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        layout=layout,
        lengths=lengths,
        sequence_of=batch.sequence_of,
        block_tables=table,
        max_block=int(table.max()),
        num_items=num_items,
        work=work,
        num_threads=threads,
        buffers=buffers,
        kernel_arguments=(
            tasks.ctypes.data,
            runs.ctypes.data,
            tokens.ctypes.data,
            items.ctypes.data,
            num_items,
            table.ctypes.data,
            table.shape[1],
            lengths.ctypes.data,
            bases.ctypes.data,
            buffers["counters"].ctypes.data,
            buffers["partials"].ctypes.data,
            buffers["workspace"].ctypes.data,
            scratch_bytes,
            max_rows,
        ),
    )


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
