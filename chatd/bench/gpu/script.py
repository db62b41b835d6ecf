"""Which parts of the GPU's benchmark run, and what is printed and written of them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
    """Run what fits, print a table of each part at the end, and return 1 if a check or a part fails (2: no GPU)."""
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
    card, end = bench.stream.name, time.monotonic() + options.minutes * 60.0
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    outcomes: list[Outcome] = []
    figures: dict[str, Any] = {"card": card, "torch": torch.__version__, "parts": {}}
    is_lost = False
    for outcome in run_parts(parts, bench, options.minutes * 60.0, time.monotonic):
        outcomes.append(outcome)
        print(f"{outcome.part.name}: {_said(outcome)}", flush=True)
        if outcome.trace is not None:
            print(outcome.trace, file=sys.stderr, flush=True)
        figures["parts"][outcome.part.name] = _figures(outcome)
        # After each part, so that nothing is lost if a later one takes the process with it.
        write_json(options.json, "gpu", figures)
        is_lost = outcome.error is not None and _is_lost(bench)
        if is_lost:
            break
    for outcome in outcomes:
        print(f"\n{outcome.part.title} ({card}): {_said(outcome)}\n{table(outcome.rows)}", flush=True)
    code = 1 if any(outcome.error or not is_right(outcome) for outcome in outcomes) else 0
    rest = [part.name for part in parts[len(outcomes) :]] if is_lost else []
    if rest:
        print("\nthe device answers this process no more; another one goes on", flush=True)
        _run_rest(rest, (end - time.monotonic()) / 60.0, options.json, figures)
    return code


def _is_lost(bench: Bench) -> bool:
    """Return whether the device fails whatever this process asks of it, as after an illegal access."""
    try:
        bench.stream.synchronize()
    except Exception:
        return True
    return False


def _run_rest(names: Sequence[str], minutes: float, path: Path | None, figures: dict[str, Any]) -> None:
    """Run these parts in a process of their own, and join their figures to those that there are."""
    command = [sys.executable, "-m", "chatd.bench", "gpu", "--minutes", f"{minutes:.2f}", "--only", *names]
    beside = None if path is None else path.with_name(f"{path.name}.rest")
    if beside is not None:
        command += ["--json", str(beside)]
    subprocess.run(command, check=False)
    if beside is not None and beside.exists():
        figures["parts"].update(json.loads(beside.read_text())["parts"])
        beside.unlink()
        write_json(path, "gpu", figures)


def is_right(outcome: Outcome) -> bool:
    """Return whether no check of a part failed."""
    return all(row.get("ok", True) for row in outcome.rows)


def _said(outcome: Outcome) -> str:
    if outcome.skipped is not None and not outcome.rows:
        return f"skipped, {outcome.skipped}"
    faults = [] if is_right(outcome) else ["WRONG RESULTS"]
    if outcome.error is not None:
        faults.append(outcome.error)
    if outcome.skipped is not None:
        faults.append(f"not whole ({outcome.skipped})")
    return f"{', '.join(faults) or 'done'}, {outcome.seconds:.1f} s"


def _figures(outcome: Outcome) -> dict[str, object]:
    return {
        "seconds": outcome.seconds,
        "skipped": outcome.skipped,
        "error": outcome.error,
        "trace": outcome.trace,
        "rows": outcome.rows,
    }
