"""The memory of the paged KV cache and the one object that knows its layout.

A block is one contiguous range, `[num_layers, 2, num_kv_heads, block_size * head_dim]`, so copying, swapping or
saving a block is one copy. Inside one (layer, head) tile the layout is chosen for the kernels:

    K  [block_size / 16, head_dim, 16]   16 positions side by side: scores of 16 positions are one vector
    V  [block_size, head_dim]            an output's 16 dimensions are one vector
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

GROUP = 16
"""Positions that lie side by side in K."""


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Where the K and V of a (block, layer, head, offset) lie; all strides are in elements.

    Raises:
        ValueError: the block size or the head dimension is no positive multiple of 16, or the dtype is not supported.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 64, 128, 256):
            raise ValueError(f"block size {self.block_size} is not one of 16, 32, 64, 128, 256")
        if self.head_dim < GROUP or self.head_dim % GROUP:
            raise ValueError(f"head dimension {self.head_dim} is no multiple of {GROUP}")
        if self.dtype not in (torch.float16, torch.float32):
            raise ValueError(f"KV dtype {self.dtype} is neither torch.float16 nor torch.float32")

    @property
    def head_stride(self) -> int:
        """From one head's tile to the next."""
        return self.block_size * self.head_dim

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
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return 2 if self.dtype == torch.float16 else 4

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.block_stride * self.element_bytes


@dataclass(frozen=True, slots=True)
class KVCache:
    """The blocks and their layout.

    Attributes:
        data: `[num_blocks, num_layers, 2, num_kv_heads, block_size * head_dim]`, contiguous.
    """

    data: torch.Tensor
    layout: KVCacheLayout

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache holds."""
        return self.data.shape[0]

    def read_slot(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the K and V `[num_kv_heads, head_dim]` of one slot (block * block_size + offset)."""
        keys, values, offset = self._tiles(slot, layer)
        return keys[:, offset // GROUP, :, offset % GROUP].clone(), values[:, offset].clone()

    def write_slot(self, slot: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V `[num_kv_heads, head_dim]` into one slot."""
        keys, values, offset = self._tiles(slot, layer)
        keys[:, offset // GROUP, :, offset % GROUP] = key.to(self.layout.dtype)
        values[:, offset] = value.to(self.layout.dtype)

    def _tiles(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        layout = self.layout
        block, offset = divmod(slot, layout.block_size)
        keys, values = self.data[block, layer].unbind(0)
        groups = layout.block_size // GROUP
        return (
            keys.view(layout.num_kv_heads, groups, layout.head_dim, GROUP),
            values.view(layout.num_kv_heads, layout.block_size, layout.head_dim),
            offset,
        )


def allocate_kv_cache(
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> KVCache:
    """Allocate a cache of zeros.

    Raises:
        ValueError: the layout is not supported, or there are no blocks.
    """
    if num_blocks < 1:
        raise ValueError(f"{num_blocks} blocks: a cache needs at least 1")
    layout = KVCacheLayout(num_layers, num_kv_heads, block_size, head_dim, dtype)
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size * head_dim)
    if torch.device(device).type != "cpu":
        return KVCache(torch.zeros(shape, dtype=dtype, device=device), layout)
    # numpy asks the system for huge pages: blocks lie at random places, so small pages cost a table walk each.
    zeros = np.zeros(shape, dtype=np.float16 if dtype == torch.float16 else np.float32)
    return KVCache(torch.from_numpy(zeros), layout)
