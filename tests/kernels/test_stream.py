"""The stand-in for a GPU's stream: work runs late, in its order, and its errors come with its end."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from chatd_kernels.gpu_device import GpuStream
from chatd_kernels.stream import InterpretedStream


def test_work_runs_when_its_end_is_waited_for_and_all_before_it_first():
    stream, ran = InterpretedStream(), []
    ends = [stream.run(lambda number=number: ran.append(number)) for number in range(3)]
    assert ran == []
    ends[1].wait()
    assert ran == [0, 1]
    ends[0].wait()
    stream.synchronize()
    assert ran == [0, 1, 2]


def test_an_error_is_raised_by_the_end_of_its_own_work_each_time():
    stream, ran = InterpretedStream(), []
    first = stream.run(lambda: 1 / 0)
    second = stream.run(lambda: ran.append(2))
    second.wait()
    assert ran == [2]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            first.wait()


def test_what_was_uploaded_stays_though_the_array_changes():
    array = np.arange(3)
    tensor = InterpretedStream().upload(array)
    array[:] = 7
    assert tensor.tolist() == [0, 1, 2]


def test_captured_work_runs_on_the_tensors_that_it_named():
    stream = InterpretedStream()
    numbers = torch.zeros(2)
    replay = stream.capture(lambda: numbers.add_(1))
    assert numbers.tolist() == [0, 0]
    numbers.fill_(5)
    replay()
    assert numbers.tolist() == [6, 6]


def test_the_peak_of_work_is_taken_once_it_has_run():
    stream, ran = InterpretedStream(memory_bytes=100), []
    assert stream.peak_bytes(lambda: ran.append(1)) == 0
    assert ran == [1]
    assert (stream.memory().free, stream.memory().total) == (100, 100)


class Graph:
    def replay(self):
        pass


def test_graphs_of_a_gpu_share_one_memory_for_as_long_as_one_of_them_lives(monkeypatch):
    pools, handles = [], iter(range(9))

    def capturing(graph, *, pool, stream):
        pools.append(pool)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    stream = GpuStream()
    first = stream.capture(lambda: None)
    second = stream.capture(lambda: None)
    del first
    third = stream.capture(lambda: None)
    assert pools == [0, 0, 0]
    del second, third
    # torch takes no handle again whose graphs are gone.
    assert stream.capture(lambda: None) is not None
    assert pools[3] == 1
