"""The rows of one step as arrays, checked: what the metadata of every backend is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BlockTables = Sequence[npt.NDArray[np.integer] | Sequence[int]] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of a step, and their rows.

    Attributes:
        bounds: `[S + 1]`; sequence s has the rows `bounds[s]` to `bounds[s + 1]`.
        before: `[S]` positions of each sequence before its first row.
        block_tables: `[S, max_blocks]`, -1 beyond each sequence's blocks.
        query_lens: `[S]` rows of each.
        sequence_of: `[num_tokens]` each row's sequence.
        lengths: `[num_tokens]` positions that each row sees, its own included.
    """

    bounds: Int64Array
    before: Int64Array
    block_tables: Int32Array
    query_lens: Int64Array
    sequence_of: Int64Array
    lengths: Int64Array

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return int(self.bounds[-1])


def check_batch(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    num_computed: Sequence[int] | npt.NDArray[np.integer],
    block_tables: BlockTables,
    block_size: int,
) -> Batch:
    """Check and convert what a step's metadata is built from; arguments as in `build_metadata`.

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
    query_lens = np.diff(bounds)
    if num_sequences == 0 or bounds[0] != 0 or query_lens.min() < 0 or before.min() < 0:
        raise ValueError("bounds must rise from 0 and computed counts must not be negative")
    table = _padded(block_tables, (before + query_lens) * (query_lens > 0), block_size)
    sequence_of = np.repeat(np.arange(num_sequences), query_lens)
    lengths = before[sequence_of] + np.arange(1, int(bounds[-1]) + 1) - bounds[sequence_of]
    return Batch(bounds, before, table, query_lens, sequence_of, lengths)


def _padded(
    block_tables: BlockTables,
    lengths: Int64Array,
    block_size: int,
) -> Int32Array:
    """The block tables as one contiguous int32 `[S, max_blocks]`, -1 beyond each sequence's blocks."""
    needed = -(-lengths // block_size)
    width = max(1, int(needed.max()))
    if isinstance(block_tables, np.ndarray):
        if block_tables.ndim != 2 or block_tables.shape[1] < int(needed.max()):
            raise ValueError(f"block tables {block_tables.shape} are too short for {int(needed.max())} blocks")
        table = np.where(np.arange(width) < needed[:, None], block_tables[:, :width], -1).astype(np.int32)
    else:
        table = np.full((len(block_tables), width), -1, dtype=np.int32)
        for index, (blocks, count) in enumerate(zip(block_tables, needed.tolist(), strict=True)):
            if len(blocks) < count:
                raise ValueError(f"block table {index} has {len(blocks)} blocks, its sequence needs {count}")
            table[index, :count] = blocks[:count]
    if np.count_nonzero(table < 0) != width * len(needed) - int(needed.sum()):
        raise ValueError("block tables hold negative block ids")
    return table
