"""What a turn costs beside its length of history: `python -m chatd.bench turn`.

The same turn is taken on sessions of different histories in the engine core, and its work is counted, not timed: rows
that are computed, look-ups and bytes hashed in the prefix index, blocks allocated, bytes between front and engine. Only
attention's own read of the history, which is not in here, grows.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from chatd.bench.echo_runner import EchoRunner
from chatd.bench.record import write_json
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import LeaseId, Submit, encode
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.prefix_index import Namespace

_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)


def turn_work(history: int, num_prompt: int, num_output: int) -> dict[str, int]:
    """Count what a turn costs on a resident session of `history` tokens."""
    room = history + num_prompt + num_output + 64
    runner = EchoRunner()
    config = EngineConfig(room // 16, _NAMESPACE, room, max_num_batched_tokens=room, target_step_s=1e9)
    core = EngineCore(config, runner, lambda: 0.0)
    rng = random.Random(0)
    ids = [rng.randrange(49152) for _ in range(history + num_prompt)]
    core.handle(Submit(RequestId(1), LeaseId(1), "bench", 0, ids[:history], SamplingParams(max_tokens=1)), 0.0)
    core.step(0.0)
    work = {"rows": 0, "look-ups": 0, "bytes hashed": 0}
    index = core.pool.index
    find, hash_function = index.find, index.hash_function

    def count_find(*arguments: object) -> object:
        work["look-ups"] += 1
        return find(*arguments)  # type: ignore[arg-type]

    def count_hash(data: bytes) -> bytes:
        work["bytes hashed"] += len(data)
        return hash_function(data)

    index.find, index.hash_function = count_find, count_hash  # type: ignore[method-assign, assignment]
    rows_before, blocks_before = runner.num_rows, core.pool.num_active
    turn = Submit(RequestId(2), LeaseId(1), "bench", history + 1, ids[history:], SamplingParams(max_tokens=num_output))
    num_bytes = len(encode(turn))
    said = core.handle(turn, 0.0)
    while core.has_work:
        said += core.step(0.0)
    return {
        **work,
        "rows": runner.num_rows - rows_before,
        "blocks": core.pool.num_active - blocks_before,
        "messages": len(said) + 1,
        "bytes sent": num_bytes + sum(len(encode(message)) for message in said),
    }


def main(arguments: Sequence[str]) -> int:
    """Count, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench turn", description=__doc__)
    parser.add_argument("--history", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--prompt", type=int, default=40, help="tokens of the message")
    parser.add_argument("--output", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    turns = [{"history": n, **turn_work(n, options.prompt, options.output)} for n in options.history]
    for name in turns[0]:
        print(f"{name:14}" + "".join(f"{turn[name]:>10,}" for turn in turns))
    write_json(options.json, "turn", {"prompt": options.prompt, "output": options.output, "turns": turns})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
