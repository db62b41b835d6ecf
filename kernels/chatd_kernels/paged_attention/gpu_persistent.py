"""Metadata of attention on GPUs that one step after another builds in the same memory.

Block tables lie on the device and are changed in place, by whoever runs steps; a tile names the row of its sequence's
table. What splits gather has memory of its own, large enough for every step, since all layers of all steps run one
after the other: no step allocates any, and captured graphs share it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from chatd_kernels.gpu_device import DeviceFacts, device_facts
from chatd_kernels.kv_cache import KVCacheLayout
from chatd_kernels.paged_attention.batch import Batch, Int32Array, Int64Array
from chatd_kernels.paged_attention.gpu_schedule import (
    GpuAttentionMetadata,
    HostTiles,
    TileBatch,
    TileShape,
    build_tiles,
    most_partial_rows,
    tile_shapes,
)


class PersistentAttention:
    """Builds the metadata of steps.

    Args:
        layout: Of the cache.
        num_q_heads: Query heads.
        device: Of the cache.
        num_tables: Rows of `tables`.
        max_num_seqs: Most sequences of a step.
        max_model_len: Most positions of a sequence.
        is_deterministic: Whether a token's result may depend on its own sequence alone.

    Attributes:
        tables: `[num_tables, max_blocks]` int32 on the device; whoever runs steps writes it.

    Raises:
        ValueError: no kernel takes so many query heads for each KV head.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_q_heads: int,
        device: torch.device,
        *,
        num_tables: int,
        max_num_seqs: int,
        max_model_len: int,
        is_deterministic: bool = False,
    ) -> None:
        self._layout = layout
        self._num_q_heads = num_q_heads
        self._max_model_len = max_model_len
        self._facts: DeviceFacts = device_facts(device)
        self._shapes = tile_shapes(layout, num_q_heads, self._facts, is_deterministic=is_deterministic)
        self.tables = torch.zeros(
            (num_tables, -(-max_model_len // layout.block_size)), dtype=torch.int32, device=device
        )
        rows = most_partial_rows(
            self._shapes, layout.num_kv_heads, num_q_heads, self._facts, max_num_seqs, max_model_len
        )
        self._partials, self._partial_max, self._partial_sum = (
            torch.empty(size, dtype=torch.float32, device=device) for size in (rows * layout.head_dim, rows, rows)
        )

    def cut(self, bounds: Int64Array, before: Int64Array, tables: Int64Array) -> tuple[HostTiles, Batch]:
        """Cut a step into tiles.

        Args:
            bounds: `[S + 1]`; sequence s has the rows `bounds[s]` to `bounds[s + 1]` of the batch.
            before: `[S]` positions of each sequence before its first row.
            tables: `[S]` each sequence's row of `tables`.
        """
        query_lens = np.diff(bounds)
        sequence_of = np.repeat(np.arange(len(before)), query_lens)
        lengths = before[sequence_of] + np.arange(1, int(bounds[-1]) + 1) - bounds[sequence_of]
        # The tables are on the device.
        batch = Batch(bounds, before, np.zeros((len(before), 1), dtype=np.int32), query_lens, sequence_of, lengths)
        tiles = build_tiles(batch, self._shapes, self._layout.num_kv_heads, self._facts)
        for some in (tiles.decode, tiles.prefill):
            some[:, 0] = tables[some[:, 0]]
        return tiles, batch

    def decode_splits(self, num_decodes: int) -> int:
        """Return the splits of a step of so many decodes, whatever their lengths: what a captured graph is made for."""
        one = np.array([0, 1], dtype=np.int64)
        batch = Batch(one, one[:1], np.zeros((1, 1), dtype=np.int32), one[1:], one[:1], one[1:])
        tiles = build_tiles(
            batch,
            self._shapes,
            self._layout.num_kv_heads,
            self._facts,
            num_decodes=num_decodes,
            longest=self._max_model_len,
        )
        return tiles.decode_splits

    def most_prefill_tiles(self, num_rows: int) -> int:
        """Return how many large tiles a step of so many rows has at most."""
        return num_rows // (self._shapes.decode.tokens + 1) + num_rows // self._shapes.prefill.tokens

    def metadata(
        self,
        num_tokens: int,
        decode: torch.Tensor,
        decode_splits: int,
        prefill: torch.Tensor,
        prefill_splits: int,
    ) -> GpuAttentionMetadata:
        """Return the metadata of a step whose tiles are on the device.

        Args:
            num_tokens: Rows of the batch.
            decode: `[num_tiles, 4]` int32, tiles of the decode kind.
            decode_splits: Of each.
            prefill: Likewise, all others.
            prefill_splits: Of each.
        """
        return GpuAttentionMetadata(
            layout=self._layout,
            num_q_heads=self._num_q_heads,
            num_tokens=num_tokens,
            block_tables=self.tables,
            decode=self._tile_batch(decode, self._shapes.decode, decode_splits),
            prefill=self._tile_batch(prefill, self._shapes.prefill, prefill_splits),
            segment=self._shapes.segment,
        )

    def _tile_batch(self, tiles: torch.Tensor, shape: TileShape, num_splits: int) -> TileBatch:
        layout, group = self._layout, self._num_q_heads // self._layout.num_kv_heads
        empty = TileBatch(shape, tiles, num_splits, self._partials[:0], self._partial_max[:0], self._partial_sum[:0])
        # In deterministic mode small tiles are merged even where one segment holds them.
        is_split = num_splits > 1 or (self._shapes.segment and shape is self._shapes.decode)
        if not is_split or not len(tiles):
            return empty
        size = (len(tiles), layout.num_kv_heads, num_splits, shape.tokens * group)
        rows = int(np.prod(size))
        assert rows <= len(self._partial_max), (
            f"{rows} rows of partial sums, there is room for {len(self._partial_max)}"
        )
        return replace(
            empty,
            partials=self._partials[: rows * layout.head_dim].view(*size, layout.head_dim),
            partial_max=self._partial_max[:rows].view(size),
            partial_sum=self._partial_sum[:rows].view(size),
        )


def decode_tiles(tables: Int64Array, positions: Int64Array) -> Int32Array:
    """Return the tiles `[num_sequences, 4]` of a step in which each sequence has one row, in the order of the rows."""
    tiles = np.empty((len(tables), 4), dtype=np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = tables, np.arange(len(tables)), 1, positions
    return tiles
