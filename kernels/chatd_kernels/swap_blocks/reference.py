"""Block moves, slow and obvious."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chatd_kernels.kv_cache import KVCache


def store_blocks(kv_cache: KVCache, host: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """The contract of `chatd_kernels.swap_blocks.store_blocks`."""
    for block, slot in moves:
        host[slot] = kv_cache.data[block].cpu()


def load_blocks(kv_cache: KVCache, host: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """The contract of `chatd_kernels.swap_blocks.load_blocks`."""
    for block, slot in moves:
        kv_cache.data[block] = host[slot].to(kv_cache.data.device)
