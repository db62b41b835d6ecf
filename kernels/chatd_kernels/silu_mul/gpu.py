"""Gated activations on GPUs. Both are `gate * sigmoid(z) * up`, with z as in `cpu.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chatd_kernels.launch import Launch, check_activation, next_power_of_2

_LARGEST_BLOCK = 1024


@triton.jit
def gated_rows(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """`out = gate * sigmoid(z) * up`: z = gate, or 2 sqrt(2 / pi) (gate + 0.044715 gate³) for GELU's tanh form."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < SIZE
    p_gate = gate_up + i_row * (2 * SIZE) + o_c
    # [BLOCK]
    b_gate = tl.load(p_gate, mask=m_c, other=0.0).to(tl.float32)
    # [BLOCK]
    b_up = tl.load(p_gate + SIZE, mask=m_c, other=0.0).to(tl.float32)
    b_z = b_gate
    if IS_GELU:
        b_z = 1.5957691216057308 * b_gate * (1.0 + 0.044715 * b_gate * b_gate)
    # Where the exponential overflows the quotient is -0, as it should be.
    b_out = b_gate / (1.0 + tl.exp(-b_z)) * b_up
    tl.store(out + i_row * SIZE + o_c, b_out.to(out.dtype.element_ty), mask=m_c)


def launches(gate_up: torch.Tensor, out: torch.Tensor, *, is_gelu: bool) -> list[Launch]:
    """What the activations start.

    Raises:
        ValueError: a shape or dtype is not supported.
    """
    num_rows, size = out.shape
    check_activation("gate_up", gate_up, (num_rows, 2 * size))
    check_activation("out", out, (num_rows, size))
    if out.numel() == 0:
        return []
    block = min(_LARGEST_BLOCK, next_power_of_2(size))
    arguments = {"gate_up": gate_up, "out": out, "SIZE": size, "BLOCK": block, "IS_GELU": is_gelu}
    return [Launch(gated_rows, (num_rows, -(-size // block)), arguments)]


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.silu_mul.silu_mul`; each tensor may be float16, bfloat16 or float32."""
    for launch in launches(gate_up, out, is_gelu=False):
        launch.run()


def gelu_tanh_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.silu_mul.gelu_tanh_mul`; dtypes as in `silu_mul`."""
    for launch in launches(gate_up, out, is_gelu=True):
        launch.run()
