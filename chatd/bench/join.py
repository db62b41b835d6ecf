"""Equal prompts at once: `python -m chatd.bench join`.

Requests whose prompts begin alike and end with a message of their own arrive at once on the real engine, beside as many
with prompts that have nothing in common. Counted are the rows that the model computes, timed is how long all of them
take to their first token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatd.bench.real_engine import RealEngine, run_in_engine_process
from chatd.bench.record import write_json


def arrive(engine: RealEngine, prompts: Sequence[Sequence[int]], first: int) -> dict[str, float]:
    """Submit all prompts at once, and return rows, seconds to all first tokens, and how many waited for another's."""
    rows, joins = engine.runner.num_rows, engine.core.scheduler.joins.num_joins
    for number, prompt in enumerate(prompts, start=first):
        engine.submit(number, prompt, max_tokens=1)
    engine.run()
    times = sorted(engine.first_token_s[first + n] - engine.submitted_s[first] for n in range(len(prompts)))
    return {
        "requests": len(prompts),
        "rows": engine.runner.num_rows - rows,
        "joins": engine.core.scheduler.joins.num_joins - joins,
        "first_token_p50_s": statistics.median(times),
        "all_first_tokens_s": times[-1],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Let equal prompts arrive, then different ones."""
    engine = RealEngine(options.model, options.quantization)
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, engine.ready.vocab_size) for _ in range(count)]

    engine.submit(0, ids(options.tail), max_tokens=1)
    engine.run()
    common = ids(options.prompt)
    equal = [common + ids(options.tail) for _ in range(options.requests)]
    different = [ids(options.prompt + options.tail) for _ in range(options.requests)]
    return {
        "equal": arrive(engine, equal, 1),
        "different": arrive(engine, different, 1 + options.requests),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench join", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens that equal prompts have in common")
    parser.add_argument("--tail", type=int, default=40, help="tokens that each has for itself")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        print(json.dumps(measure(options)))
        return 0
    passed = ["--model", options.model, "--quantization", options.quantization, "--requests", str(options.requests)]
    passed += ["--prompt", str(options.prompt), "--tail", str(options.tail)]
    figures = run_in_engine_process("join", passed)
    print(f"{options.requests} prompts of {options.prompt} + {options.tail} tokens at once")
    for name, row in figures.items():
        print(
            f"  {name:10}{row['rows']:>8,} rows, {row['joins']:>3} joined, first token p50 "
            f"{row['first_token_p50_s']:.1f} s, all after {row['all_first_tokens_s']:.1f} s"
        )
    report = {"model": options.model, "quantization": options.quantization}
    write_json(options.json, "join", {**report, "prompt": options.prompt, "tail": options.tail, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
