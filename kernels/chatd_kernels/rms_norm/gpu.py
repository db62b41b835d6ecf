"""RMSNorm on GPUs: one program a row, which is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chatd_kernels.launch import Launch, check_activation, next_power_of_2

LARGEST_ROW = 1 << 15
"""Numbers of a row that a program holds in registers."""


@triton.jit
def rms_norm_rows(x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """`out = h / sqrt(mean(h²) + eps) * weight`, `h = residual += x` as it is stored (Zhang and Sennrich 2019)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < SIZE
    # [BLOCK]
    b_h = tl.load(x + i_row * SIZE + o_c, mask=m_c, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_r = residual + i_row * SIZE + o_c
        # [BLOCK]
        b_h = (b_h + tl.load(p_r, mask=m_c, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(p_r, b_h, mask=m_c)
        b_h = b_h.to(tl.float32)
    # [BLOCK]
    b_w = tl.load(weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(b_h * b_h, axis=0) / SIZE + eps)
    tl.store(out + i_row * SIZE + o_c, (b_h * inverse * b_w).to(out.dtype.element_ty), mask=m_c)


def launches(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> list[Launch]:
    """What `rms_norm` starts.

    Raises:
        ValueError: a shape or dtype is not supported.
    """
    num_rows, size = x.shape
    if not 1 <= size <= LARGEST_ROW:
        raise ValueError(f"hidden size {size} is not within 1 and {LARGEST_ROW}")
    check_activation("x", x, (num_rows, size))
    check_activation("weight", weight, (size,))
    check_activation("out", out, (num_rows, size))
    if residual is not None:
        check_activation("residual", residual, (num_rows, size))
    if num_rows == 0:
        return []
    block = next_power_of_2(size)
    arguments = {
        "x": x,
        "residual": x if residual is None else residual,
        "weight": weight,
        "out": out,
        "eps": eps,
        "SIZE": size,
        "BLOCK": block,
        "HAS_RESIDUAL": residual is not None,
    }
    return [Launch(rms_norm_rows, (num_rows,), arguments, num_warps=min(16, max(1, block // 512)))]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """The contract of `chatd_kernels.rms_norm.rms_norm`; each tensor may be float16, bfloat16 or float32."""
    for launch in launches(x, weight, eps, out, residual):
        launch.run()
