"""Linear layers with packed weights: fp32, fp16, bf16 (on GPUs), or int8 with one scale per output channel.

On CPUs the products are the kernels' own (`chatd_kernels.linear`), not a library's: a row's bits depend on that row
alone by construction, whatever the batch, so a prefilled token and a decoded one are computed alike and no shape needs
a check on the CPU it runs on. Activations are float32; an int8 layer rounds each row to integers of up to 15 bits with
a scale of its own, so what int8 costs in accuracy is the rounding of the weights. On GPUs activations are of the
weights' dtype, an int8 layer takes any and leaves them as they are, and a row's bits depend on that row alone where the
weight is packed as deterministic.
"""

from __future__ import annotations

import torch

from chatd.errors import ConfigError
from chatd_kernels.linear import GpuWeight, PackedWeight, linear, weight_formats
from chatd_kernels.linear import pack_linear as pack_weight


class PackedLinear:
    """A linear layer `x @ weight.T + bias` whose weights were packed once.

    Attributes:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        format: "fp32", "fp16", "bf16" or "int8".
    """

    __slots__ = ("_packed", "format", "in_features", "out_features")

    def __init__(self, packed: PackedWeight | GpuWeight) -> None:
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
            x: `[num_rows, in_features]`, contiguous; float32, on GPUs of the weight's dtype.
            out: `[num_rows, out_features]`, contiguous, no part of `x`; of the dtype of `x`, on GPUs also float32.
        """
        if out is None:
            out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        return linear(x, self._packed, out)

    def __repr__(self) -> str:
        return f"PackedLinear({self.in_features} -> {self.out_features}, {self.format})"


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: str,
    *,
    device: torch.device | str = "cpu",
    is_deterministic: bool = False,
) -> PackedLinear:
    """Pack a weight `[out_features, in_features]` and a bias `[out_features]` of any float dtype for a device.

    Args:
        weight: See above.
        bias: See above, or None.
        quantization: Format of the weights.
        device: Where the products run.
        is_deterministic: Whether a row's bits depend on that row alone; on CPUs they always do.

    Raises:
        ConfigError: `quantization` is no format of this device.
        ValueError: The weight is no matrix, or `in_features` is no multiple of 16.
    """
    formats = weight_formats(device)
    for known in formats:
        if quantization == known:
            return PackedLinear(pack_weight(weight, bias, known, device=device, is_deterministic=is_deterministic))
    raise ConfigError(
        f"quantization {quantization!r} is not one of {', '.join(formats)} ({torch.device(device).type})",
        param="model.quantization",
    )
