"""Copying whole blocks of the KV cache: what a fork of a partial block needs."""

from __future__ import annotations

from collections.abc import Sequence

from chatd_kernels.dispatch import launcher
from chatd_kernels.kv_cache import KVCache


def copy_blocks(kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, all layers, pair after pair (source, target).

    Raises:
        ValueError: a block is not in the cache.
    """
    launcher("copy_blocks", kv_cache.data.device.type)(kv_cache, pairs)
