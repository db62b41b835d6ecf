"""The next turn of a session, by where its KV is: `python -m chatd.bench tiers`.

A session has its first turn on the real engine; then others take the pool, until what it holds is on the host, on the
disk, or nowhere. Timed is the first token of its next turn, counted are the rows that the model computes for it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatd.bench.real_engine import RealEngine, run_in_engine_process
from chatd.bench.record import write_json
from chatd.engine.messages import Tier, WatchPool

MIB = 2**20
POOL_BYTES = 33 * MIB
BELOW: dict[Tier, dict[str, int]] = {
    Tier.DEVICE: {},
    Tier.HOST: {"host_memory_bytes": 256 * MIB},
    Tier.DISK: {"host_memory_bytes": 16 * MIB, "disk_space_bytes": 512 * MIB},
    Tier.TOKENS: {},
}
"""What an engine has below its pool, so that a session ends up in this tier."""

_MAX_OTHERS = 8


def settle(engine: RealEngine) -> None:
    """Let an engine do all that it does when idle."""
    while not engine.core.is_checked:
        engine.core.idle(time.perf_counter())
        time.sleep(0.002)


def next_turn(engine: RealEngine, tier: Tier, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Bring a new session to a tier, and return the seconds and rows of its next turn.

    Raises:
        RuntimeError: It does not get there.
    """
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, engine.ready.vocab_size) for _ in range(count)]

    first = 100 * seed
    engine.submit(first, ids(options.history), max_tokens=8, lease=first, keep_lease=True)
    engine.run()
    settle(engine)
    engine.send(WatchPool(1.0, with_leases=True))
    for other in range(first + 1, first + 1 + _MAX_OTHERS):
        frame = engine.core.pool_frame(time.perf_counter())
        row = next(lease for lease in frame.leases if lease.lease == first)
        if tier is Tier.DEVICE or (row.tier is tier and not row.num_blocks):
            break
        room = engine.ready.num_blocks * engine.ready.block_size
        engine.submit(other, ids(min(room, engine.ready.max_model_len) - 8), max_tokens=1, lease=other, keep_lease=True)
        engine.run()
        settle(engine)
    else:
        raise RuntimeError(f"the session did not get to the tier {tier}")
    rows = engine.runner.num_rows
    last = first + 99
    engine.submit(last, ids(options.message), max_tokens=1, lease=first, base_len=options.history + 8, keep_lease=True)
    while engine.core.has_work:
        if engine.step() < 1e-4:
            time.sleep(1e-4)  # The disk is on it.
    return {"ttft_s": engine.ttft_s(last), "rows": engine.runner.num_rows - rows}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every tier on an engine of its own."""
    figures = {}
    for tier, below in BELOW.items():
        with tempfile.TemporaryDirectory() as folder:
            engine = RealEngine(
                options.model,
                options.quantization,
                kv_memory_bytes=POOL_BYTES,
                disk_directory=f"{folder}/kv",
                **below,
            )
            turns = [next_turn(engine, tier, options, seed) for seed in range(1, options.repeats + 1)]
            engine.core.close()
        figures[str(tier)] = {
            "ttft_s": statistics.median(turn["ttft_s"] for turn in turns),
            "rows": statistics.median(turn["rows"] for turn in turns),
        }
    return figures


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench tiers", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--history", type=int, default=1000, help="tokens of the session before its next turn")
    parser.add_argument("--message", type=int, default=30, help="tokens of that turn's message")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        print(json.dumps(measure(options)))
        return 0
    passed = ["--model", options.model, "--quantization", options.quantization, "--history", str(options.history)]
    passed += ["--message", str(options.message), "--repeats", str(options.repeats)]
    figures = run_in_engine_process("tiers", passed)
    print(f"the next turn of a session of {options.history} tokens, {options.message} of them new, median")
    for tier, row in figures.items():
        print(f"  {tier:8}{row['ttft_s'] * 1e3:>8,.0f} ms to the first token, {row['rows']:>6,.0f} rows")
    report = {"model": options.model, "quantization": options.quantization}
    write_json(options.json, "tiers", {**report, "history": options.history, "message": options.message, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
