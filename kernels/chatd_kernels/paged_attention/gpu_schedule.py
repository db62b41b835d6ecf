"""What attention on GPUs needs to know of a step: tiles, built on the host and copied as tensors.

A tile is (row of the block table, first token, number of tokens, position of the first). Sequences with few tokens make
one tile each and run with a small matrix ("decode"); the tokens of others are cut into tiles of a large one
("prefill"). Tiles of no tokens are padding, so that a captured graph serves every batch up to its size.

Positions are split over programs where there are too few tiles to fill the device. In deterministic mode they are
always cut into segments of the same length, and both kinds have one matrix size: a token's result then depends on
nothing but its own sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from chatd_kernels.gpu_device import DeviceFacts, to_device
from chatd_kernels.kv_cache import KVCacheLayout
from chatd_kernels.launch import next_power_of_2
from chatd_kernels.paged_attention.batch import Batch, Int32Array

SEGMENT = 512
"""Positions of a split in deterministic mode; a multiple of every BLOCK_N."""

_SMALL_MATRIX = 16  # rows: the least that a matrix instruction takes
_STAGES = 3  # the block table's entry, then K and V, then what is computed with them
_DECODE_PROGRAMS, _PREFILL_PROGRAMS = 4, 2  # for each processor
_DECODE_POSITIONS, _PREFILL_POSITIONS = 256, 1024  # at least, of a split


@dataclass(frozen=True, slots=True)
class TileShape:
    """How the programs of one kind of tile are compiled.

    Attributes:
        rows: Of the matrix: query heads of one KV head times tokens, and what is left over.
        positions: Of one block of the loop.
        num_warps: Of a program.
        num_stages: Blocks in flight.
        tokens: Most of a tile.
    """

    rows: int
    positions: int
    num_warps: int
    num_stages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TileShapes:
    """The shapes of both kinds of tile.

    Attributes:
        decode: For sequences of few tokens.
        prefill: For all others.
        segment: Positions of a segment in deterministic mode, else 0.
    """

    decode: TileShape
    prefill: TileShape
    segment: int


def tile_shapes(
    layout: KVCacheLayout, num_q_heads: int, facts: DeviceFacts, *, is_deterministic: bool = False
) -> TileShapes:
    """Choose the shapes for a model on a device.

    Raises:
        ValueError: the query heads are no multiple of the KV heads, or more than 64 times as many.
    """
    if num_q_heads % layout.num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are no multiple of {layout.num_kv_heads} KV heads")
    group = num_q_heads // layout.num_kv_heads
    if group > 64:
        raise ValueError(f"{group} query heads share a KV head, the limit is 64")
    is_half = layout.dtype.itemsize == 2
    # What keeps registers from spilling: in deterministic mode a program holds what it gathered and a segment's,
    # codes become numbers in registers, and so do operands where products do not read them from shared memory.
    is_wide = facts.fits_wide_tiles and layout.head_dim <= 128 and is_half and not is_deterministic
    widest = 128 if facts.has_shared_operands and not is_deterministic else 64
    is_long = layout.head_dim <= widest and (is_half or (layout.is_quantized and facts.has_shared_operands))
    positions = 64 if is_long else 32
    rows = 128 if is_wide else 64
    is_light = not is_deterministic or facts.has_shared_operands
    warps = 4 if rows == 64 and layout.head_dim <= 64 and is_half and is_light else 8
    tokens = max(1, _SMALL_MATRIX // group)
    prefill = TileShape(rows, positions, warps, _STAGES, rows // group)
    if is_deterministic:
        return TileShapes(replace(prefill, tokens=tokens), prefill, SEGMENT)
    small = max(_SMALL_MATRIX, next_power_of_2(group))
    # With FP8 and small heads the third stage costs a register that is spilled, for one more program beside it.
    stages = _STAGES - 1 if layout.dtype == torch.float8_e4m3fn and layout.head_dim <= 64 else _STAGES
    return TileShapes(TileShape(small, positions, 4, stages, tokens), prefill, 0)


@dataclass(frozen=True, slots=True)
class HostTiles:
    """The tiles of one step, on the host.

    Attributes:
        num_tokens: Rows of the batch.
        decode: `[num_tiles, 4]`.
        prefill: Likewise.
        decode_splits: Splits of each tile.
        prefill_splits: Likewise.
        block_tables: `[num_sequences, max_blocks]`; what lies beyond a sequence's blocks is not read.
    """

    num_tokens: int
    decode: Int32Array
    prefill: Int32Array
    decode_splits: int
    prefill_splits: int
    block_tables: Int32Array


def build_tiles(
    batch: Batch,
    shapes: TileShapes,
    num_kv_heads: int,
    facts: DeviceFacts,
    *,
    num_decodes: int = 0,
    longest: int = 0,
) -> HostTiles:
    """Cut a step into tiles.

    With the same `num_decodes` and `longest`, each no less than the batch needs, and no sequence of many tokens, any
    batch gives as many tiles and the same splits: what a captured graph needs.

    Args:
        batch: The step.
        shapes: From `tile_shapes`.
        num_kv_heads: KV heads.
        facts: Of the device.
        num_decodes: At least so many tiles of the decode kind; what is added is padding.
        longest: Splits are chosen for sequences of at least so many positions.
    """
    ends = batch.before + batch.query_lens
    is_few = batch.query_lens <= shapes.decode.tokens
    few = np.flatnonzero(is_few & (batch.query_lens > 0))
    decode = np.zeros((max(len(few), num_decodes), 4), dtype=np.int32)
    decode[: len(few)] = np.stack((few, batch.bounds[few], batch.query_lens[few], batch.before[few]), axis=1)
    many = np.flatnonzero(~is_few)
    counts = -(-batch.query_lens[many] // shapes.prefill.tokens)
    owner = np.repeat(many, counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = index * shapes.prefill.tokens
    tokens = np.minimum(batch.query_lens[owner] - offset, shapes.prefill.tokens)
    # Tiles that see most come first: the last programs to run are the short ones.
    order = np.argsort(-(batch.before[owner] + offset), kind="stable")
    prefill = np.stack((owner, batch.bounds[owner] + offset, tokens, batch.before[owner] + offset), axis=1)[order]

    def splits(num_tiles: int, seen: int, programs: int, positions: int) -> int:
        if shapes.segment:
            return -(-max(seen, longest, 1) // shapes.segment)
        wanted = programs * facts.num_processors // max(1, num_tiles * num_kv_heads)
        return max(1, min(wanted, -(-max(seen, longest) // positions)))

    seen_by_few = int(ends[few].max(initial=0))
    seen_by_many = int(ends[many].max(initial=0))
    return HostTiles(
        num_tokens=batch.num_tokens,
        decode=decode,
        prefill=prefill.astype(np.int32),
        decode_splits=splits(len(decode), seen_by_few, _DECODE_PROGRAMS, _DECODE_POSITIONS),
        # In deterministic mode one program gathers the segments of a large tile itself.
        prefill_splits=1
        if shapes.segment
        else splits(len(prefill), seen_by_many, _PREFILL_PROGRAMS, _PREFILL_POSITIONS),
        block_tables=np.maximum(batch.block_tables, 0),
    )


def most_partial_rows(
    shapes: TileShapes, num_kv_heads: int, num_q_heads: int, facts: DeviceFacts, max_num_seqs: int, max_model_len: int
) -> int:
    """Return how many rows the partial sums of one kind of tile have at most, in any step."""
    group = num_q_heads // num_kv_heads
    if shapes.segment:
        # Large tiles are not split here.
        return max_num_seqs * num_kv_heads * -(-max_model_len // shapes.segment) * shapes.decode.tokens * group
    # Where there is more than one split, all splits of all tiles and KV heads are so many programs at most.
    return (
        facts.num_processors
        * group
        * max(_DECODE_PROGRAMS * shapes.decode.tokens, _PREFILL_PROGRAMS * shapes.prefill.tokens)
    )


@dataclass(frozen=True, slots=True)
class TileBatch:
    """The tiles of one kind, on the device.

    Attributes:
        shape: How they are compiled.
        tiles: `[num_tiles, 4]` int32.
        num_splits: Programs for each tile and KV head.
        partials: `[num_tiles, num_kv_heads, num_splits, tokens * group, head_dim]` float32: what the splits gathered;
            empty where there is one.
        partial_max: `[num_tiles, num_kv_heads, num_splits, tokens * group]` float32.
        partial_sum: Likewise.
    """

    shape: TileShape
    tiles: torch.Tensor
    num_splits: int
    partials: torch.Tensor
    partial_max: torch.Tensor
    partial_sum: torch.Tensor


@dataclass(frozen=True, slots=True)
class GpuAttentionMetadata:
    """What attention on GPUs needs to know of a step, used by every layer; one metadata serves one call at a time.

    Attributes:
        layout: Of the cache it was built for.
        num_q_heads: Query heads.
        num_tokens: Rows of the batch.
        block_tables: `[num_sequences, max_blocks]` int32.
        decode: Tiles of sequences with few tokens.
        prefill: Tiles of all others.
        segment: Positions of a segment in deterministic mode, else 0.
    """

    layout: KVCacheLayout
    num_q_heads: int
    num_tokens: int
    block_tables: torch.Tensor
    decode: TileBatch
    prefill: TileBatch
    segment: int

    @classmethod
    def from_host(
        cls, host: HostTiles, shapes: TileShapes, layout: KVCacheLayout, num_q_heads: int, device: torch.device
    ) -> Self:
        """Copy a step's tiles to the device, in the order of its stream."""
        group = num_q_heads // layout.num_kv_heads

        def tile_batch(tiles: Int32Array, shape: TileShape, num_splits: int) -> TileBatch:
            # In deterministic mode small tiles are merged even where one segment holds them.
            is_split = num_splits > 1 or (shapes.segment and shape is shapes.decode)
            rows = (len(tiles), layout.num_kv_heads, num_splits, shape.tokens * group) if is_split else (0,)
            partials, partial_max, partial_sum = (
                torch.empty(size, dtype=torch.float32, device=device) for size in ((*rows, layout.head_dim), rows, rows)
            )
            return TileBatch(
                shape, to_device(torch.from_numpy(tiles), device), num_splits, partials, partial_max, partial_sum
            )

        return cls(
            layout=layout,
            num_q_heads=num_q_heads,
            num_tokens=host.num_tokens,
            block_tables=to_device(torch.from_numpy(host.block_tables), device),
            decode=tile_batch(host.decode, shapes.decode, host.decode_splits),
            prefill=tile_batch(host.prefill, shapes.prefill, host.prefill_splits),
            segment=shapes.segment,
        )
