"""Moving whole blocks between the KV cache and a buffer of the host: what the tiers below the pool need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chatd_kernels.dispatch import launcher
from chatd_kernels.gpu_device import wait_for_stream
from chatd_kernels.kv_cache import KVCache


def store_blocks(
    kv_cache: KVCache, host: torch.Tensor, moves: Sequence[tuple[int, int]], *, waits: bool = True
) -> None:
    """Copy blocks of the cache to slots of the host, all layers; moves are (block, slot).

    Args:
        kv_cache: The cache.
        host: `[num_slots, num_layers, 2, num_kv_heads, block_size * head_dim]`, contiguous, the cache's dtype.
        moves: No slot twice.
        waits: Whether the host has the bytes when this returns; else once the cache's device has run all that it was
            given up to now.

    Raises:
        ValueError: A block or a slot is not there, or the host's slots are not blocks of this cache.
    """
    _check(kv_cache, host, moves)
    launcher("swap_blocks", kv_cache.data.device.type, "store_blocks")(kv_cache, host, _runs(moves))
    if waits:
        wait_for_stream(kv_cache.data.device)


def load_blocks(kv_cache: KVCache, host: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy slots of the host to blocks of the cache; as `store_blocks`, but no block twice.

    What runs on the cache's device afterwards sees the bytes; a slot may change once that has run.
    """
    _check(kv_cache, host, moves)
    launcher("swap_blocks", kv_cache.data.device.type, "load_blocks")(kv_cache, host, _runs(moves))


def _check(kv_cache: KVCache, host: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    data = kv_cache.data
    if host.shape[1:] != data.shape[1:] or host.dtype != data.dtype or not host.is_contiguous():
        raise ValueError(
            f"slots of {host.dtype} {[*host.shape[1:]]} are not blocks of {data.dtype} {[*data.shape[1:]]}"
        )
    for block, slot in moves:
        if not 0 <= block < len(data):
            raise ValueError(f"block {block} is not in the cache of {len(data)} blocks")
        if not 0 <= slot < len(host):
            raise ValueError(f"slot {slot} is not in the host's {len(host)}")


def _runs(moves: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (first block, first slot, number) of moves that are neighbors on both sides, each of them one copy."""
    runs: list[tuple[int, int, int]] = []
    for block, slot in sorted(moves):
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (block, slot):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((block, slot, 1))
    return runs
