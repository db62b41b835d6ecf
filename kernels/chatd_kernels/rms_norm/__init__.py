"""RMSNorm over rows, with the residual addition before it."""

from __future__ import annotations

import torch

from chatd_kernels.dispatch import launcher


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Write `h / sqrt(mean(h²) + eps) * weight` to `out`, where `h` is `x`, or `residual += x` if there is one.

    Args:
        x: `[num_rows, hidden]` float32; hidden is a multiple of 16. On GPUs any hidden size up to 32,768, and each
            tensor may be float16, bfloat16 or float32.
        weight: `[hidden]` float32.
        eps: added to the mean square.
        out: like `x`; may be `x` itself.
        residual: like `x`; the sum replaces it.

    Returns:
        `out`.
    """
    launcher("rms_norm", x.device.type)(x, weight, eps, out, residual)
    return out
