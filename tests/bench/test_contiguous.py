"""Ranges do not overlap, fit what they are for, and join again."""

import random

import pytest

from chatd.bench.contiguous import Buddy, FirstFit


def test_first_fit_takes_the_lowest_range_and_joins_its_neighbors():
    memory = FirstFit(10)
    assert [memory.allocate(n) for n in (3, 4, 3)] == [0, 3, 7]
    assert memory.allocate(1) is None
    memory.free(3)
    assert memory.allocate(5) is None
    memory.free(7)
    assert memory.allocate(6) == 3
    memory.free(0)
    memory.free(3)
    assert memory.allocate(10) == 0


def test_first_fit_leaves_holes_that_nobody_fits_in():
    memory = FirstFit(10)
    starts = [memory.allocate(2) for _ in range(5)]
    memory.free(starts[1])
    memory.free(starts[3])
    assert memory.allocate(3) is None
    assert memory.allocate(2) == starts[1]


def test_a_fixed_size_is_what_everybody_gets():
    memory = FirstFit(10, fixed_size=4)
    start = memory.allocate(1)
    assert memory.size_of(start) == 4
    assert memory.allocate(4) == 4
    assert memory.allocate(1) is None


def test_a_buddy_halves_and_joins():
    memory = Buddy(16)
    assert memory.allocate(3) == 0
    assert memory.size_of(0) == 4
    assert memory.allocate(5) == 8
    assert memory.allocate(4) == 4
    assert memory.allocate(1) is None
    memory.free(8)
    memory.free(0)
    assert memory.allocate(9) is None
    memory.free(4)
    assert memory.allocate(16) == 0


def test_a_buddy_wants_a_power_of_two():
    with pytest.raises(AssertionError, match="12 slots"):
        Buddy(12)


@pytest.mark.parametrize(
    ("memory", "largest"), [(FirstFit(256), 256), (FirstFit(256, fixed_size=32), 32), (Buddy(256), 256)]
)
def test_ranges_never_overlap_and_all_memory_comes_back(memory, largest):
    rng = random.Random(3)
    held = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            start = rng.choice(list(held))
            del held[start]
            memory.free(start)
        elif (start := memory.allocate(size := rng.randint(1, 32))) is not None:
            assert memory.size_of(start) >= size
            held[start] = memory.size_of(start)
        slots = [slot for start, size in held.items() for slot in range(start, start + size)]
        assert len(slots) == len(set(slots))
        assert not slots or max(slots) < 256
    for start in held:
        memory.free(start)
    assert memory.allocate(largest) == 0
