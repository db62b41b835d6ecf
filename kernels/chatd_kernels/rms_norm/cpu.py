"""RMSNorm on CPUs: one pass for the sum of squares, one to scale; a row at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from chatd_kernels.checks import check_multiple, check_tensor
from chatd_kernels.jit import jit
from chatd_kernels.runtime import argument, float_bits, kernel, next_item
from chatd_kernels.vector import hsum, load_f64, vadd, vfma, vload, vmul, vsplat, vstore

_ROWS_PER_ITEM = 16
# Below this many numbers a parallel region costs more than it saves.
_PARALLEL_FROM = 1 << 16


@jit
def inverse_rms(source: int, size: int, eps: float) -> Any:
    """`1 / sqrt(mean(x²) + eps)` of `size` float32 at an address, summed in four vectors."""
    zero = vsplat(np.float32(0.0))
    a, b, c, d = zero, zero, zero, zero
    whole = size // 64 * 256
    for offset in range(0, whole, 256):
        v = vload(source + offset)
        a = vfma(v, v, a)
        v = vload(source + offset + 64)
        b = vfma(v, v, b)
        v = vload(source + offset + 128)
        c = vfma(v, v, c)
        v = vload(source + offset + 192)
        d = vfma(v, v, d)
    for offset in range(whole, size * 4, 64):
        v = vload(source + offset)
        a = vfma(v, v, a)
    mean = hsum(vadd(vadd(a, b), vadd(c, d))) / np.float32(size)
    return np.float32(1.0) / math.sqrt(np.float32(mean + np.float32(eps)))


@jit
def norm_row(source: int, weight: int, target: int, size: int, eps: float) -> None:
    """Write one normalized row; `target` may be `source`."""
    factor = vsplat(np.float32(inverse_rms(source, size, eps)))
    for offset in range(0, size * 4, 64):
        vstore(target + offset, vmul(vload(weight + offset), vmul(vload(source + offset), factor)))


@kernel
def rms_norm_rows(frame: int) -> None:
    """Items are runs of rows."""
    x, residual, weight, out = (argument(frame, 0), argument(frame, 1), argument(frame, 2), argument(frame, 3))
    num_rows, size = argument(frame, 4), argument(frame, 5)
    eps = load_f64(frame + 8 * 8)
    row_bytes = size * 4
    while True:
        first = next_item(frame) * 16
        if first >= num_rows:
            break
        for row in range(first, min(first + 16, num_rows)):
            source = x + row * row_bytes
            if residual != 0:
                total = residual + row * row_bytes
                for offset in range(0, row_bytes, 64):
                    vstore(total + offset, vadd(vload(total + offset), vload(source + offset)))
                source = total
            norm_row(source, weight, out + row * row_bytes, size, eps)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """The contract of `chatd_kernels.rms_norm.rms_norm`."""
    num_rows, size = x.shape
    check_multiple("hidden size", size)
    shape = (num_rows, size)
    rms_norm_rows.launch(
        num_rows > _ROWS_PER_ITEM and num_rows * size >= _PARALLEL_FROM,
        check_tensor("x", x, shape),
        0 if residual is None else check_tensor("residual", residual, shape),
        check_tensor("weight", weight, (size,)),
        check_tensor("out", out, shape),
        num_rows,
        size,
        float_bits(eps),
    )
