"""Allocators that give each sequence one contiguous range of slots, as serving systems did before paging.

Source: the baselines of "Efficient Memory Management for Large Language Model Serving with PagedAttention" (Kwon et
al., 2023), Orca (Max), (Pow2) and (Oracle). They differ in how long they take a sequence to become, and a range never
grows or moves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol


class Allocator(Protocol):
    """Ranges of one memory of `num_slots`."""

    num_slots: int

    def allocate(self, num_tokens: int) -> int | None:
        """Return the start of a range that can hold so many tokens, or None."""
        ...

    def free(self, start: int) -> None:
        """Give a range back."""
        ...

    def size_of(self, start: int) -> int:
        """Return how many slots the range that starts there has."""
        ...


class FirstFit:
    """The lowest free range that is large enough; what is left of it stays free.

    Args:
        num_slots: Of the memory.
        fixed_size: Every range has this size, whatever is asked for; None gives exactly what is asked for.
    """

    def __init__(self, num_slots: int, fixed_size: int | None = None) -> None:
        self.num_slots = num_slots
        self._fixed_size = fixed_size
        self._free: list[tuple[int, int]] = [(0, num_slots)]
        self._sizes: dict[int, int] = {}

    def allocate(self, num_tokens: int) -> int | None:
        """Return the start of a range that can hold so many tokens, or None."""
        size = self._fixed_size or num_tokens
        assert num_tokens <= size, f"{num_tokens} tokens in ranges of {size}"
        for place, (start, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[place]
                else:
                    self._free[place] = (start + size, room - size)
                self._sizes[start] = size
                return start
        return None

    def free(self, start: int) -> None:
        """Give a range back; it joins the free ones beside it."""
        end = start + self._sizes.pop(start)
        place = bisect_left(self._free, (start, 0))
        if place < len(self._free) and self._free[place][0] == end:
            end += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == start:
            start = self._free.pop(place - 1)[0]
        insort(self._free, (start, end - start))

    def size_of(self, start: int) -> int:
        """Return how many slots the range that starts there has."""
        return self._sizes[start]


class Buddy:
    """Ranges of powers of two: a free range is halved until it fits, and joins its other half when both are free."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots & (num_slots - 1) == 0, f"{num_slots} slots are not a power of two"
        self.num_slots = num_slots
        self._free: dict[int, set[int]] = {num_slots: {0}}
        self._sizes: dict[int, int] = {}

    def allocate(self, num_tokens: int) -> int | None:
        """Return the start of a range that can hold so many tokens, or None."""
        wanted = 1 << (num_tokens - 1).bit_length()
        size = wanted
        while not self._free.get(size):
            size *= 2
            if size > self.num_slots:
                return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        self._sizes[start] = size
        return start

    def free(self, start: int) -> None:
        """Give a range back, and join halves."""
        size = self._sizes.pop(start)
        while size < self.num_slots and (start ^ size) in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(start)

    def size_of(self, start: int) -> int:
        """Return how many slots the range that starts there has."""
        return self._sizes[start]
