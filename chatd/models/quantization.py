"""Linear layers with packed weights: fp32, fp16, or int8 with one scale per output channel.

The products are the kernels' own (`chatd_kernels.linear`), not a library's: a row's bits depend on that row alone by
construction, whatever the batch, so a prefilled token and a decoded one are computed alike and no shape needs a check
on the CPU it runs on. Activations are float32; an int8 layer rounds each row to integers of up to 15 bits with a scale
of its own, so what int8 costs in accuracy is the rounding of the weights.
"""

from __future__ import annotations

from typing import get_args

import torch

from chatd.errors import ConfigError
from chatd_kernels.linear import PackedWeight, WeightFormat, linear
from chatd_kernels.linear import pack_linear as pack_weight

FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
"""Formats that `pack_linear` knows."""


class PackedLinear:
    """A linear layer `x @ weight.T + bias` whose weights were packed once.

    Attributes:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        format: "fp32", "fp16" or "int8".
    """

    __slots__ = ("_packed", "format", "in_features", "out_features")

    def __init__(self, packed: PackedWeight) -> None:
        self._packed = packed
        self.in_features = packed.in_features
        self.out_features = packed.out_features
        self.format = packed.format

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return self._packed.num_bytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `[num_rows, out_features]`, in `out` if it is given.

        Args:
            x: `[num_rows, in_features]` float32, contiguous.
            out: `[num_rows, out_features]` float32, contiguous, no part of `x`.
        """
        if out is None:
            out = torch.empty((x.shape[0], self.out_features), dtype=torch.float32, device=x.device)
        return linear(x, self._packed, out)

    def __repr__(self) -> str:
        return f"PackedLinear({self.in_features} -> {self.out_features}, {self.format})"


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, quantization: str) -> PackedLinear:
    """Pack a weight `[out_features, in_features]` and a bias `[out_features]` of any float dtype.

    Raises:
        ConfigError: `quantization` is no known format.
        ValueError: The weight is no matrix, or `in_features` is no multiple of 16.
    """
    for known in FORMATS:
        if quantization == known:
            return PackedLinear(pack_weight(weight, bias, known))
    raise ConfigError(
        f"quantization {quantization!r} is not one of {', '.join(FORMATS)}",
        param="model.quantization",
    )
