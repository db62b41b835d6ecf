"""Linear layers over packed weights."""

from __future__ import annotations

import torch

from chatd_kernels.dispatch import backend_of, launcher
from chatd_kernels.linear import gpu_pack, pack
from chatd_kernels.linear.gpu_pack import GpuWeight
from chatd_kernels.linear.pack import PackedWeight, WeightFormat

__all__ = ["GpuWeight", "PackedWeight", "WeightFormat", "linear", "pack_linear", "weight_formats"]


def weight_formats(device: torch.device | str = "cpu") -> tuple[WeightFormat, ...]:
    """The formats that the kernels of a device read."""
    return pack.FORMATS if backend_of(torch.device(device).type) == "cpu" else gpu_pack.FORMATS


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_format: WeightFormat,
    *,
    device: torch.device | str = "cpu",
    is_deterministic: bool = False,
) -> PackedWeight | GpuWeight:
    """Pack a weight `[out_features, in_features]` and a bias `[out_features]` for the kernels of a device.

    Args:
        weight: of any float dtype.
        bias: likewise, or None.
        weight_format: how weights are stored; "bf16" is for GPUs only.
        device: where the products will run.
        is_deterministic: whether a row's bits may depend on that row alone; on CPUs they never depend on more.

    Raises:
        ValueError: the weight is no matrix, its inner size is no multiple of 16, the format is not one of this kind of
            device, or it cannot hold the largest number.
    """
    place = torch.device(device)
    if backend_of(place.type) == "cpu":
        return pack.pack_linear(weight, bias, weight_format)
    return gpu_pack.pack_linear(weight, bias, weight_format, device=place, is_deterministic=is_deterministic)


def linear(x: torch.Tensor, packed: PackedWeight | GpuWeight, out: torch.Tensor) -> torch.Tensor:
    """Write `x @ weight.T + bias` to `out`; on CPUs a row's bits depend on that row alone.

    On GPUs they do if the weight was packed so. There `x` is of the weight's dtype (float16, bfloat16 or float32; any
    of them for int8), and `out` of the same or float32.

    Args:
        x: `[num_rows, in_features]` float32.
        packed: from `pack_linear`, for this device.
        out: `[num_rows, out_features]` float32.

    Returns:
        `out`.
    """
    launcher("linear", x.device.type)(x, packed, out)
    return out
