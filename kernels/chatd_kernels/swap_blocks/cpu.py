"""Block moves on CPUs: runs of blocks are contiguous on both sides, so each is one memcpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from chatd_kernels.kv_cache import KVCache


def store_blocks(kv_cache: KVCache, host: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs (first block, first slot, number) to the host."""
    size, cache, slots = kv_cache.layout.block_bytes, kv_cache.data.data_ptr(), host.data_ptr()
    for block, slot, count in runs:
        ctypes.memmove(slots + slot * size, cache + block * size, count * size)


def load_blocks(kv_cache: KVCache, host: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs (first block, first slot, number) from the host."""
    size, cache, slots = kv_cache.layout.block_bytes, kv_cache.data.data_ptr(), host.data_ptr()
    for block, slot, count in runs:
        ctypes.memmove(cache + block * size, slots + slot * size, count * size)
