"""Captured graphs of the forward for steps in which every request decodes: one for each size of batch.

A step of fewer requests than its graph has rows is filled up with rows that own no slot: they write no K and V, and
read none. A graph reads and writes the very memory that it was captured with, so all that changes between steps is in
arrays that are filled before each replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from chatd_kernels.stream import Stream, Work

_SMALL_BUCKETS = (1, 2, 4, *range(8, 256, 8))
_LARGE_STEP = 32  # from 256 on: one row in eight is padding at most


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes of batch that graphs are captured for, the largest of which holds every decode step."""
    sizes = (*_SMALL_BUCKETS, *range(256, max_num_seqs, _LARGE_STEP))
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Graphs by size of batch.

    Args:
        stream: Of the device.
        sizes: Ascending; empty captures none.
    """

    def __init__(self, stream: Stream, sizes: Sequence[int]) -> None:
        self._stream = stream
        self._sizes = list(sizes)
        self._replays: dict[int, Work] = {}

    @property
    def num_captured(self) -> int:
        """Graphs that there are."""
        return len(self._replays)

    def capture(self, forward: Callable[[int], Work], report: Callable[[float], None]) -> None:
        """Capture a graph for each size, the largest first: the others fit into the memory that it takes.

        Args:
            forward: Makes the work of a step of so many rows, whose arrays hold padding alone.
            report: Told of the progress, 0 to 1.
        """
        for number, size in enumerate(reversed(self._sizes)):
            report(number / len(self._sizes))
            work = forward(size)
            # Kernels are compiled and libraries set up when they first run, which no capture may see.
            self._stream.run(work).wait()
            self._replays[size] = self._stream.capture(work)
        self._stream.synchronize()
        report(1.0)

    def bucket(self, num_rows: int) -> int | None:
        """Return the size of the graph for a step of so many rows, None where there is none."""
        if not self._replays:
            return None
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, size: int) -> None:
        """Run the graph of a size; a part of a step's work."""
        self._replays[size]()
