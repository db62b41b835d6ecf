"""The host's slots for whole blocks: where stores of the pool go, and what the disk tier writes and fills."""

from __future__ import annotations

from chatd.engine.mapped_memory import map_memory
from chatd_kernels.gpu_device import pin_memory
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
            pin_memory(data)
        self.slots = data.view(layout.storage_dtype).view((num_slots, *layout.block_shape))
        self.memory = data.numpy().data

    @property
    def num_slots(self) -> int:
        """Blocks that it holds."""
        return len(self.slots)
