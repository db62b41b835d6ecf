"""Block moves on CUDA devices: one asynchronous copy a run, to or from pinned memory, on the current stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chatd_kernels.kv_cache import KVCache


def store_blocks(kv_cache: KVCache, host: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs (first block, first slot, number) to the host, and wait for the last byte."""
    for block, slot, count in runs:
        host[slot : slot + count].copy_(kv_cache.data[block : block + count], non_blocking=True)
    torch.cuda.current_stream(kv_cache.data.device).synchronize()


def load_blocks(kv_cache: KVCache, host: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs (first block, first slot, number) from the host; the stream's next kernel finds them there."""
    for block, slot, count in runs:
        kv_cache.data[block : block + count].copy_(host[slot : slot + count], non_blocking=True)
