"""Weights of linear layers as GPUs read them: `[out_features, in_features]` as a checkpoint has them.

Floats lie in the dtype of the activations. int8 has one float32 scale per output feature, and activations stay floats:
what it saves is the reading of the weights, which is what a decode step's time goes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chatd_kernels.linear.pack import WeightFormat, check_weight, quantize_rows

FORMATS: tuple[WeightFormat, ...] = ("fp32", "fp16", "bf16", "int8")
"""Of GPUs."""

_DTYPES: dict[WeightFormat, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A linear layer's weights on a GPU.

    Attributes:
        format: how they are stored.
        in_features: columns of the weight.
        out_features: rows of the weight.
        rows: `[out_features, in_features]`, contiguous: the weights, or their int8 codes.
        scales: `[out_features]` float32: what a code counts; None for floats.
        bias: `[out_features]`, of the weight's dtype or float32 beside int8; or None.
        is_deterministic: whether products compute each row alike in every batch.
    """

    format: WeightFormat
    in_features: int
    out_features: int
    rows: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    is_deterministic: bool

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.rows.numel() * self.rows.element_size()


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_format: WeightFormat,
    *,
    device: torch.device,
    is_deterministic: bool,
) -> GpuWeight:
    """The contract of `chatd_kernels.linear.pack_linear`.

    A weight that lies on the device in the format's dtype is taken as it is: an output layer shares the embedding.
    """
    weight = weight.to(device)
    check_weight(weight, weight_format, FORMATS)
    out_features, in_features = weight.shape
    scales: torch.Tensor | None = None
    if weight_format == "int8":
        rows, scales = quantize_rows(weight)
        bias_dtype = torch.float32
    else:
        bias_dtype = _DTYPES[weight_format]
        rows = weight.to(bias_dtype)
    return GpuWeight(
        format=weight_format,
        in_features=in_features,
        out_features=out_features,
        rows=rows.contiguous(),
        scales=scales,
        bias=None if bias is None else bias.to(device, bias_dtype).contiguous(),
        is_deterministic=is_deterministic,
    )
