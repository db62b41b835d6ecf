"""A process that speaks the engine's side of the pipe and does what its model's name says."""

import ctypes
import os
import re
import select
import sys
import time

from chatd.engine.messages import (
    Cancel,
    Fork,
    Loading,
    Ping,
    Pong,
    Ready,
    Release,
    Shutdown,
    StartFailed,
    Submit,
    TokenDelta,
    Tokens,
    WatchPool,
    decode_front,
    encode,
)
from chatd.engine.options import decode_options
from chatd.engine.pipe import EnginePipe, PipeClosed
from chatd.engine.pulse import Pulse

STUCK = ("waits", "spins", "waits with the lock", "spins with the lock", "works long")


def main():
    import socket

    pipe = EnginePipe(socket.socket(fileno=int(sys.argv[1])))
    pulse = Pulse(int(sys.argv[2]))
    bodies = []
    while not bodies:
        bodies = pipe.receive(None)
    options = decode_options(bodies.pop(0))
    behavior = options.model_id
    pipe.send([encode(Loading("weights", 0.5))])
    if behavior == "refuse":
        pipe.send([encode(StartFailed("no_room_for_pool", "12 MiB are free", 3))])
        pipe.finish(5.0)
        return 3
    if behavior == "exit at start":
        return 9
    if behavior.startswith("hang"):
        # A folder counts the starts; all hang, or all but the last one that is named.
        folder, _, last = behavior.removeprefix("hang ").partition(" until ")
        os.mkdir(f"{folder}/{len(os.listdir(folder))}")
        if len(os.listdir(folder)) < int(last or 1000):
            select.select([], [], [])
    threads = int(os.environ["OMP_NUM_THREADS"])
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    pipe.send([encode(Ready(os.getpid(), 16, threads, 1, 1, options.quantization, []))])
    while True:
        received = bodies or pipe.receive(None)
        pulse.begin_turn()
        for body in received:
            match decode_front(body):
                case Ping(nonce):
                    pipe.send([encode(Pong(nonce))])
                case Shutdown():
                    if behavior == "deaf":
                        select.select([], [], [])
                    return 0
                case Submit() as submit:
                    deltas = [encode(Tokens(i, [TokenDelta(submit.request, [i])])) for i in range(len(submit.new_ids))]
                    pipe.send(deltas)
                case Cancel(request):
                    os._exit(request)
                case Fork(at=how):
                    pulse.expect(0.02)
                    get_stuck(STUCK[how], pulse)
                    pipe.send([encode(Loading("went on", 1.0))])
                case Release():
                    pipe.send([b"\x00\x00\x00\x01\xc1"])
                case WatchPool(interval_s):
                    pipe.send([encode(Pong(0)), encode(Loading("watching", interval_s))])
                    if interval_s == 5.0:  # busy, and silent
                        end = time.monotonic() + 1.5
                        while time.monotonic() < end:
                            pass
                        pipe.send([encode(Loading("was busy", 1.0))])
        bodies = []


def get_stuck(how, pulse):
    """Be in a step that does not end, or in one that is long and was said to be."""
    match how:
        case "waits":
            select.select([], [], [])
        case "spins":
            while True:
                pass
        case "waits with the lock":
            ctypes.PyDLL(None).pause()
        case "spins with the lock":
            re.match("(a+)+b", "a" * 60)
        case "works long":
            pulse.expect(5.0)
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                pass


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PipeClosed:
        sys.exit(0)
