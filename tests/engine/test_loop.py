import socket

import msgspec
import pytest

from chatd.engine import loop as loop_module
from chatd.engine.loop import EngineLoop
from chatd.engine.messages import (
    Cancel,
    EngineStats,
    Ping,
    Pong,
    PoolFrame,
    Release,
    Shutdown,
    TokenDelta,
    Tokens,
    decode_engine,
    encode,
)
from chatd.engine.pipe import EnginePipe, FrameReader
from chatd.testing.engine import FakeClock

FRAME = PoolFrame(1, 8, 8, 0, 0, 0, 0, 0.0, 0, 0, [])
STATS = EngineStats(0, 0.0, 0.0, 0, 0, 0)


class ScriptedCore:
    """A core that writes down what it is asked and says what it is told to."""

    def __init__(self):
        self.has_work = False
        self.is_shutting_down = False
        self.is_checked = True
        self.calls = []
        self.says = []
        self.due = None

    def handle(self, message, now):
        self.calls.append(message)
        self.is_shutting_down |= isinstance(message, Shutdown)
        return []

    def step(self, now):
        self.calls.append("step")
        return self.says

    def idle(self, now):
        self.calls.append("idle")
        return []

    def next_due(self):
        return self.due


class Rig:
    def __init__(self):
        self.front, theirs = socket.socketpair()
        self.front.settimeout(5.0)
        self.pipe = EnginePipe(theirs)
        self.core = ScriptedCore()
        self.clock = FakeClock(100.0)
        self.loop = EngineLoop(self.core, self.pipe, self.clock)
        self.reader = FrameReader()

    def turn(self, *messages):
        return self.loop.turn([encode(message)[4:] for message in messages])

    def received(self):
        return [decode_engine(body) for body in self.reader.feed(self.front.recv(1 << 20))]


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.front.close()
    made.pipe.close()


def test_everything_that_has_arrived_is_handled_before_the_step(rig):
    rig.core.has_work = True
    rig.core.says = [Tokens(1, [TokenDelta(7, [3])])]
    assert rig.turn(Cancel(1), Release(2)) == 0.0
    assert rig.core.calls == [Cancel(1), Release(2), "step"]
    assert rig.received() == rig.core.says


def test_a_ping_is_answered_without_disturbing_the_core(rig):
    rig.turn(Ping(41))
    assert rig.core.calls == ["idle"]
    assert rig.received() == [Pong(41)]


def test_a_step_that_says_nothing_is_not_tried_again_at_once(rig):
    rig.core.has_work = True
    assert rig.turn() > 0.0


def test_an_idle_engine_checks_everything_collects_and_then_sleeps(rig):
    rig.core.is_checked = False
    for _ in range(1000):
        rig.clock.advance(0.01)
        assert rig.turn() == loop_module.SLICE_INTERVAL_S
    rig.core.is_checked = True
    assert rig.turn() is None
    rig.core.due = rig.clock.now + 0.75
    assert rig.turn() == pytest.approx(0.75)
    rig.core.has_work = True
    rig.turn()
    rig.core.has_work, rig.core.due = False, None
    assert rig.turn() == pytest.approx(loop_module.COLLECT_AFTER_S)
    rig.clock.advance(loop_module.COLLECT_AFTER_S)
    assert rig.turn() is None


def test_garbage_is_collected_once_when_idle_and_never_between_steps(rig, monkeypatch):
    collected = []
    monkeypatch.setattr(loop_module.gc, "collect", lambda: collected.append(rig.clock.now))
    for has_work in (True, False, True, False, False, False):
        rig.core.has_work = has_work
        rig.turn()
        rig.clock.advance(loop_module.COLLECT_AFTER_S)
    assert collected == [104.0]


def test_no_step_is_run_while_the_front_does_not_read(rig):
    rig.core.has_work = True
    rig.core.says = [Tokens(1, [TokenDelta(7, list(range(100_000)))])]
    steps = 0
    while rig.turn() == 0.0:
        steps += 1
    assert rig.pipe.backlog_bytes > loop_module.MAX_BACKLOG_BYTES
    calls = rig.core.calls.count("step")
    assert rig.turn(Cancel(3)) is None
    assert rig.core.calls[-1] == Cancel(3)
    assert rig.core.calls.count("step") == calls
    messages = []
    while rig.pipe.backlog_bytes or len(messages) < calls:
        messages += rig.received()
        rig.pipe.receive(0)
    assert len(messages) == calls
    assert rig.turn() == 0.0


def test_frames_of_the_pool_are_dropped_for_a_front_that_lags(rig):
    rig.core.has_work = True
    rig.core.says = [Tokens(1, [TokenDelta(7, list(range(100_000)))])]
    while rig.pipe.backlog_bytes <= loop_module.FRAME_BACKLOG_BYTES:
        rig.turn()
    rig.core.says = [FRAME, STATS]
    rig.turn()
    messages = []
    while STATS not in messages:
        messages += rig.received()
        rig.pipe.receive(0)
    assert FRAME not in messages
    rig.turn()
    assert rig.received() == [FRAME, STATS]


def test_it_ends_when_the_front_asks_for_it(rig):
    rig.front.sendall(encode(Ping(1)) + encode(Shutdown()))
    rig.loop.run()
    assert rig.received() == [Pong(1)]


def test_what_is_no_message_ends_it(rig):
    rig.front.sendall(b"\x00\x00\x00\x01\xc1")
    with pytest.raises(msgspec.DecodeError):
        rig.loop.run()
