import numpy as np
import torch

from chatd.engine.staged_arrays import StagedArrays
from chatd_kernels.stream import InterpretedStream

SHAPES = {"tokens": ((5,), torch.int64), "tiles": ((3, 4), torch.int32)}


def put(stream, staged, value, seen):
    """Stage a step whose arrays are of one value, and put in the work that reads them."""
    stage = staged.claim()
    for array in stage.arrays.values():
        array.fill(value)

    def work():
        stage.send()
        seen.append([int(array.flatten()[-1]) for array in staged.device.values()])

    stage.ended = stream.run(work)
    return stage.ended


def test_a_step_reads_what_was_staged_for_it_though_the_next_ones_are_made_ready():
    stream = InterpretedStream()
    staged = StagedArrays(stream, SHAPES)
    seen = []
    ends = [put(stream, staged, value, seen) for value in (1, 2)]
    assert seen == []
    for end in ends:
        end.wait()
    assert seen == [[1, 1], [2, 2]]


def test_memory_that_a_step_still_reads_is_waited_for():
    stream = InterpretedStream()
    staged = StagedArrays(stream, SHAPES)
    seen = []
    for value in range(7):
        put(stream, staged, value, seen)
    stream.synchronize()
    assert seen == [[value, value] for value in range(7)]


def test_a_step_that_failed_keeps_nobody_from_its_memory():
    stream = InterpretedStream()
    staged = StagedArrays(stream, SHAPES)
    staged.claim().ended = stream.run(lambda: 1 / 0)
    seen = []
    for value in range(4):
        put(stream, staged, value, seen).wait()
    assert seen == [[value, value] for value in range(4)]


def test_the_device_reads_the_same_memory_in_every_step_and_arrays_begin_where_vectors_may():
    stream = InterpretedStream()
    staged = StagedArrays(stream, SHAPES)
    addresses = [array.data_ptr() for array in staged.device.values()]
    for _ in range(4):
        put(stream, staged, 3, []).wait()
    assert [array.data_ptr() for array in staged.device.values()] == addresses
    assert np.diff(addresses).tolist() == [64]
    assert [tuple(array.shape) for array in staged.device.values()] == [(5,), (3, 4)]
