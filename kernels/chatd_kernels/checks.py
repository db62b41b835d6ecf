"""What launchers check before a kernel, which checks nothing, gets an address."""

from __future__ import annotations

import torch

from chatd_kernels.kv_cache import KVCacheLayout


def check_key_group(layout: KVCacheLayout, key_group: int) -> None:
    """Check that a cache's K lies as the kernels of this device read it.

    Raises:
        ValueError: it is a cache for another kind of device.
    """
    if layout.key_group != key_group:
        raise ValueError(f"the cache groups K by {layout.key_group} positions, the kernels here by {key_group}")


def check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Check shape, dtype and contiguity, and return the address.

    Raises:
        ValueError: the tensor is not what the kernel reads.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; expected contiguous {shape} {dtype}"
        )
    address: int = tensor.data_ptr()
    return address


def check_multiple(name: str, value: int, of: int = 16) -> None:
    """Check that a size is a positive multiple of the vector width.

    Raises:
        ValueError: it is not.
    """
    if value < 1 or value % of:
        raise ValueError(f"{name} {value} is no positive multiple of {of}")
