"""What a card reaches at most: bytes of a copy, and operations of a product; and what our products reach."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from chatd.bench.gpu.models import Rates
from chatd.bench.gpu.parts import Bench, NoRoom, Row, Rows
from chatd.bench.gpu.timing import seconds_of
from chatd_kernels.linear import WeightFormat, linear, pack_linear

_GIB = 1 << 30
_ALIGNMENT = 512
COPIED = (1 << 20, 16 << 20, 256 << 20, 4 * _GIB)
_ROOM = 0.8
"""Of what is free, what the largest copy and its source may take together."""
ROWS = (1, 16, 64, 256, 2048, 8192)
GATE_AND_UP = (24_576, 4096)
"""Outputs and inputs of a layer's first product of the MLP in Qwen3-8B."""

_KINDS: tuple[tuple[str, WeightFormat, bool], ...] = (
    ("bf16", "bf16", False),
    ("bf16, deterministic", "bf16", True),
    ("int8", "int8", False),
)


def copy_rows(bench: Bench, sizes: Sequence[int] = COPIED) -> Rows:
    """Yield what copies on the device reach by size; the largest one's bandwidth is what others are held against.

    Sizes for which a card has no room are cut to the largest one that it has room for.

    Raises:
        NoRoom: There is room for none.
    """
    most = int(_ROOM * bench.stream.memory().free) // 2 // _ALIGNMENT * _ALIGNMENT
    if most == 0:
        raise NoRoom(f"{bench.stream.name} has no room for a copy")
    for size in dict.fromkeys(min(size, most) for size in sizes):
        source = torch.empty(size, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        seconds = seconds_of(partial(target.copy_, source), bench.stream)
        bench.copy_bandwidth = 2 * size / seconds
        yield {"copied MiB": size / (1 << 20), "µs": seconds * 1e6, "GB/s read and written": 2 * size / seconds / 1e9}


def product_rows(bench: Bench, shape: tuple[int, int] = GATE_AND_UP, row_counts: Sequence[int] = ROWS) -> Rows:
    """Yield what products of one weight take by rows: torch's own, deterministic ones, and with weights in 8 bits."""
    outputs, inputs = shape
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=bench.device)
    kinds = [
        (name, pack_linear(weight, None, weight_format, device=bench.device, is_deterministic=is_deterministic))
        for name, weight_format, is_deterministic in _KINDS
    ]
    fastest = 0.0
    for num_rows in row_counts:
        x = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=bench.device)
        out = torch.empty(num_rows, outputs, dtype=torch.bfloat16, device=bench.device)
        row: Row = {"rows": num_rows, "outputs": outputs, "inputs": inputs}
        flops = 2 * num_rows * outputs * inputs
        for name, packed in kinds:
            seconds = seconds_of(partial(linear, x, packed, out), bench.stream, budget_s=0.05)
            row[f"{name} µs"] = seconds * 1e6
            if name == "bf16":
                fastest = max(fastest, flops / seconds)
                row["bf16 TFLOP/s"] = flops / seconds / 1e12
        bench.product_flops = fastest
        yield row


def measured_rates(bench: Bench) -> Rates:
    """Return the card's rates, measured now where no part has measured them."""
    if bench.copy_bandwidth is None:
        list(copy_rows(bench, COPIED[-1:]))
    if bench.product_flops is None:
        list(product_rows(bench, GATE_AND_UP, ROWS[-1:]))
    assert bench.copy_bandwidth is not None
    assert bench.product_flops is not None
    return Rates(bench.copy_bandwidth, bench.product_flops)
