"""From a plan to the flattened arrays of one forward on the CPU. Reads nothing but the plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from chatd.engine.plan import BlockId, Plan, RequestId
from chatd.models.attention import ForwardInput
from chatd_kernels.kv_cache import KVCacheLayout
from chatd_kernels.paged_attention import build_metadata

_FIRST_CAPACITY = 32


class _BlockRow:
    """One request's block table as an array, brought up to the plan's at every step.

    The plan is the truth: between steps blocks are appended, but preemption, a trim or an adopted block changes others
    too. So the ids are compared, which costs a memory scan; only what is new is converted.
    """

    __slots__ = ("_array", "_ids")

    def __init__(self) -> None:
        self._ids: list[BlockId] = []
        self._array = np.empty(_FIRST_CAPACITY, dtype=np.int32)

    def update(self, block_ids: Sequence[BlockId]) -> npt.NDArray[np.int32]:
        """Return the table, `[num_blocks]`; valid until the next update."""
        known, num_blocks = len(self._ids), len(block_ids)
        if known > num_blocks or block_ids[:known] != self._ids:
            known = 0
            self._ids.clear()
        if num_blocks > known:
            new = block_ids[known:]
            self._ids.extend(new)
            if num_blocks > len(self._array):
                grown = np.empty(max(num_blocks, 2 * len(self._array)), dtype=np.int32)
                grown[:known] = self._array[:known]
                self._array = grown
            self._array[known:num_blocks] = new
        return self._array[:num_blocks]


class InputBatch:
    """Builds the inputs of one forward after another.

    Args:
        layout: Of the KV cache.
        num_q_heads: Query heads of the model.
    """

    def __init__(self, layout: KVCacheLayout, num_q_heads: int) -> None:
        self._layout = layout
        self._num_q_heads = num_q_heads
        self._rows: dict[RequestId, _BlockRow] = {}

    def build(self, plan: Plan) -> ForwardInput:
        """Return the rows of all chunks, in the plan's order; logits for the last row of each chunk that samples."""
        chunks = plan.chunks
        block_size = plan.block_size
        assert block_size == self._layout.block_size, f"a plan of {block_size}-token blocks"
        num_chunks = len(chunks)
        lengths = [len(chunk.token_ids) for chunk in chunks]
        bounds = np.zeros(num_chunks + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        token_ids = np.empty(int(bounds[-1]), dtype=np.int64)
        logits_rows = []
        tables = []
        row = 0
        for chunk, length in zip(chunks, lengths, strict=True):
            if length == 1:
                token_ids[row] = chunk.token_ids[0]
            else:
                token_ids[row : row + length] = chunk.token_ids
            row += length
            if chunk.sample is not None:
                logits_rows.append(row - 1)
            tables.append(self._row(chunk.request_id).update(chunk.block_ids))
        attention = build_metadata(
            bounds,
            [chunk.start for chunk in chunks],
            tables,
            layout=self._layout,
            num_q_heads=self._num_q_heads,
        )
        positions = attention.lengths - 1
        blocks = attention.block_tables[attention.sequence_of, positions // block_size].astype(np.int64)
        slot_mapping = blocks * block_size + positions % block_size
        self._forget(plan)
        return ForwardInput(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            attention=attention,
            logits_rows=torch.from_numpy(np.array(logits_rows, dtype=np.int64)),
        )

    def _row(self, request_id: RequestId) -> _BlockRow:
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = _BlockRow()
        return row

    def _forget(self, plan: Plan) -> None:
        """Drop the tables of requests that are gone, once they outnumber those of this step."""
        if len(self._rows) > 2 * len(plan.chunks) + 64:
            self._rows = {chunk.request_id: self._rows[chunk.request_id] for chunk in plan.chunks}
