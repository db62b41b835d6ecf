"""Launches of Triton kernels as values: what would run is known without a GPU, and can be compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel and everything it is started with.

    Attributes:
        kernel: The jit-compiled function.
        grid: Programs along each axis, at least one program in all.
        arguments: By name; those that the kernel declares `tl.constexpr` choose what is compiled.
        num_warps: Of a program.
        num_stages: Loads in flight of a pipelined loop.
        fuses_multiply_add: Whether the compiler may round a product and a sum once; where bits count, it may not.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    fuses_multiply_add: bool = True

    def run(self) -> None:
        """Start the kernel on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """How the kernel is compiled."""
        # What Triton does by default about multiplications and additions differs between its versions.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fuses_multiply_add}


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is no less than `n` (at least 1)."""
    return 1 << max(0, n - 1).bit_length()


ACTIVATIONS = (torch.float16, torch.bfloat16, torch.float32)
"""What the GPU's kernels read and write; sums are float32."""


def check_activation(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ACTIVATIONS
) -> None:
    """Check shape, dtype and contiguity.

    Raises:
        ValueError: the tensor is not what the kernel reads.
    """
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; expected contiguous {shape} of "
            + ", ".join(map(str, dtypes))
        )
