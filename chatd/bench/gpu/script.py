"""Which parts of the GPU's benchmark run, and what is printed and written of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from chatd.bench.gpu.attention import Heads, decode_rows, layout_rows, prefill_rows
from chatd.bench.gpu.checks import check_rows
from chatd.bench.gpu.engine import host_rows, prefix_rows
from chatd.bench.gpu.models import LLAMA_31_8B
from chatd.bench.gpu.parts import Bench, Outcome, Part, run_parts, table
from chatd.bench.gpu.peer import peer_rows
from chatd.bench.gpu.rates import copy_rows, product_rows
from chatd.bench.gpu.sampling import sampling_rows
from chatd.bench.gpu.steps import step_rows
from chatd.bench.record import write_json
from chatd_kernels.gpu_device import GpuStream, has_gpu

FP8 = torch.float8_e4m3fn
PARTS = (
    Part("checks", "Every kernel against its reference", 110.0, check_rows),
    Part("copies", "Copies on the device", 5.0, copy_rows),
    Part("products", "A product of an 8B model: torch's, deterministic, 8-bit weights", 20.0, product_rows),
    Part("steps", "A decode step of Qwen3-8B (random weights)", 40.0, step_rows),
    Part("host", "A decode step of the whole engine, Qwen3-8B", 30.0, host_rows),
    Part("decode", "Decode attention, one layer of an 8B model", 25.0, decode_rows),
    Part("prefill", "Prefill attention, one layer of an 8B model", 15.0, prefill_rows),
    Part("deterministic", "A deterministic decode step of Qwen3-8B", 35.0, partial(step_rows, is_deterministic=True)),
    Part("fp8-steps", "A decode step of Qwen3-8B, KV in FP8", 25.0, partial(step_rows, kv_dtype=FP8)),
    Part("fp8-decode", "Decode attention over FP8", 20.0, partial(decode_rows, heads=Heads(kv_dtype=FP8))),
    Part("peer", "Prompts that come at once, beside transformers' continuous batching", 60.0, peer_rows),
    Part("prefix", "Time to the first token behind a cached system prompt, Qwen3-8B", 15.0, prefix_rows),
    Part("layouts", "Decode attention by the cache's layout", 10.0, layout_rows),
    Part(
        "llama",
        "A decode step of Llama-3.1-8B (random weights)",
        25.0,
        partial(step_rows, name="Llama-3.1-8B", raw=LLAMA_31_8B),
    ),
    Part("sampling", "Drawing tokens, beside a sort", 40.0, sampling_rows),
)
"""In this order; seconds are estimates for an H100-class card with an empty kernel cache."""


def main(arguments: Sequence[str]) -> int:
    """Run what fits, print a table of each part at the end, and return 1 if a check or a part fails."""
    parser = argparse.ArgumentParser(
        prog="python -m chatd.bench gpu", description="What a GPU does: kernels checked and measured, in minutes."
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="a part starts only if its time fits (default 8)")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", help="these alone")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args(arguments)
    if not has_gpu():
        print("no GPU is visible to torch here", file=sys.stderr)
        return 2
    bench = Bench(GpuStream())
    card = bench.stream.name
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    outcomes: list[Outcome] = []
    for outcome in run_parts(parts, bench, options.minutes * 60.0, time.monotonic):
        outcomes.append(outcome)
        print(f"{outcome.part.name}: {_said(outcome)}", flush=True)
        if outcome.trace is not None:
            print(outcome.trace, file=sys.stderr, flush=True)
        # After each part, so that nothing is lost if a later one takes the process with it.
        write_json(options.json, "gpu", {"card": card, "torch": torch.__version__, "parts": _figures(outcomes)})
    for outcome in outcomes:
        print(f"\n{outcome.part.title} ({card}): {_said(outcome)}\n{table(outcome.rows)}")
    return 1 if any(outcome.error or not is_right(outcome) for outcome in outcomes) else 0


def is_right(outcome: Outcome) -> bool:
    """Return whether no check of a part failed."""
    return all(row.get("ok", True) for row in outcome.rows)


def _said(outcome: Outcome) -> str:
    if outcome.skipped is not None and not outcome.rows:
        return f"skipped, {outcome.skipped}"
    verdict = outcome.error or (outcome.skipped and f"without {outcome.skipped}")
    if not is_right(outcome):
        verdict = "WRONG RESULTS" if verdict is None else f"WRONG RESULTS, {verdict}"
    verdict = verdict or "done"
    return f"{verdict}, {outcome.seconds:.1f} s"


def _figures(outcomes: Sequence[Outcome]) -> dict[str, object]:
    return {
        outcome.part.name: {
            "seconds": outcome.seconds,
            "skipped": outcome.skipped,
            "error": outcome.error,
            "trace": outcome.trace,
            "rows": outcome.rows,
        }
        for outcome in outcomes
    }
