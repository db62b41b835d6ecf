"""Block moves between a GPU and pinned memory, on the current stream.

Large blocks are one asynchronous copy a run, which leaves the processors alone. Copies of small blocks would take less
time than their starts do: one kernel gathers or scatters all of them through the mapped memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chatd_kernels.copy_blocks.gpu import on_device, part_launch
from chatd_kernels.kv_cache import KVCache

SMALL_BLOCK_BYTES = 512 << 10
"""Blocks below this are moved by the kernel: at 25 GB/s a copy of 512 KiB takes 20 µs, the start of one some 5 µs."""


def store_blocks(kv_cache: KVCache, host: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs (first block, first slot, number) to the host, which has them once the stream has run that."""
    data = kv_cache.data
    if runs and _is_gathered(kv_cache, host):
        pairs = [(block + i, slot + i) for block, slot, count in runs for i in range(count)]
        part_launch(data, host, on_device(pairs, data.device), kv_cache.layout.block_bytes).run()
    else:
        for block, slot, count in runs:
            host[slot : slot + count].copy_(data[block : block + count], non_blocking=True)


def load_blocks(kv_cache: KVCache, host: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs (first block, first slot, number) from the host; the stream's next kernel finds them there."""
    data = kv_cache.data
    if runs and _is_gathered(kv_cache, host):
        pairs = [(slot + i, block + i) for block, slot, count in runs for i in range(count)]
        part_launch(host, data, on_device(pairs, data.device), kv_cache.layout.block_bytes).run()
    else:
        for block, slot, count in runs:
            data[block : block + count].copy_(host[slot : slot + count], non_blocking=True)


def _is_gathered(kv_cache: KVCache, host: torch.Tensor) -> bool:
    """Whether a kernel moves the blocks: they are small, and it can reach the host's memory."""
    is_reachable = host.device == kv_cache.data.device or host.is_pinned()
    return kv_cache.layout.block_bytes < SMALL_BLOCK_BYTES and is_reachable
