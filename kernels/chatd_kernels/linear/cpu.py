"""Linear layers on CPUs: rows against panels of 16 output features.

fp32 and fp16: each output is `fma` over the input features in order, in float32, fp16 weights widened exactly.

int8: a row is rounded to integers of up to 15 bits (its own largest |x| is the largest integer for which the int32 sum
cannot overflow), the sum of products is exact, and the result is `sum * column scale * row scale`. So weights are what
is rounded, activations hardly, and the result is the same on every CPU.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from chatd_kernels.checks import check_tensor
from chatd_kernels.jit import jit
from chatd_kernels.linear.pack import PackedWeight
from chatd_kernels.microkernels import MAX_ROWS, FloatProduct, Int8Product, make_dot_rows
from chatd_kernels.runtime import argument, claim_worker, kernel, next_item, num_threads, scratch
from chatd_kernels.vector import (
    copy_bytes,
    hmax,
    hsum,
    load_f32,
    load_i64,
    store_f32,
    vabs,
    vadd,
    vfma,
    vload,
    vmax,
    vmul,
    vscatter,
    vscatter_int16_pairs,
    vsplat,
    vstore,
)

_dot_float = make_dot_rows(FloatProduct(half=False))
_dot_half = make_dot_rows(FloatProduct(half=True))
_dot_int8 = make_dot_rows(Int8Product())

_FP32, _FP16, _INT8 = range(3)
_FORMATS = {"fp32": _FP32, "fp16": _FP16, "int8": _INT8}
_ZERO = np.float32(0.0)
_ROW_BLOCK_BYTES = 192 << 10
"""Rows of one block stay in the L2 cache while panels pass."""
_PARALLEL_PROLOGUE_FROM = 1 << 15  # numbers
_PARALLEL_FROM = 1 << 17  # multiplications


@jit
def _dot(kind: int, rows: int, x: int, w: int, out: int, out_stride: int, size: int) -> None:
    """The products of some rows and a panel, in the weights' format."""
    if kind == _FP32:
        _dot_float(rows, x, w, out, out_stride, size)
    elif kind == _FP16:
        _dot_half(rows, x, w, out, out_stride, size)
    else:
        _dot_int8(rows, x, w, out, out_stride, size)


@jit
def _scale_and_bias(out: int, out_stride: int, rows: int, row_scales: int, scales: int, bias: int) -> None:
    """Finish a panel's sums in place: times the column's and the row's scale (int8), plus the bias."""
    for row in range(rows):
        target = out + row * out_stride
        if scales != 0:
            v, factor = (vmul(vload(target), vload(scales)), vsplat(load_f32(row_scales + row * 4)))
            if bias != 0:
                vstore(target, vfma(v, factor, vload(bias)))
            else:
                vstore(target, vmul(v, factor))
        elif bias != 0:
            vstore(target, vadd(vload(target), vload(bias)))


@kernel
def linear_items(frame: int) -> None:
    """Items are (block of rows, a few panels); the blocks of the same panels follow each other."""
    kind, x, out = argument(frame, 0), argument(frame, 1), argument(frame, 2)
    weights, scales, bias, row_scales = (argument(frame, 3), argument(frame, 4), argument(frame, 5), argument(frame, 6))
    size, out_features = argument(frame, 7), argument(frame, 8)
    groups, blocks, num_blocks = (argument(frame, 9), argument(frame, 10), argument(frame, 11))
    partial = argument(frame, 12) + claim_worker(frame) * MAX_ROWS * 64
    x_stride = size * (2 if kind == _INT8 else 4)
    w_stride = size * 16 * (1 if kind == _INT8 else (2 if kind == _FP16 else 4))
    out_stride = out_features * 4
    num_panels = (out_features + 15) // 16
    num_items = (num_panels + 3) // 4 * num_blocks
    while True:
        item = next_item(frame)
        if item >= num_items:
            break
        block = blocks + item % num_blocks * 8
        first_group, end_group = load_i64(block), load_i64(block + 8)
        first_panel = item // num_blocks * 4
        for panel in range(first_panel, min(first_panel + 4, num_panels)):
            # The last panel may be wider than the output.
            width = min(16, out_features - panel * 16)
            for group in range(first_group, end_group):
                row = load_i64(groups + group * 8)
                rows = load_i64(groups + group * 8 + 8) - row
                place = out + row * out_stride + panel * 64
                target, stride = (place, out_stride) if width == 16 else (partial, 64)
                _dot(kind, rows, x + row * x_stride, weights + panel * w_stride, target, stride, size)
                _scale_and_bias(
                    target,
                    stride,
                    rows,
                    row_scales + row * 4,
                    scales + panel * 64 if scales != 0 else 0,
                    bias + panel * 64 if bias != 0 else 0,
                )
                if width < 16:
                    for r in range(rows):
                        copy_bytes(place + r * out_stride, partial + r * 64, width * 4)


