import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatd.engine.messages import Ping, decode_front, encode
from chatd.engine.pipe import EnginePipe, FrameError, FrameReader, PipeClosed


def frame(body):
    return len(body).to_bytes(4, "big") + body


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    pipe = EnginePipe(theirs)
    yield ours, pipe
    ours.close()
    pipe.close()


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(bodies, data):
    stream = b"".join(frame(body) for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader()
    out = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        out += reader.feed(stream[start:end])
    assert out == bodies


def test_a_length_beyond_the_limit_is_refused_before_its_body_arrives():
    with pytest.raises(FrameError, match="a frame of 101 bytes, the limit is 100"):
        FrameReader(max_bytes=100).feed((101).to_bytes(4, "big"))


def test_all_messages_that_are_there_are_read_at_once(pair):
    ours, pipe = pair
    ours.sendall(b"".join(encode(Ping(i)) for i in range(1000)))
    assert [decode_front(body).nonce for body in pipe.receive(1.0)] == list(range(1000))
    assert pipe.receive(0) == []


def test_sending_never_waits_for_a_front_that_does_not_read(pair):
    ours, pipe = pair
    frames = [frame(bytes([i]) * 100_000) for i in range(100)]
    for one in frames:
        pipe.send([one])
    assert pipe.backlog_bytes > 5_000_000
    reader = FrameReader()
    received = []
    ours.settimeout(5.0)
    while len(received) < 100:
        received += reader.feed(ours.recv(1 << 20))
        pipe.receive(0)
    assert [body[0] for body in received] == list(range(100))
    assert pipe.backlog_bytes == 0


def test_a_closed_pipe_is_seen(pair):
    ours, pipe = pair
    ours.close()
    with pytest.raises(PipeClosed):
        pipe.receive(None)
    with pytest.raises(PipeClosed):
        pipe.send([b"x"])


def test_finish_sends_what_is_left(pair):
    ours, pipe = pair
    ours.settimeout(5.0)

    def read_to_the_end():
        return sum(len(data) for data in iter(lambda: ours.recv(500_000), b""))

    pipe.send([b"x" * 3_000_000])
    assert pipe.backlog_bytes > 0
    with ThreadPoolExecutor() as threads:
        received = threads.submit(read_to_the_end)
        pipe.finish(5.0)
        assert received.result() == 3_000_000
