"""Gated activations on CPUs. Both are `gate * sigmoid(z) * up`: z = gate for SiLU, and for GELU's tanh form
z = 2 sqrt(2 / pi) (gate + 0.044715 gate³), since (1 + tanh(y)) / 2 = sigmoid(2 y).
"""

from __future__ import annotations

import numpy as np
import torch

from chatd_kernels.checks import check_multiple, check_tensor
from chatd_kernels.jit import jit
from chatd_kernels.runtime import argument, kernel, next_item
from chatd_kernels.vector import vadd, vdiv, vexp2, vfma, vload, vmin, vmul, vsplat, vstore

_PARALLEL_FROM = 1 << 15
_ROWS_PER_ITEM = 4
# -log2(e), and -2 log2(e) sqrt(2 / pi).
_SILU_SCALE = np.float32(-1.4426950408889634)
_GELU_SCALE = np.float32(-2.302208198144325)


@jit
def gated_row(gate: int, up: int, out: int, size: int, is_gelu: bool) -> None:
    """One row of `size` gates and ups."""
    one = vsplat(np.float32(1.0))
    # 2^126 stands for all larger: the quotient is 0 to float32's precision and never inf / inf.
    largest = vsplat(np.float32(126.0))
    silu_scale, gelu_scale, cubic = (vsplat(_SILU_SCALE), vsplat(_GELU_SCALE), vsplat(np.float32(0.044715)))
    for offset in range(0, size * 4, 64):
        g = vload(gate + offset)
        z = vmul(g, vmul(vfma(vmul(g, g), cubic, one), gelu_scale)) if is_gelu else vmul(g, silu_scale)
        sigmoid_inverse = vadd(one, vexp2(vmin(largest, z)))
        vstore(out + offset, vmul(vdiv(g, sigmoid_inverse), vload(up + offset)))


@jit
def _gated_rows(frame: int, is_gelu: bool) -> None:
    gate_up, out = argument(frame, 0), argument(frame, 1)
    num_rows, size = argument(frame, 2), argument(frame, 3)
    while True:
        first = next_item(frame) * 4
        if first >= num_rows:
            break
        for row in range(first, min(first + 4, num_rows)):
            gate = gate_up + row * size * 8
            gated_row(gate, gate + size * 4, out + row * size * 4, size, is_gelu)


@kernel
def silu_mul_rows(frame: int) -> None:
    """Items are runs of rows."""
    _gated_rows(frame, False)


@kernel
def gelu_tanh_mul_rows(frame: int) -> None:
    """Items are runs of rows."""
    _gated_rows(frame, True)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.silu_mul.silu_mul`."""
    silu_mul_rows.launch(*_arguments(gate_up, out))


def gelu_tanh_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.silu_mul.gelu_tanh_mul`."""
    gelu_tanh_mul_rows.launch(*_arguments(gate_up, out))


def _arguments(gate_up: torch.Tensor, out: torch.Tensor) -> tuple[bool, int, int, int, int]:
    num_rows, size = out.shape
    check_multiple("intermediate size", size)
    return (
        num_rows > _ROWS_PER_ITEM and num_rows * size >= _PARALLEL_FROM,
        check_tensor("gate_up", gate_up, (num_rows, 2 * size)),
        check_tensor("out", out, (num_rows, size)),
        num_rows,
        size,
    )
