"""Linear layers on CPUs: rows against panels of 16 output features.

fp32 and fp16: each output is `fma` over the input features in order, in float32, fp16 weights widened exactly.

int8: a row is rounded to integers of up to 15 bits (its own largest |x| is the largest integer for which the int32 sum
cannot overflow), the sum of products is exact, and the result is `sum * column scale * row scale`. So weights are what
is rounded, activations hardly, and the result is the same on every CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from chatd_kernels.checks import check_tensor
from chatd_kernels.linear.pack import PackedWeight
from chatd_kernels.microkernels import FloatProduct, Int8Product, make_dot_panels
from chatd_kernels.runtime import argument, claim_worker, kernel, next_item, num_threads
from chatd_kernels.vector import (
    copy_bytes,
    hmax,
    hsum,
    load_f32,
    store_f32,
    vabs,
    vadd,
    vfma,
    vload,
    vload_half,
    vmax,
    vmul,
    vsplat,
    vstore,
    vstore_int16,
)

_dot_float = make_dot_panels(FloatProduct(half=False))
_dot_half = make_dot_panels(FloatProduct(half=True))
_dot_int8 = make_dot_panels(Int8Product())

_FORMATS = {"fp32": 0, "fp16": 1, "int8": 2}
_PANELS_PER_ITEM = 4
_ROW_BLOCK_BYTES = 192 << 10
"""Rows of one block stay in the L2 cache while panels pass."""
_WIDEN_FROM = 13  # rows from which widening an fp16 panel once pays
_PARALLEL_FROM = 1 << 17  # multiplications


@njit  # type: ignore[untyped-decorator]
def _dot(
    kind: int,
    rows: int,
    x: int,
    x_stride: int,
    w: int,
    w_stride: int,
    panels: int,
    out: int,
    out_stride: int,
    size: int,
) -> None:
    if kind == 0:
        _dot_float(rows, x, x_stride, w, w_stride, panels, out, out_stride, size)
    elif kind == 1:
        _dot_half(rows, x, x_stride, w, w_stride, panels, out, out_stride, size)
    else:
        _dot_int8(rows, x, x_stride, w, w_stride, panels, out, out_stride, size)


@njit  # type: ignore[untyped-decorator]
def _scale_and_bias(out: int, out_stride: int, rows: int, panels: int, row_scales: int, scales: int, bias: int) -> None:
    """Finish sums in place: times the column's and the row's scale (int8), plus the bias."""
    for row in range(rows):
        target = out + row * out_stride
        if scales != 0:
            factor = vsplat(load_f32(row_scales + row * 4))
            for offset in range(0, panels * 64, 64):
                v = vmul(vload(target + offset), vload(scales + offset))
                if bias != 0:
                    vstore(target + offset, vfma(v, factor, vload(bias + offset)))
                else:
                    vstore(target + offset, vmul(v, factor))
        elif bias != 0:
            for offset in range(0, panels * 64, 64):
                vstore(target + offset, vadd(vload(target + offset), vload(bias + offset)))


@kernel
def linear_items(frame: int) -> None:
    """Items are (block of rows, a few panels); the blocks of the same panels follow each other."""
    kind, x, out = argument(frame, 0), argument(frame, 1), argument(frame, 2)
    weights, scales, bias, row_scales = argument(frame, 3), argument(frame, 4), argument(frame, 5), argument(frame, 6)
    num_rows, size, out_features = argument(frame, 7), argument(frame, 8), argument(frame, 9)
    rows_per_block, workspace, workspace_bytes = argument(frame, 10), argument(frame, 11), argument(frame, 12)
    x_stride = size * (2 if kind == 2 else 4)
    w_stride = size * 16 * (1 if kind == 2 else (2 if kind == 1 else 4))
    out_stride = out_features * 4
    num_panels = (out_features + 15) // 16
    num_blocks = (num_rows + rows_per_block - 1) // rows_per_block
    num_items = (num_panels + 3) // 4 * num_blocks
    scratch = workspace + claim_worker(frame) * workspace_bytes
    widened = scratch + 6 * 64
    while True:
        item = next_item(frame)
        if item >= num_items:
            break
        first_row = num_rows * (item % num_blocks) // num_blocks
        end_row = num_rows * (item % num_blocks + 1) // num_blocks
        first_panel = item // num_blocks * 4
        end_panel = min(first_panel + 4, num_panels)
        count = end_row - first_row
        num_groups = (count + 5) // 6
        panel = first_panel
        while panel < end_panel:
            # Whole panels of a single group of rows go together; else a panel stays in the cache for all groups.
            whole = panel * 16 + 16 <= out_features
            panels = max(1, min(end_panel, out_features // 16) - panel) if whole and num_groups == 1 else 1
            w, w_kind = weights + panel * w_stride, kind
            if kind == 1 and count >= 13:
                for i in range(0, size * 16, 16):
                    vstore(widened + i * 4, vload_half(w + i * 2))
                w, w_kind = widened, 0
            for group in range(num_groups):
                row = first_row + count * group // num_groups
                rows = first_row + count * (group + 1) // num_groups - row
                target = out + row * out_stride + panel * 64 if whole else scratch
                stride = out_stride if whole else 64
                _dot(w_kind, rows, x + row * x_stride, x_stride, w, w_stride, panels, target, stride, size)
                _scale_and_bias(
                    target,
                    stride,
                    rows,
                    panels,
                    row_scales + row * 4,
                    scales + panel * 64 if scales != 0 else 0,
                    bias + panel * 64 if bias != 0 else 0,
                )
                if not whole:
                    for r in range(rows):
                        copy_bytes(
                            out + (row + r) * out_stride + panel * 64, scratch + r * 64, (out_features - panel * 16) * 4
                        )
            panel += panels


@kernel
def quantize_rows(frame: int) -> None:
    """Items are rows: round each to integers of its own scale. A row with a NaN or an infinity gets the scale NaN."""
    x, target, row_scales = argument(frame, 0), argument(frame, 1), argument(frame, 2)
    num_rows, size = argument(frame, 3), argument(frame, 4)
    largest = np.float32(argument(frame, 5))
    zero = vsplat(np.float32(0.0))
    while True:
        row = next_item(frame)
        if row >= num_rows:
            break
        source = x + row * size * 4
        most, poison = zero, zero
        for offset in range(0, size * 4, 64):
            v = vload(source + offset)
            most = vmax(vabs(v), most)
            poison = vfma(v, zero, poison)
        peak = hmax(most)
        inverse = vsplat(largest / peak if peak > np.float32(0.0) else np.float32(0.0))
        for i in range(0, size, 16):
            vstore_int16(target + (row * size + i) * 2, vmul(vload(source + i * 4), inverse))
        store_f32(row_scales + row * 4, peak / largest + hsum(poison))


def _scratch_bytes(size: int, is_half: bool) -> int:
    """Scratch of one thread: a partial panel's results, and a widened panel."""
    return 6 * 64 + (size * 64 if is_half else 0) + 64


