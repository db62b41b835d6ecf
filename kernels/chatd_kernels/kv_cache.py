"""The memory of the paged KV cache and the one object that knows its layout.

A block is one contiguous range, `[num_layers, 2, num_kv_heads, tile]`, so copying, swapping or saving a block is one
copy. Inside one (layer, head) tile the layout is chosen for the kernels of the device:

    K  [block_size / key_group, head_dim, key_group]   `key_group` positions lie side by side
    V  [block_size, head_dim]                          an output's neighboring dimensions are one vector

On CPUs `key_group` is 16: scores of 16 positions are one vector. On GPUs it is 1: K is `[block_size, head_dim]`
like V. A tile of an 8-bit cache holds its codes first and then one float32 scale per position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from chatd_kernels.dispatch import backend_of
from chatd_kernels.kv_quantization import SCALE_BYTES, dequantize, is_quantized, quantize

GROUP = 16
"""Positions that lie side by side in K on CPUs; also what a head dimension is a multiple of."""

_DTYPES = {
    GROUP: (torch.float16, torch.float32),
    1: (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8),
}


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Where the K and V of a (block, layer, head, offset) lie; all strides are in elements.

    Attributes:
        num_layers: Layers of the model.
        num_kv_heads: KV heads of each.
        block_size: Positions of a block.
        head_dim: Dimensions of a head.
        dtype: What a number is stored in: float16 or float32, and with a `key_group` of 1 also bfloat16, float8_e4m3fn
            or int8.
        key_group: Positions that lie side by side in K: 16 for the CPU's kernels, 1 for those of GPUs.

    Raises:
        ValueError: the block size or the head dimension is no positive multiple of 16, or the dtype is not supported.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    key_group: int = GROUP

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 64, 128, 256):
            raise ValueError(f"block size {self.block_size} is not one of 16, 32, 64, 128, 256")
        if self.head_dim < GROUP or self.head_dim % GROUP:
            raise ValueError(f"head dimension {self.head_dim} is no multiple of {GROUP}")
        if self.key_group not in _DTYPES:
            raise ValueError(f"key group {self.key_group} is neither {GROUP} nor 1")
        if self.dtype not in _DTYPES[self.key_group]:
            names = ", ".join(map(str, _DTYPES[self.key_group]))
            raise ValueError(f"KV dtype {self.dtype} is not one of {names}")

    @property
    def is_quantized(self) -> bool:
        """Whether numbers are stored as 8-bit codes and scales."""
        return is_quantized(self.dtype)

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of the memory: bytes where codes and scales lie in one tile."""
        return torch.uint8 if self.is_quantized else self.dtype

    @property
    def head_stride(self) -> int:
        """From one head's tile to the next."""
        return self.block_size * (self.head_dim + (SCALE_BYTES if self.is_quantized else 0))

    @property
    def kv_stride(self) -> int:
        """From a layer's K to its V."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        """From one layer to the next."""
        return 2 * self.kv_stride

    @property
    def block_stride(self) -> int:
        """From one block to the next."""
        return self.num_layers * self.layer_stride

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """`[num_layers, 2, num_kv_heads, tile]` of one block's memory."""
        return (self.num_layers, 2, self.num_kv_heads, self.head_stride)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return self.storage_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.block_stride * self.element_bytes


@dataclass(frozen=True, slots=True)
class KVCache:
    """The blocks and their layout.

    Attributes:
        data: `[num_blocks, num_layers, 2, num_kv_heads, tile]` of the layout's storage dtype, contiguous.
    """

    data: torch.Tensor
    layout: KVCacheLayout

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache holds."""
        return self.data.shape[0]

    @property
    def scales(self) -> torch.Tensor:
        """The memory of an 8-bit cache as float32, for kernels that read the scales in it."""
        assert self.layout.is_quantized, f"a cache of {self.layout.dtype} has no scales"
        return self.data.view(torch.float32)

    def read_slot(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the K and V `[num_kv_heads, head_dim]` of one slot (block * block_size + offset).

        An 8-bit cache gives float32.
        """
        keys, values, offset = self._tiles(slot, layer)
        group = self.layout.key_group
        key, value = keys[:, offset // group, :, offset % group].clone(), values[:, offset].clone()
        if not self.layout.is_quantized:
            return key, value
        scales, dtype = self._scales(slot, layer), self.layout.dtype
        return dequantize(key, scales[0], dtype), dequantize(value, scales[1], dtype)

    def write_slot(self, slot: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V `[num_kv_heads, head_dim]` into one slot."""
        if self.layout.is_quantized:
            scales = self._scales(slot, layer)
            key, scales[0] = quantize(key, self.layout.dtype)
            value, scales[1] = quantize(value, self.layout.dtype)
        keys, values, offset = self._tiles(slot, layer)
        group = self.layout.key_group
        keys[:, offset // group, :, offset % group] = key.to(self.layout.storage_dtype)
        values[:, offset] = value.to(self.layout.storage_dtype)

    def _tiles(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        layout = self.layout
        block, offset = divmod(slot, layout.block_size)
        keys, values = self.data[block, layer, :, :, : layout.block_size * layout.head_dim].unbind(0)
        groups = layout.block_size // layout.key_group
        return (
            keys.view(layout.num_kv_heads, groups, layout.head_dim, layout.key_group),
            values.view(layout.num_kv_heads, layout.block_size, layout.head_dim),
            offset,
        )

    def _scales(self, slot: int, layer: int) -> torch.Tensor:
        """The scales `[2, num_kv_heads]` of a slot, as a view."""
        block, offset = divmod(slot, self.layout.block_size)
        return self.scales[block, layer, :, :, offset - self.layout.block_size]


def device_key_group(device: torch.device | str) -> int:
    """The `key_group` of the kernels that run on a device now."""
    return GROUP if backend_of(torch.device(device).type) == "cpu" else 1


def allocate_kv_cache(
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    *,
    key_group: int | None = None,
) -> KVCache:
    """Allocate a cache of zeros, in the layout of the device's kernels unless `key_group` says which.

    Raises:
        ValueError: the layout is not supported, or there are no blocks.
    """
    if num_blocks < 1:
        raise ValueError(f"{num_blocks} blocks: a cache needs at least 1")
    is_cpu = torch.device(device).type == "cpu"
    if key_group is None:
        key_group = device_key_group(device)
    layout = KVCacheLayout(num_layers, num_kv_heads, block_size, head_dim, dtype, key_group)
    shape = (num_blocks, *layout.block_shape)
    if not is_cpu or dtype == torch.bfloat16:
        return KVCache(torch.zeros(shape, dtype=layout.storage_dtype, device=device), layout)
    # numpy asks the system for huge pages: blocks lie at random places, so small pages cost a table walk each.
    zeros = np.zeros(shape, dtype=str(layout.storage_dtype).removeprefix("torch."))
    return KVCache(torch.from_numpy(zeros), layout)
