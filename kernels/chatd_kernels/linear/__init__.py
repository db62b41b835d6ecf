"""Linear layers over packed weights."""

from __future__ import annotations

import torch

from chatd_kernels.dispatch import launcher
from chatd_kernels.linear.pack import PackedWeight, WeightFormat, pack_linear

__all__ = ["PackedWeight", "WeightFormat", "linear", "pack_linear"]


def linear(x: torch.Tensor, packed: PackedWeight, out: torch.Tensor) -> torch.Tensor:
    """Write `x @ weight.T + bias` to `out`; a row's bits depend on that row alone.

    Args:
        x: `[num_rows, in_features]` float32.
        packed: from `pack_linear`.
        out: `[num_rows, out_features]` float32.

    Returns:
        `out`.
    """
    launcher("linear", x.device.type)(x, packed, out)
    return out
