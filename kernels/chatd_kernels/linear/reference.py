"""Linear layers over packed weights, slow and obvious, in float64."""

from __future__ import annotations

import torch

from chatd_kernels.linear.gpu_pack import GpuWeight
from chatd_kernels.linear.pack import PackedWeight


def unpack(packed: PackedWeight | GpuWeight) -> torch.Tensor:
    """The weight `[out_features, in_features]` that the packed numbers stand for, float64."""
    if isinstance(packed, GpuWeight):
        rows = packed.rows.double()
    else:
        rows = packed.panels.double().transpose(1, 2).reshape(-1, packed.in_features)
    if packed.scales is not None:
        rows = rows * packed.scales.double()[:, None]
    return rows[: packed.out_features]


def linear(x: torch.Tensor, packed: PackedWeight | GpuWeight, out: torch.Tensor) -> None:
    """The contract of `chatd_kernels.linear.linear`, without the rounding of an int8 product's activations."""
    result = x.double() @ unpack(packed).T
    if packed.bias is not None:
        result += packed.bias[: packed.out_features].double()
    out.copy_(result)
