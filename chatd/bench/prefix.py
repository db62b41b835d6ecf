"""What finding prefixes costs and saves on the real model: `python -m chatd.bench prefix`.

Three things on one engine: the time to the first token after a long system prompt that nobody has used, that the same
tenant has used, and that is public (computed by a system request, used by another tenant); the share of a step that
look-up, registration and adoption take, in steps that compute a prompt and in steps that decode; and microseconds a
block of each, alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chatd.bench.pool import best_us
from chatd.bench.real_engine import RealEngine, run_in_engine_process
from chatd.bench.record import write_json
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.manager import ID_TYPECODE, KVCacheManager
from chatd.kvcache.prefix_index import Namespace, PrefixIndex

GOAL_LOWER = 0.97
_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)
_BLOCK = 16


class _Watch:
    """Sums the seconds of the calls that find, register and adopt blocks."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.seconds = 0.0
        self._depth = 0
        for name in ("get_computed_blocks", "_register", "adopt"):
            setattr(kv, name, self._timed(getattr(kv, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - started

        return timed


def ttft_figures(engine: RealEngine, num_system: int, num_user: int, repeats: int) -> dict[str, Any]:
    """Return medians of the time to the first token after a system prompt that is uncached, cached and public."""
    rng = random.Random(0)
    number = 0

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, engine.ready.vocab_size) for _ in range(count)]

    def turn(prompt: Sequence[int], tenant: str) -> tuple[float, int]:
        nonlocal number
        number += 1
        engine.submit(number, prompt, max_tokens=1, tenant=tenant)
        engine.run()
        return engine.ttft_s(number), engine.done[number].num_cached_tokens

    turn(ids(num_user), "warm-up")
    seconds: dict[str, list[float]] = {"uncached": [], "cached": [], "public": []}
    cached_tokens: dict[str, int] = {}
    for _ in range(repeats):
        system = ids(num_system)
        public = ids(num_system)
        turn(public, "")
        for name, prompt, tenant in (
            ("uncached", system, "acme"),
            ("cached", system, "acme"),
            ("public", public, "other"),
        ):
            taken, cached_tokens[name] = turn(prompt + ids(num_user), tenant)
            seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "system_tokens": num_system,
        "user_tokens": num_user,
        "ttft_s": medians,
        "cached_tokens": cached_tokens,
        "lower": {name: 1 - medians[name] / medians["uncached"] for name in ("cached", "public")},
    }


def share_figures(engine: RealEngine, num_prompt: int, batch: int, num_steps: int) -> dict[str, Any]:
    """Return the share of the steps' time that the prefix machinery takes, computing prompts and decoding."""
    rng = random.Random(1)
    watch = _Watch(engine.core.kv)

    def share(run: Callable[[], float]) -> float:
        before, taken = watch.seconds, run()
        return (watch.seconds - before) / taken

    def submit(number: int, count: int, max_tokens: int) -> None:
        prompt = [rng.randrange(10, engine.ready.vocab_size) for _ in range(count)]
        engine.submit(number, prompt, max_tokens=max_tokens)

    submit(10_000, num_prompt, 1)
    prefill = share(engine.run)
    for number in range(batch):
        submit(10_001 + number, 64, num_steps + 2 * batch)
    while any(request.num_remaining_tokens != 1 for request in engine.core.scheduler.requests.values()):
        engine.step()
    decode = share(lambda: sum(engine.step() for _ in range(num_steps)))
    engine.run()
    return {"prompt_tokens": num_prompt, "batch": batch, "of_prefill": prefill, "of_decode": decode}


def machinery_figures(num_blocks: int = 2048) -> dict[str, float]:
    """Return microseconds a block of finding, registering and adopting a prefix of so many blocks."""
    ids = array(ID_TYPECODE, range(_BLOCK * num_blocks + 1))
    registered: list[float] = []
    adopted: list[float] = []
    found = 0.0
    for _ in range(5):
        kv = KVCacheManager(BlockPool(2 * num_blocks + 2, PrefixIndex()), _BLOCK, _NAMESPACE)
        tables = [kv.open_table("acme") for _ in range(2)]
        for table in tables:
            allocation = kv.allocate_slots(table, len(ids))
            assert allocation is not None
            started = time.process_time()
            kv.commit(allocation, len(ids), ids)
            if table is tables[0]:
                registered.append(1e6 * (time.process_time() - started) / num_blocks)
        started = time.process_time()
        kv.adopt(tables[1])
        adopted.append(1e6 * (time.process_time() - started) / num_blocks)
        assert tables[1].block_ids[:num_blocks] == tables[0].block_ids[:num_blocks]
        found = best_us(lambda kv=kv: len(kv.get_computed_blocks(kv.open_table("acme"), ids)))  # type: ignore[misc]
    return {"find_us": found, "register_us": statistics.median(registered), "adopt_us": statistics.median(adopted)}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench prefix", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="fp16")
    parser.add_argument("--system", type=int, default=4096, help="tokens of the system prompt")
    parser.add_argument("--user", type=int, default=40, help="tokens after it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        engine = RealEngine(options.model, options.quantization)
        ttft = ttft_figures(engine, options.system, options.user, options.repeats)
        print(json.dumps({"ttft": ttft, "share": share_figures(engine, options.system // 2, 16, options.steps)}))
        return 0
    machinery = machinery_figures()
    passed = ["--model", options.model, "--quantization", options.quantization, "--system", str(options.system)]
    passed += ["--user", str(options.user), "--repeats", str(options.repeats), "--steps", str(options.steps)]
    figures = run_in_engine_process("prefix", passed)
    ttft, share = figures["ttft"], figures["share"]
    print(f"TTFT after a system prompt of {options.system} tokens and a message of {options.user}")
    for name, seconds in ttft["ttft_s"].items():
        lower = f"{ttft['lower'][name]:.2%} lower" if name in ttft["lower"] else f"goal {GOAL_LOWER:.0%} lower"
        print(f"  {name:10}{seconds:>9.3f} s   {ttft['cached_tokens'][name]:>6} cached   {lower}")
    print("machinery, us a block: " + ", ".join(f"{name[:-3]} {value:.2f}" for name, value in machinery.items()))
    print(f"share of a step: {share['of_prefill']:.3%} computing a prompt, {share['of_decode']:.3%} decoding")
    report = {
        "model": options.model,
        "quantization": options.quantization,
        "goal_lower": GOAL_LOWER,
        "machinery": machinery,
        **figures,
    }
    write_json(options.json, "prefix", report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
