"""What it takes to copy blocks out of the pool and back, by their size, beside computing their KV again."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from chatd.bench.real_engine import RealEngine

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KERNEL_BLOCK_SIZES = (16, 64, 256)
"""At which recomputation is measured; the kernels take no smaller blocks."""


def token_bytes_of(model: str) -> int:
    """Return the bytes of one token's KV, all layers."""
    from chatd.models.model_config import load_decoder_config
    from chatd.models.registry import resolve

    config = load_decoder_config(resolve(model).path)
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def median_s(repeats: int, action: Callable[[], object]) -> float:
    """Return the median seconds of an action."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def copy_figures(token_bytes: int, num_tokens: int, block_size: int, repeats: int) -> dict[str, float]:
    """Return seconds of copying the blocks of so many tokens to the host and back, and to files and back."""
    import torch

    from chatd_kernels.kv_cache import KVCache, KVCacheLayout
    from chatd_kernels.swap_blocks import load_blocks, store_blocks

    block_bytes, count = token_bytes * block_size, -(-num_tokens // block_size)
    # As a pool in use, eight times as large as what moves, so that the blocks lie apart.
    cache_data = torch.ones((8 * count, block_bytes // 2), dtype=torch.float16)
    host = torch.zeros((count, block_bytes // 2), dtype=torch.float16)
    layout = cast(KVCacheLayout, SimpleNamespace(block_bytes=block_bytes))
    cache = KVCache(cache_data, layout)
    rng = random.Random(0)
    moves = list(zip(rng.sample(range(8 * count), count), rng.sample(range(count), count), strict=True))
    store_blocks(cache, host, moves)
    out_s = median_s(repeats, lambda: store_blocks(cache, host, moves))
    in_s = median_s(repeats, lambda: load_blocks(cache, host, moves))
    assert bool((cache_data[moves[0][0]] == 1).all()), "a copy made nonsense"
    disk_out_s, disk_in_s = _file_s(host.numpy().data.cast("B"), block_bytes, count)
    return {"out_s": out_s, "in_s": in_s, "disk_out_s": disk_out_s, "disk_in_s": disk_in_s}


def _file_s(memory: memoryview, block_bytes: int, count: int) -> tuple[float, float]:
    """Return seconds of writing a checked file for each block, and of reading them when no cache has them."""
    from chatd.kvcache.block_file import Origin, read_block, write_block

    origin = Origin(b"bench", b"", b"")
    with tempfile.TemporaryDirectory() as folder:
        files = [
            (Path(folder) / f"{place:05}", memory[place * block_bytes : (place + 1) * block_bytes])
            for place in range(count)
        ]
        started = time.perf_counter()
        for path, payload in files:
            write_block(path, origin, payload)
        out_s = time.perf_counter() - started
        for path, _ in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        started = time.perf_counter()
        for path, payload in files:
            read_block(path, origin, payload)
        return out_s, time.perf_counter() - started


def crossing_figures(model: str, quantization: str, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Return copies and recomputation of the KV of so many tokens, by block size."""
    token_bytes = token_bytes_of(model)
    recomputed: dict[int, float] = {}
    rng = random.Random(1)
    for block_size in KERNEL_BLOCK_SIZES:
        room = 2 * (repeats + 1) * num_tokens * token_bytes
        engine = RealEngine(model, quantization, block_size=block_size, kv_memory_bytes=room)
        times = []
        for number in range(repeats):
            ids = [rng.randrange(10, engine.ready.vocab_size) for _ in range(num_tokens)]
            engine.submit(number, ids, max_tokens=1)
            times.append(engine.run())
        recomputed[block_size] = statistics.median(times)
    sizes = []
    for block_size in BLOCK_SIZES:
        measured_at = max(size for size in recomputed if size <= max(block_size, KERNEL_BLOCK_SIZES[0]))
        sizes.append(
            {
                "block_size": block_size,
                **copy_figures(token_bytes, num_tokens, block_size, 3 * repeats),
                "recompute_s": recomputed[measured_at],
                "recomputed_at": measured_at,
            }
        )
    return {"tokens": num_tokens, "token_bytes": token_bytes, "sizes": sizes}
