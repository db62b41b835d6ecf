"""Which parts of the GPU's benchmark run, and what is printed and written of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from chatd.bench.gpu.attention import decode_rows, prefill_rows
from chatd.bench.gpu.checks import check_rows
from chatd.bench.gpu.copies import copy_rows, layout_rows
from chatd.bench.gpu.parts import Bench, Outcome, Part, run_parts, table
from chatd.bench.gpu.sampling import sampling_rows
from chatd.bench.record import write_json
from chatd_kernels.gpu_device import GpuStream, has_gpu

PARTS = (
    Part("checks", "Every kernel against its reference", 60.0, check_rows),
    Part("copies", "Copies on the device", 5.0, copy_rows),
    Part("decode", "Decode attention, one layer of an 8B model", 30.0, decode_rows),
    Part("prefill", "Prefill attention, one layer of an 8B model", 20.0, prefill_rows),
    Part("layouts", "Decode attention by the cache's layout", 15.0, layout_rows),
    Part("sampling", "Drawing tokens", 60.0, sampling_rows),
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
        # After each part, so that nothing is lost if a later one takes the process with it.
        write_json(options.json, "gpu", {"card": card, "torch": torch.__version__, "parts": _figures(outcomes)})
    for outcome in outcomes:
        print(f"\n{outcome.part.title} ({card}): {_said(outcome)}\n{table(outcome.rows)}")
    return 1 if any(outcome.error or not is_right(outcome) for outcome in outcomes) else 0


def is_right(outcome: Outcome) -> bool:
    """Return whether no check of a part failed."""
    return all(row.get("ok", True) for row in outcome.rows)


def _said(outcome: Outcome) -> str:
    if outcome.skipped is not None:
        return f"skipped, {outcome.skipped}"
    verdict = outcome.error or ("done" if is_right(outcome) else "WRONG RESULTS")
    return f"{verdict}, {outcome.seconds:.1f} s"


def _figures(outcomes: Sequence[Outcome]) -> dict[str, object]:
    return {
        outcome.part.name: {
            "seconds": outcome.seconds,
            "skipped": outcome.skipped,
            "error": outcome.error,
            "rows": outcome.rows,
        }
        for outcome in outcomes
    }
