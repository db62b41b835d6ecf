"""Block copies on CPUs: a block is one contiguous range, so a copy is one memcpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from chatd_kernels.kv_cache import KVCache


def copy_blocks(kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """The contract of `chatd_kernels.copy_blocks.copy_blocks`."""
    for pair in pairs:
        for block in pair:
            if not 0 <= block < kv_cache.num_blocks:
                raise ValueError(f"block {block} is not in the cache of {kv_cache.num_blocks} blocks")
    base, size = kv_cache.data.data_ptr(), kv_cache.layout.block_bytes
    for source, target in pairs:
        if source != target:
            ctypes.memmove(base + target * size, base + source * size, size)
