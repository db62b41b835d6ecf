"""Gated activations, slow and obvious."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.silu_mul.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def gelu_tanh_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.silu_mul.gelu_tanh_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(functional.gelu(gate, approximate="tanh") * up)
