"""Does the time to the first token tell what another tenant has cached (S3)? `python -m chatd.bench probe`.

One tenant computes a prompt; another one, or the same one, asks for that prompt or for one that nobody has computed, in
random order. Whoever probes sees its time to the first token and guesses which it was. The figure is the area under the
guess's curve (AUC): the chance that a cached prompt is faster than one that is not. 0.5 is a coin, 1 is certainty.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatd.bench.real_engine import RealEngine, run_in_engine_process
from chatd.bench.record import write_json
from chatd.bench.tables import probe_table

GOAL = 0.05
"""How far from 0.5 the AUC of a foreign tenant's probes may be."""


def auc(fast: Sequence[float], slow: Sequence[float]) -> float:
    """Return the chance that a member of `fast` is below one of `slow`; equal ones count half.

    Source: Mann and Whitney, "On a Test of Whether one of Two Random Variables is Stochastically Larger", 1947.
    """
    ordered = sorted(slow)
    above = sum(2 * len(ordered) - bisect_left(ordered, value) - bisect_right(ordered, value) for value in fast)
    return above / (2 * len(fast) * len(ordered))


def spread(num_fast: int, num_slow: int) -> float:
    """Return the standard deviation of the AUC of as many probes that tell nothing."""
    return math.sqrt((num_fast + num_slow + 1) / (12 * num_fast * num_slow))


class Prober:
    """Asks an engine for prompts and keeps the times.

    Args:
        engine: That is asked.
        vocab_size: Prompts are random ids below this.
        num_tokens: Of a prompt.
        seed: Of prompts and order.
    """

    def __init__(self, engine: RealEngine, vocab_size: int, num_tokens: int, seed: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._rng = random.Random(seed)
        self._number = 0

    def probe(self, prober: str, num_probes: int) -> dict[str, Any]:
        """Probe so many prompts that the tenant `victim` has computed, and as many that nobody has."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        cached_tokens = 0
        kinds = [True] * num_probes + [False] * num_probes
        self._rng.shuffle(kinds)
        self._ask("victim", self._prompt())
        self._ask(prober, self._prompt())
        for is_cached in kinds:
            computed, other = self._prompt(), self._prompt()
            # Before either probe the same has happened: the victim has computed some prompt.
            self._ask("victim", computed)
            request = self._ask(prober, computed if is_cached else other)
            seconds[is_cached].append(self._engine.ttft_s(request))
            cached_tokens += self._engine.done[request].num_cached_tokens
        cached, uncached = seconds[True], seconds[False]
        return {
            "probes": num_probes,
            "auc": auc(cached, uncached),
            "spread": spread(num_probes, num_probes),
            "cached_tokens": cached_tokens,
            "ttft_cached_p50_s": statistics.median(cached),
            "ttft_uncached_p50_s": statistics.median(uncached),
        }

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(10, self._vocab_size) for _ in range(self._num_tokens)]

    def _ask(self, tenant: str, prompt: Sequence[int]) -> int:
        self._number += 1
        self._engine.submit(self._number, prompt, max_tokens=1, tenant=tenant)
        self._engine.run()
        return self._number


def main(arguments: Sequence[str]) -> int:
    """Probe, print both figures, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench probe", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name, a folder, or a hub id")
    parser.add_argument("--quantization", default="fp16", choices=["fp16", "int8", "fp32"])
    parser.add_argument("--probes", type=int, default=500, help="probes of each kind by the foreign tenant")
    parser.add_argument("--same", type=int, default=100, help="likewise by the same tenant, for contrast")
    parser.add_argument("--tokens", type=int, default=49, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        engine = RealEngine(options.model, options.quantization)
        prober = Prober(engine, engine.ready.vocab_size, options.tokens, options.seed)
        same = prober.probe("victim", options.same)
        print(json.dumps({"same": same, "foreign": prober.probe("stranger", options.probes)}))
        return 0
    figures = run_in_engine_process("probe", arguments)
    print(probe_table(figures))
    settings = {name: getattr(options, name) for name in ("model", "quantization", "tokens", "seed")}
    write_json(options.json, "probe", settings | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
