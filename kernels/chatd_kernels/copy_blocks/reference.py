"""Block copies, slow and obvious."""

from __future__ import annotations

from collections.abc import Sequence

from chatd_kernels.kv_cache import KVCache


def copy_blocks(kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """The contract of `chatd_kernels.copy_blocks.copy_blocks`."""
    for source, target in pairs:
        kv_cache.data[target] = kv_cache.data[source].clone()
