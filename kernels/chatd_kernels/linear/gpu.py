"""Products with packed weights on GPUs.

Float weights are multiplied by torch's own product (cuBLAS), whose bits may depend on the batch. Deterministic products
and those with int8 weights are `gpu_kernels.py`'s. In deterministic mode a weight's shape alone decides the tiles and
the segments, so each row is summed alike in every batch; the batch decides only whether segments have a program each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from chatd_kernels.gpu_device import DeviceFacts, device_facts
from chatd_kernels.launch import ACTIVATIONS, Launch, check_activation, next_power_of_2
from chatd_kernels.linear.gpu_kernels import FEATURES, product_tiles, sum_segments
from chatd_kernels.linear.gpu_pack import GpuWeight

_GROUP = 8  # tiles of rows that share what they read of the weights
_SHORTEST_SEGMENT, _MOST_SEGMENTS = 512, 16  # input features; segments of them
_FILLED = 0.8  # of the processors' time in which they have work
_BYTES_IN_FLIGHT = 64 << 10  # of weights, for each processor: what hides the memory's latency
_SUMMED_AT_ONCE = 512  # outputs
_FIXED_ROWS = 64
_LARGEST_UNIT = 16  # outputs


@dataclass(frozen=True, slots=True)
class ProductShape:
    """How a product is cut, and its programs compiled.

    Attributes:
        rows: Of a tile.
        outputs: Of a tile.
        inner: Input features of one step of the loop.
        segment: Input features of a segment.
        num_warps: Of a program.
        num_stages: Steps in flight.
    """

    rows: int
    outputs: int
    inner: int
    segment: int
    num_warps: int
    num_stages: int


def product_shape(packed: GpuWeight, num_rows: int, dtype: torch.dtype, facts: DeviceFacts) -> ProductShape:
    """Choose the shape for a weight and rows of some dtype; in deterministic mode whatever the number of rows."""
    is_half = dtype.itemsize == 2
    if packed.is_deterministic:
        rows = _FIXED_ROWS if is_half else 16
    else:
        rows = min(128 if is_half else 32, max(16, next_power_of_2(num_rows)))
    is_small = rows < 64
    outputs = 64 if is_small else 128
    # Of each output a line of the cache, 128 bytes; of codes half, where many become numbers in registers.
    inner = 128 if packed.format == "int8" and is_small else 64 if is_half else 32
    num_stages = 4 if is_half else 2
    num_tiles = -(-packed.out_features // outputs)
    if not packed.is_deterministic:
        # As if they doubled: then steps whose rows double start all that any number of rows may start.
        num_tiles *= next_power_of_2(-(-num_rows // rows))
    bytes_in_flight = num_stages * outputs * inner * packed.rows.element_size()
    num_segments = _num_segments(
        num_tiles,
        packed.in_features // _SHORTEST_SEGMENT,
        facts.num_processors,
        -(-_BYTES_IN_FLIGHT // bytes_in_flight),
    )
    segment = -(-packed.in_features // (num_segments * inner)) * inner
    # What keeps registers from spilling: codes become numbers in them, and on some devices floats pass through them.
    is_narrow = is_small or (packed.format != "int8" and not facts.has_shared_operands)
    return ProductShape(rows, outputs, inner, segment, 4 if is_narrow else 8, num_stages)


def _num_segments(num_tiles: int, most: int, num_processors: int, programs: int) -> int:
    """The fewest segments that give nearly all processors so many programs, and all about as many; else the best."""

    def filled(num_segments: int) -> float:
        shares = num_tiles * num_segments / num_processors
        return shares / max(programs, math.ceil(shares))

    counts = range(1, max(1, min(most, _MOST_SEGMENTS)) + 1)
    return next((count for count in counts if filled(count) >= _FILLED), max(counts, key=filled))


def launches(
    x: torch.Tensor, packed: GpuWeight, out: torch.Tensor, *, facts: DeviceFacts, shape: ProductShape | None = None
) -> list[Launch]:
    """What `linear` starts on such a device for products that are not torch's, in the device's own shape if not said.

    Raises:
        ValueError: a shape or dtype is not supported.
    """
    _check(x, packed, out)
    num_rows = len(x)
    if num_rows == 0:
        return []
    shape = shape or product_shape(packed, num_rows, x.dtype, facts)
    num_segments = -(-packed.in_features // shape.segment)
    num_tiles = -(-num_rows // shape.rows) * -(-packed.out_features // shape.outputs)
    # In deterministic mode the segments stay where tiles fill the device: there a program gathers them.
    is_split = num_segments > 1 and not (packed.is_deterministic and num_tiles >= 2 * facts.num_processors)
    size = (num_segments, num_rows, packed.out_features)
    unit = math.gcd(packed.out_features, _LARGEST_UNIT)
    common = {
        "scales": x if packed.scales is None else packed.scales,
        "bias": x if packed.bias is None else packed.bias,
        "out": out,
        "partials": torch.empty(size, dtype=torch.float32, device=x.device) if is_split else x,
        "num_rows": num_rows,
        "out_units": packed.out_features // unit,
        "OUT_UNIT": unit,
        "HAS_SCALES": packed.scales is not None,
        "HAS_BIAS": packed.bias is not None,
    }
    product = Launch(
        product_tiles,
        (num_tiles, num_segments if is_split else 1),
        {
            **common,
            "x": x,
            "weight": packed.rows,
            "in_units": packed.in_features // FEATURES.value,
            "segment_steps": shape.segment // shape.inner,
            "IS_SPLIT": is_split,
            "IS_GATHERED": num_segments > 1 and not is_split,
            "IS_MASKED": packed.in_features % shape.inner > 0,
            "GROUP": _GROUP,
            "BLOCK_M": shape.rows,
            "BLOCK_N": shape.outputs,
            "BLOCK_K": shape.inner,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        # Both kernels round a scale's product and a bias' sum alike.
        fuses_multiply_add=False,
    )
    if not is_split:
        return [product]
    sums = Launch(
        sum_segments,
        (num_rows, -(-packed.out_features // _SUMMED_AT_ONCE)),
        {**common, "NUM_SEGMENTS": num_segments, "BLOCK": _SUMMED_AT_ONCE},
        fuses_multiply_add=False,
    )
    return [product, sums]


def linear(x: torch.Tensor, packed: GpuWeight, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.linear.linear`."""
    if packed.is_deterministic or packed.scales is not None:
        for launch in launches(x, packed, out, facts=device_facts(x.device)):
            launch.run()
        return
    _check(x, packed, out)
    if out.dtype == x.dtype:
        if packed.bias is None:
            torch.mm(x, packed.rows.t(), out=out)
        else:
            torch.addmm(packed.bias, x, packed.rows.t(), out=out)
        return
    # Sums are float32 anyway; here they are not rounded to the activations' dtype.
    if x.device.type == "cpu":
        torch.mm(x.float(), packed.rows.float().t(), out=out)
    else:
        torch.mm(x, packed.rows.t(), out_dtype=out.dtype, out=out)
    if packed.bias is not None:
        out.add_(packed.bias)


def _check(x: torch.Tensor, packed: GpuWeight, out: torch.Tensor) -> None:
    """Check what a product reads and writes.

    Raises:
        ValueError: a shape or dtype is not supported.
    """
    dtypes = ACTIVATIONS if packed.scales is not None else (packed.rows.dtype,)
    check_activation("x", x, (x.shape[0], packed.in_features), dtypes)
    check_activation("out", out, (x.shape[0], packed.out_features), (x.dtype, torch.float32))
