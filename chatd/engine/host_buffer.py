"""The host's slots for whole blocks: where stores of the pool go, and what the disk tier writes and fills."""

from __future__ import annotations

import torch

from chatd.engine.mapped_memory import map_memory
from chatd_kernels.kv_cache import KVCacheLayout


class HostBuffer:
    """So many slots, each for one whole block of a cache.

    Args:
        num_slots: At least one.
        layout: Of the cache.
        is_pinned: Whether a GPU copies to and from it by itself; then it costs its full size at once, else a slot
            costs what it takes when it is first written.

    Attributes:
        slots: `[num_slots, num_layers, 2, num_kv_heads, tile]`, as the cache's blocks.
        memory: The same bytes, for the disk tier.

    Raises:
        OSError: The system does not give so much.
    """

    def __init__(self, num_slots: int, layout: KVCacheLayout, *, is_pinned: bool = False) -> None:
        num_bytes = num_slots * layout.block_bytes
        data = map_memory(num_bytes)
        if is_pinned:
            _pin(data)
        self.slots = data.view(layout.storage_dtype).view((num_slots, *layout.block_shape))
        self.memory = data.numpy().data

    @property
    def num_slots(self) -> int:
        """Blocks that it holds."""
        return len(self.slots)


def _pin(data: torch.Tensor) -> None:
    """Let GPUs copy to and from memory; torch's own pinned memory would be rounded up to a power of two.

    Raises:
        OSError: The system does not pin so much.
    """
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error):
        raise OSError(f"{data.numel()} bytes were not pinned: {error}")
