"""Weights of linear layers as the CPU's kernels read them.

A panel holds 16 output features. fp32 and fp16: `[num_panels, in_features, 16]`, so that one vector is one input
feature of 16 outputs. int8: `[num_panels, in_features / 2, 16, 2]`, pairs of input features, with one scale per
output feature. The last panel is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

WeightFormat = Literal["fp32", "fp16", "bf16", "int8"]

FORMATS: tuple[WeightFormat, ...] = ("fp32", "fp16", "int8")
"""Of CPUs."""

PANEL = 16
"""Output features of a panel."""

_LARGEST_HALF, _LARGEST_FLOAT = torch.finfo(torch.float16).max, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's weights, packed.

    Attributes:
        format: how they are stored.
        in_features: columns of the weight.
        out_features: rows of the weight.
        panels: the packed numbers.
        scales: `[out_features, filled to whole panels]` float32: what an int8 weight counts; None for floats.
        bias: the same shape, or None.
        addresses: of panels, scales and bias; 0 where there is none.
    """

    format: WeightFormat
    in_features: int
    out_features: int
    panels: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    addresses: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.panels.numel() * self.panels.element_size()


def check_weight(weight: torch.Tensor, weight_format: WeightFormat, known: Sequence[WeightFormat]) -> None:
    """Check a weight against what kernels read.

    Raises:
        ValueError: it is no matrix, its inner size is no multiple of 16, the format is not one of the known, or it
            cannot hold the largest number.
    """
    if weight_format not in known:
        raise ValueError(f"weight format {weight_format!r} is not one of {', '.join(known)}")
    if weight.ndim != 2:
        raise ValueError(f"weight has {weight.ndim} dimensions, a linear layer's has 2")
    in_features = weight.shape[1]
    if in_features % PANEL or in_features == 0:
        raise ValueError(f"in_features {in_features} is no positive multiple of {PANEL}")
    largest = float(weight.abs().max()) if len(weight) else 0.0
    if not largest <= (_LARGEST_HALF if weight_format == "fp16" else _LARGEST_FLOAT):
        raise ValueError(f"a weight of size {largest} cannot be stored as {weight_format}")


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of a weight to integers: its int8 codes, and `[out_features]` float32, what a code counts."""
    scales = weight.abs().amax(dim=1).float() / 127
    # A row of zeros has any scale; 1 keeps the division finite.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, weight_format: WeightFormat) -> PackedWeight:
    """The contract of `chatd_kernels.linear.pack_linear`."""
    check_weight(weight, weight_format, FORMATS)
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    scales: torch.Tensor | None = None
    if weight_format == "int8":
        numbers, scales = quantize_rows(weight)
    else:
        numbers = weight.to(torch.float16 if weight_format == "fp16" else torch.float32)
    filled = _filled(numbers, num_panels * PANEL)
    if weight_format == "int8":
        panels = filled.view(num_panels, PANEL, in_features // 2, 2).transpose(1, 2).contiguous()
    else:
        panels = filled.view(num_panels, PANEL, in_features).transpose(1, 2).contiguous()
    scales = None if scales is None else _filled(scales, num_panels * PANEL)
    bias = None if bias is None else _filled(bias.float(), num_panels * PANEL)
    return PackedWeight(
        format=weight_format,
        in_features=in_features,
        out_features=out_features,
        panels=panels,
        scales=scales,
        bias=bias,
        addresses=(panels.data_ptr(), _address(scales), _address(bias)),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _filled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with zeros appended to `rows` rows."""
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    filled = tensor.new_zeros((rows, *tensor.shape[1:]))
    filled[: tensor.shape[0]] = tensor
    return filled
