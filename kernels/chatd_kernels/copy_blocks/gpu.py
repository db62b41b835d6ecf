"""Block copies on GPUs: one kernel for all pairs that do not touch each other, each block in parallel parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from chatd_kernels.gpu_device import to_device
from chatd_kernels.kv_cache import KVCache
from chatd_kernels.launch import Launch

_WORDS = 4096
"""32-bit words of a program."""


@triton.jit
def copy_block_parts(source, target, pairs, BLOCK_WORDS: tl.constexpr, WORDS: tl.constexpr):
    """Copy part `program_id(1)` of the block `pairs[i, 0]` of `source` to the block `pairs[i, 1]` of `target`."""
    p_pair = pairs + tl.program_id(0) * 2
    i_source, i_target = tl.load(p_pair), tl.load(p_pair + 1)
    o_w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    m_w = o_w < BLOCK_WORDS
    # [WORDS]
    b_words = tl.load(source + i_source * BLOCK_WORDS + o_w, mask=m_w)
    tl.store(target + i_target * BLOCK_WORDS + o_w, b_words, mask=m_w)


def part_launch(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, block_bytes: int) -> Launch:
    """Copies `[num_pairs, 2]` int64 (block of source, block of target) of blocks in two contiguous memories."""
    words = block_bytes // 4
    arguments = {
        "source": source.view(torch.int32),
        "target": target.view(torch.int32),
        "pairs": pairs,
        "BLOCK_WORDS": words,
        "WORDS": _WORDS,
    }
    return Launch(copy_block_parts, (len(pairs), -(-words // _WORDS)), arguments)


def on_device(pairs: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """`[num_pairs, 2]` int64 on a device, copied there in the order of its stream."""
    return to_device(torch.tensor(pairs, dtype=torch.int64), device)


def copy_blocks(kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """The contract of `chatd_kernels.copy_blocks.copy_blocks`."""
    for pair in pairs:
        for block in pair:
            if not 0 <= block < kv_cache.num_blocks:
                raise ValueError(f"block {block} is not in the cache of {kv_cache.num_blocks} blocks")
    data = kv_cache.data
    for wave in _waves(pairs):
        part_launch(data, data, on_device(wave, data.device), kv_cache.layout.block_bytes).run()


def _waves(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of pairs whose copies may happen in any order."""
    wave: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if source == target:
            continue
        if source in written or target in written or target in read:
            yield wave
            wave, read, written = [], set(), set()
        wave.append((source, target))
        read.add(source)
        written.add(target)
    if wave:
        yield wave
