"""What one tenant sees of another's flood: `python -m chatd.bench neighbor`.

A quiet tenant sends a short prompt, reads the answer, pauses, and sends the next, on the real engine: first alone, then
while another tenant of equal weight keeps many requests waiting. Shown is its time to the first token, by the clock and
in steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatd.bench.chat import percentile
from chatd.bench.real_engine import RealEngine, run_in_engine_process
from chatd.bench.record import write_json

_FLOOD_BASE = 1_000_000


class Neighbors:
    """A quiet tenant and, where wanted, one that floods.

    Args:
        engine: Real.
        flood: Requests that the flooding tenant has in the engine at any time.
        flood_prompt: Tokens of each of their prompts.
        flood_output: Tokens of each of their answers.
    """

    def __init__(self, engine: RealEngine, flood: int, flood_prompt: int, flood_output: int) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self._flood = flood
        self._flood_prompt = flood_prompt
        self._flood_output = flood_output
        self._flooding: set[int] = set()
        self._num_flooded = 0
        self._num_asked = 0

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._engine.ready.vocab_size) for _ in range(count)]

    def _step(self, *, flooded: bool) -> None:
        engine = self._engine
        if flooded:
            self._flooding = {number for number in self._flooding if number not in engine.done}
            while len(self._flooding) < self._flood:
                number = _FLOOD_BASE + self._num_flooded
                self._num_flooded += 1
                self._flooding.add(number)
                engine.submit(number, self._ids(self._flood_prompt), max_tokens=self._flood_output, tenant="flood")
        if engine.core.has_work:
            engine.step()
        else:
            time.sleep(0.001)

    def ask(self, turns: int, num_prompt: int, num_output: int, pause_s: float, *, flooded: bool) -> dict[str, float]:
        """Let the quiet tenant take turns, and return what it saw."""
        engine = self._engine
        ttft_s: list[float] = []
        steps: list[int] = []
        for _ in range(turns):
            resume = time.perf_counter() + pause_s
            while time.perf_counter() < resume:
                self._step(flooded=flooded)
            number = self._num_asked
            self._num_asked += 1
            first_step = engine.core.scheduler.step
            engine.submit(number, self._ids(num_prompt), max_tokens=num_output, tenant="quiet")
            while number not in engine.first_token_s:
                self._step(flooded=flooded)
            steps.append(engine.core.scheduler.step - first_step)
            ttft_s.append(engine.ttft_s(number))
            while number not in engine.done:
                self._step(flooded=flooded)
        return {
            "turns": turns,
            "ttft_p50_s": percentile(ttft_s, 0.5),
            "ttft_p95_s": percentile(ttft_s, 0.95),
            "steps_p50": statistics.median(steps),
            "steps_max": max(steps),
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ask alone, then beside the flood."""
    engine = RealEngine(options.model, options.quantization)
    neighbors = Neighbors(engine, options.flood, options.flood_prompt, options.flood_output)
    asked = (options.turns, options.prompt, options.output, options.pause_s)
    neighbors.ask(2, *asked[1:], flooded=False)
    alone = neighbors.ask(*asked, flooded=False)
    # The flood is at its full height before anything is timed.
    neighbors.ask(2, *asked[1:], flooded=True)
    return {"alone": alone, "flooded": neighbors.ask(*asked, flooded=True)}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench neighbor", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--turns", type=int, default=20, help="of the quiet tenant, alone and again beside the flood")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of its prompts")
    parser.add_argument("--output", type=int, default=8, help="tokens of its answers")
    parser.add_argument("--pause-s", type=float, default=0.5, help="before each")
    parser.add_argument("--flood", type=int, default=64, help="requests of the other tenant in the engine at any time")
    parser.add_argument("--flood-prompt", type=int, default=512)
    parser.add_argument("--flood-output", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        print(json.dumps(measure(options)))
        return 0
    names = ("turns", "prompt", "output", "pause_s", "flood", "flood_prompt", "flood_output")
    passed = ["--model", options.model, "--quantization", options.quantization]
    for name in names:
        passed += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    figures = run_in_engine_process("neighbor", passed)
    for name, row in figures.items():
        print(
            f"{name:10} TTFT p50 {row['ttft_p50_s'] * 1e3:.0f} ms, p95 {row['ttft_p95_s'] * 1e3:.0f} ms; "
            f"steps p50 {row['steps_p50']:.0f}, most {row['steps_max']}"
        )
    setting = {name: getattr(options, name) for name in ("model", "quantization", *names)}
    write_json(options.json, "neighbor", {**setting, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