def largest_activation(in_features: int) -> int:
    """The largest integer of a row for which int32 holds every sum of `in_features` products with int8 weights."""
    return min(32767, (2**31 - 1) // (127 * in_features))


def linear(x: torch.Tensor, packed: PackedWeight, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.linear.linear`."""
    num_rows = x.shape[0]
    size = packed.in_features
    address = check_tensor("x", x, (num_rows, size))
    target = check_tensor("out", out, (num_rows, packed.out_features))
    if num_rows == 0:
        return
    parallel = num_rows * size * packed.out_features >= _PARALLEL_FROM
    row_scales = 0
    if packed.format == "int8":
        integers = torch.empty((num_rows, size), dtype=torch.int16)
        factors = torch.empty(num_rows)
        row_scales = factors.data_ptr()
        quantize_rows.launch(
            num_rows * size >= 1 << 15,
            address,
            integers.data_ptr(),
            row_scales,
            num_rows,
            size,
            largest_activation(size),
        )
        address = integers.data_ptr()
    rows_per_block = max(24, _ROW_BLOCK_BYTES // (size * 4) // 6 * 6)
    threads = num_threads() if parallel else 1
    scratch_bytes = _scratch_bytes(size, packed.format == "fp16" and num_rows >= _WIDEN_FROM)
    scratch = torch.empty(threads * scratch_bytes, dtype=torch.uint8)
    linear_items.launch(
        parallel,
        _FORMATS[packed.format],
        address,
        target,
        packed.panels.data_ptr(),
        0 if packed.scales is None else packed.scales.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
        row_scales,
        num_rows,
        size,
        packed.out_features,
        rows_per_block,
        scratch.data_ptr(),
        scratch_bytes,
        num_threads=threads,
    )
