import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.engine.device_tables import DeviceTables
from chatd.engine.plan import Chunk

NUM_ROWS, MAX_BLOCKS = 4, 40


class Device:
    """Tables on a device, which get what changes and nothing else."""

    def __init__(self):
        self.tables = DeviceTables(NUM_ROWS, MAX_BLOCKS)
        self.memory = np.full(NUM_ROWS * MAX_BLOCKS, -1, dtype=np.int32)

    def step(self, **requests):
        """Place the requests' tables, and return how many entries were sent."""
        chunks = [Chunk(int(name[1:]), 0, [1], ids, None) for name, ids in requests.items()]
        rows, where, ids = self.tables.place(chunks)
        self.memory[where] = ids
        for row, chunk in zip(rows, chunks, strict=True):
            found = self.memory.reshape(NUM_ROWS, MAX_BLOCKS)[row, : len(chunk.block_ids)]
            assert found.tolist() == list(chunk.block_ids)
            assert self.tables.host[row, : len(chunk.block_ids)].tolist() == list(chunk.block_ids)
        assert len(set(rows.tolist())) == len(chunks)
        return len(where)


def test_only_what_changed_is_sent():
    device = Device()
    assert device.step(r1=[5, 6], r2=[7]) == 3
    assert device.step(r1=[5, 6], r2=[7]) == 0
    assert device.step(r1=[5, 6, 8], r2=[7]) == 1
    assert device.step(r1=[5, 9, 8], r2=[7]) == 2
    assert device.step(r1=[5]) == 0
    assert device.step(r1=[5, 9]) == 1


def test_a_request_that_is_left_out_of_a_step_finds_its_table_again():
    device = Device()
    device.step(r1=[5, 6])
    device.step(r2=[7], r3=[8], r4=[9])
    assert device.step(r1=[5, 6]) == 0


def test_who_was_longest_away_gives_up_its_place_and_nobody_of_the_same_step():
    device = Device()
    device.step(r1=[1], r2=[2], r3=[3], r4=[4])
    assert device.step(r5=[5], r1=[1], r3=[3]) == 1
    assert device.step(r1=[1], r3=[3], r4=[4], r5=[5]) == 0
    assert device.step(r2=[2]) == 1


def test_after_a_failed_step_everything_is_sent_anew():
    device = Device()
    device.step(r1=[5, 6], r2=[7])
    device.tables.forget()
    device.memory[:] = -1
    assert device.step(r1=[5, 6], r2=[7]) == 3


block_lists = st.lists(st.integers(0, 6), min_size=1, max_size=MAX_BLOCKS)
steps = st.lists(st.dictionaries(st.sampled_from([f"r{i}" for i in range(9)]), block_lists, max_size=NUM_ROWS))


@settings(deadline=None, max_examples=200)
@given(steps)
def test_the_device_has_the_plans_tables_whatever_they_are(plans):
    device = Device()
    for requests in plans:
        device.step(**requests)


def test_a_table_that_is_too_long_is_a_fault():
    with pytest.raises(ValueError, match="could not broadcast"):
        Device().step(r1=list(range(MAX_BLOCKS + 1)))