@kernel
def interleave_rows(frame: int) -> None:
    """Items are groups of rows: `[rows, size]` becomes `[size, rows]`."""
    x, target, size = argument(frame, 0), argument(frame, 1), argument(frame, 2)
    groups, num_groups = argument(frame, 3), argument(frame, 4)
    while True:
        group = next_item(frame)
        if group >= num_groups:
            break
        first, end = load_i64(groups + group * 8), load_i64(groups + group * 8 + 8)
        rows = end - first
        place = target + first * size * 4
        for row in range(rows):
            source = x + (first + row) * size * 4
            for i in range(0, size, 16):
                vscatter(place + (i * rows + row) * 4, rows * 4, vload(source + i * 4))


@kernel
def quantize_rows(frame: int) -> None:
    """Items are groups of rows: round each row to integers of its own scale, `[rows, size]` to `[size / 2, rows, 2]`.

    A row with a NaN or an infinity gets the scale NaN, so that its products are NaN.
    """
    x, target, size = argument(frame, 0), argument(frame, 1), argument(frame, 2)
    groups, num_groups = argument(frame, 3), argument(frame, 4)
    row_scales, largest = argument(frame, 5), np.float32(argument(frame, 6))
    zero = vsplat(_ZERO)
    while True:
        group = next_item(frame)
        if group >= num_groups:
            break
        first, end = load_i64(groups + group * 8), load_i64(groups + group * 8 + 8)
        rows = end - first
        place = target + first * size * 2
        for row in range(rows):
            source = x + (first + row) * size * 4
            most, poison = zero, zero
            for offset in range(0, size * 4, 64):
                v = vload(source + offset)
                most = vmax(vabs(v), most)
                poison = vfma(v, zero, poison)
            peak = hmax(most)
            inverse = vsplat(largest / peak if peak > _ZERO else _ZERO)
            for i in range(0, size, 16):
                vscatter_int16_pairs(place + (i * rows + row * 2) * 2, rows * 4, vmul(vload(source + i * 4), inverse))
            store_f32(row_scales + (first + row) * 4, peak / largest + hsum(poison))


@dataclass(frozen=True, slots=True)
class RowGroups:
    """How rows are divided: groups of at most MAX_ROWS that are computed together, blocks of groups that stay cached.

    Attributes:
        starts: the first row of each group, then the number of rows.
        blocks: the first group of each block, then the number of groups.
        starts_address: where `starts` lies.
        blocks_address: where `blocks` lies.
        num_groups: groups.
        num_blocks: blocks.
    """

    starts: array[int]
    blocks: array[int]
    starts_address: int
    blocks_address: int
    num_groups: int
    num_blocks: int


@lru_cache(maxsize=512)
def row_groups(num_rows: int, size: int) -> RowGroups:
    """Divide `num_rows` rows of `size` numbers evenly."""
    most = max(2, _ROW_BLOCK_BYTES // (size * 4 * MAX_ROWS)) * MAX_ROWS
    num_blocks = -(-num_rows // most)
    starts, blocks = array("q"), array("q")
    for block in range(num_blocks):
        first, end = (num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks)
        num_groups = -(-(end - first) // MAX_ROWS)
        blocks.append(len(starts))
        starts.extend(first + (end - first) * group // num_groups for group in range(num_groups))
    blocks.append(len(starts))
    starts.append(num_rows)
    return RowGroups(starts, blocks, starts.buffer_info()[0], blocks.buffer_info()[0], len(starts) - 1, len(blocks) - 1)


def largest_activation(in_features: int) -> int:
    """The largest integer of a row for which int32 holds every sum of `in_features` products with int8 weights."""
    return min(32767, (2**31 - 1) // (127 * in_features))


def linear(x: torch.Tensor, packed: PackedWeight, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.linear.linear`."""
    num_rows, size = x.shape[0], packed.in_features
    address = check_tensor("x", x, (num_rows, size))
    target = check_tensor("out", out, (num_rows, packed.out_features))
    if num_rows == 0:
        return
    kind = _FORMATS[packed.format]
    parallel = num_rows * size * packed.out_features >= _PARALLEL_FROM
    threads = num_threads() if parallel else 1
    division = row_groups(num_rows, size)
    # Scratch memory: a partial panel's results for each thread, the rows' scales, the rows as the kernel reads them.
    partial = scratch(threads * MAX_ROWS * 64 + num_rows * (4 + size * 4) + 128)
    row_scales = partial + threads * MAX_ROWS * 64
    rows = (row_scales + num_rows * 4 + 63) // 64 * 64
    is_parallel_prologue = division.num_groups > 1 and num_rows * size >= _PARALLEL_PROLOGUE_FROM
    prologue = (address, rows, size, division.starts_address, division.num_groups)
    if kind == _INT8:
        quantize_rows.launch(is_parallel_prologue, *prologue, row_scales, largest_activation(size))
        address = rows
    elif num_rows > 1:
        interleave_rows.launch(is_parallel_prologue, *prologue)
        address = rows
    linear_items.launch(
        parallel,
        kind,
        address,
        target,
        *packed.addresses,
        row_scales,
        size,
        packed.out_features,
        division.starts_address,
        division.blocks_address,
        division.num_blocks,
        partial,
        num_threads=threads,
    )
