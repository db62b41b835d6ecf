"""RMSNorm, slow and obvious (Zhang and Sennrich 2019, as in transformers' LlamaRMSNorm)."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """The contract of `chatd_kernels.rms_norm.rms_norm`, in float32 between the loads and the store."""
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    x = x.float()
    out.copy_(weight.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)))
