"""Large memory that costs nothing before it is used."""

from __future__ import annotations

import contextlib
import mmap

import torch


def map_memory(num_bytes: int) -> torch.Tensor:
    """Return zeroed bytes that the system provides page by page, when they are first written.

    So start-up does not wait for gigabytes to be cleared, and a pool that is never full never costs its full size.

    Raises:
        OSError: The system does not give so much.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, num_bytes)
    else:
        # Private, since shared memory gets no large pages; attention reads blocks all over the pool, and large pages
        # spare it the misses of the translation cache.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
