"""How many deltas the front carries on one core: the engine's frames in, events as JSON out, no model and no socket.

```
python -m chatd.bench front --sessions 64 --steps 200 --json front.json
```
Every step is one frame of the pipe with a token for each session. The parts are timed apart: decoding the frame,
sessions (detokenizer, stop strings, events, ring, delivery), and encoding each event as a connection's writer does.
`lagging` gives the front several steps at a time, which it merges into one delta a session.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chatd import protocol
from chatd.bench.record import write_json
from chatd.engine.messages import TokenDelta, Tokens, decode_engine, encode
from chatd.protocol import Event, Params, SessionCreate, UserMessage
from chatd.sessions.manager import Owner, SessionLimits
from chatd.testing.sessions import TURN_END, ScriptedEngine, encode_text, make_manager

TEXT = encode_text("the quick review of paging shows that memory which is shared is counted once; ")
GOAL_DELTAS_PER_S = 15_000


@dataclass(frozen=True, slots=True)
class Result:
    """One run; rates are per second of CPU time of one core.

    Attributes:
        name: Which run.
        sessions: Answers in progress.
        tokens: Tokens carried.
        deltas: Events that came of them.
        decode_us: Microseconds a token in decoding frames.
        sessions_us: In sessions.
        encode_us: In encoding events.
        tokens_per_s: Of all three together.
    """

    name: str
    sessions: int
    tokens: int
    deltas: int
    decode_us: float
    sessions_us: float
    encode_us: float
    tokens_per_s: float


class _Writer:
    """Keeps events for encoding; stands where a connection's writer stands."""

    def __init__(self, connection_id: str) -> None:
        self.connection_id = connection_id
        self.events: list[Event] = []

    def deliver(self, event: Event) -> None:
        self.events.append(event)


async def measure(name: str, *, sessions: int, steps: int, params: Params, steps_at_once: int = 1) -> Result:
    """Carry `steps` tokens for each of `sessions` answers."""
    engine = ScriptedEngine(lambda _log: [TURN_END])
    manager = make_manager(engine, max_tokens=None, limits=SessionLimits(max_turns_per_user=sessions))
    writers = []
    for number in range(sessions):
        session = await manager.create(Owner("bench", "bench"), SessionCreate(title="bench", params=params))
        writer = _Writer(f"con_{number}")
        manager.created(session, writer)
        manager.start(session, writer)
        await manager.user_message(session, UserMessage(session=session.id, content="go"))
        writers.append(writer)
    engine.flush()
    requests = [submit.request for submit in engine.submits]
    batches = [
        [
            encode(Tokens(i + k, [TokenDelta(request, [TEXT[(i + k) % len(TEXT)]]) for request in requests]))[4:]
            for k in range(steps_at_once)
        ]
        for i in range(0, steps, steps_at_once)
    ]
    for writer in writers:
        writer.events.clear()
    decode_s = sessions_s = encode_s = 0.0
    num_deltas = 0
    for frames in batches:
        started = time.process_time()
        messages = [decode_engine(frame) for frame in frames]
        decoded = time.process_time()
        manager.on_engine_messages(messages)
        carried = time.process_time()
        for writer in writers:
            for event in writer.events:
                protocol.encode(event)
            num_deltas += len(writer.events)
            writer.events.clear()
        encoded = time.process_time()
        decode_s += decoded - started
        sessions_s += carried - decoded
        encode_s += encoded - carried
    num_tokens = sessions * len(batches) * steps_at_once
    assert num_deltas > 0, "no delta came"
    return Result(
        name=name,
        sessions=sessions,
        tokens=num_tokens,
        deltas=num_deltas,
        decode_us=1e6 * decode_s / num_tokens,
        sessions_us=1e6 * sessions_s / num_tokens,
        encode_us=1e6 * encode_s / num_tokens,
        tokens_per_s=num_tokens / (decode_s + sessions_s + encode_s),
    )


async def run(sessions: int, steps: int) -> list[Result]:
    """Run all cases."""
    plain, stops = Params(), Params(stop=("\n\nUser:", "STOP", "<end>"))
    return [
        await measure("one step a frame", sessions=sessions, steps=steps, params=plain),
        await measure("with three stop strings", sessions=sessions, steps=steps, params=stops),
        await measure("lagging by eight steps", sessions=sessions, steps=steps, params=plain, steps_at_once=8),
    ]


def main(arguments: Sequence[str]) -> int:
    """Print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m chatd.bench front", description="deltas that the front carries on one core"
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    results = asyncio.run(run(options.sessions, options.steps))
    print(f"{'':26}{'tokens/s':>10}{'decode':>10}{'sessions':>10}{'encode':>10}  us a token")
    for result in results:
        print(
            f"{result.name:26}{result.tokens_per_s:>10.0f}{result.decode_us:>10.2f}{result.sessions_us:>10.2f}"
            f"{result.encode_us:>10.2f}"
        )
    report = {"goal_deltas_per_s": GOAL_DELTAS_PER_S, "results": [asdict(result) for result in results]}
    write_json(options.json, "front", report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
