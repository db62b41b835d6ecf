"""What copies reach on a GPU, and what attention reads by the order of layers and blocks in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from chatd.bench.gpu.attention import DecodeBatch, Heads
from chatd.bench.gpu.parts import Bench, Row
from chatd.bench.gpu.timing import seconds_of

_GIB = 1 << 30


def copy_rows(bench: Bench, sizes: tuple[int, ...] = (1 << 20, 16 << 20, 256 << 20, 4 * _GIB)) -> Iterator[Row]:
    """Yield what copies on the device reach by size; the largest one's bandwidth is what others are held against."""
    for size in sizes:
        source = torch.empty(size, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        seconds = seconds_of(partial(target.copy_, source), bench.stream)
        bench.copy_bandwidth = 2 * size / seconds
        yield {"copied MiB": size / (1 << 20), "µs": seconds * 1e6, "GB/s read and written": 2 * size / seconds / 1e9}


def layout_rows(
    bench: Bench, heads: Heads | None = None, batch: int = 64, length: int = 32_768, num_layers: int = 4
) -> Iterator[Row]:
    """Yield decode attention of one layer, where a block holds several layers and where it holds this one alone."""
    for name, layers in (("block-major", num_layers), ("layer-major", 1)):
        work = DecodeBatch(heads or Heads(), batch, length, bench.device, num_layers=layers)
        seconds = seconds_of(work.attend, bench.stream)
        yield {
            "layout": name,
            "layers in a block": layers,
            "batch": batch,
            "context": length,
            "µs": seconds * 1e6,
            "GB/s read": work.bytes_read / seconds / 1e9,
        }
        del work
