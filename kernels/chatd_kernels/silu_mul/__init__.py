"""The gated activations of a feed-forward layer: SiLU·mul and GELU(tanh)·mul."""

from __future__ import annotations

import torch

from chatd_kernels.dispatch import launcher


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write `silu(gate) * up` to `out` and return it.

    Args:
        gate_up: `[num_rows, 2 * size]` float32, the gate's columns first; size is a multiple of 16. On GPUs any size,
            and both tensors may be float16, bfloat16 or float32.
        out: `[num_rows, size]` float32.
    """
    launcher("silu_mul", gate_up.device.type)(gate_up, out)
    return out


def gelu_tanh_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write `gelu_tanh(gate) * up` to `out` and return it; shapes as in `silu_mul`."""
    launcher("silu_mul", gate_up.device.type, "gelu_tanh_mul")(gate_up, out)
    return out
