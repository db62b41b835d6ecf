import pytest

from chatd.engine.decode_graphs import DecodeGraphs, bucket_sizes
from chatd_kernels.stream import InterpretedStream


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
    ],
)
def test_there_is_a_graph_for_every_eighth_size_and_for_the_largest_batch(max_num_seqs, sizes):
    assert bucket_sizes(max_num_seqs) == sizes


def test_large_batches_have_fewer_graphs():
    sizes = bucket_sizes(400)
    assert sizes[-6:] == [256, 288, 320, 352, 384, 400]
    assert len(sizes) == 3 + 31 + 6


def test_each_graph_runs_once_before_it_is_captured_the_largest_first():
    ran, told = [], []
    graphs = DecodeGraphs(InterpretedStream(), [1, 2, 4])
    graphs.capture(lambda size: lambda: ran.append(size), told.append)
    assert ran == [4, 2, 1]
    assert told == [0.0, 1 / 3, 2 / 3, 1.0]
    assert graphs.num_captured == 3
    graphs.replay(2)
    assert ran == [4, 2, 1, 2]


def test_a_batch_takes_the_next_larger_graph():
    graphs = DecodeGraphs(InterpretedStream(), [1, 2, 4])
    assert graphs.bucket(1) is None
    graphs.capture(lambda size: lambda: None, lambda progress: None)
    assert [graphs.bucket(n) for n in range(1, 6)] == [1, 2, 4, 4, None]
