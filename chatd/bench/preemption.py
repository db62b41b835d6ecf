"""Swap or recompute: `python -m chatd.bench preemption`.

On the real model and with the real copies. The crossing: what it takes to copy the blocks of a number of tokens out and
in, at each block size from 1 to 256, beside computing their KV again; to the host's memory, and to checked files. The
kernels take blocks of 16 and more, so smaller ones are copied as bytes of their size and recomputed at 16. The choice:
episodes of preemption on a running engine with what `auto` takes and with the other way forced, for the two kinds of
victims that there are. One that gives way for its slot keeps its blocks in the cache, so there is nothing to save; one
whose blocks are taken has lost them. The load: both kinds at once, in each mode.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chatd.bench.preemption_copies import crossing_figures
from chatd.bench.preemption_load import block_episodes, serve_load, slot_episodes
from chatd.bench.real_engine import run_in_engine_process
from chatd.bench.record import write_json
from chatd.bench.tables import crossing_block_size


def _episodes(options: argparse.Namespace) -> dict[str, Any]:
    model, quantization = options.model, options.quantization
    return {
        "for a slot": slot_episodes(model, quantization, 2 * options.victim, 7 * options.repeats),
        "for blocks": block_episodes(model, quantization, options.victim // 16, options.repeats),
    }


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "crossing": lambda o: crossing_figures(o.model, o.quantization, o.tokens, o.repeats),
    "episodes": _episodes,
    "load": lambda o: serve_load(o.model, o.quantization, num_writers=o.writers, repeats=o.repeats),
}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench preemption", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--tokens", type=int, default=1024, help="whose blocks are copied or computed again")
    parser.add_argument("--victim", type=int, default=2048, help="tokens of a victim, or of the pool that it fills")
    parser.add_argument("--writers", type=int, default=6, help="requests of the load that outgrow the pool")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        print(json.dumps(PARTS[options.in_child](options)))
        return 0
    passed = ["--model", options.model, "--quantization", options.quantization, "--tokens", str(options.tokens)]
    passed += ["--victim", str(options.victim), "--writers", str(options.writers), "--repeats", str(options.repeats)]
    figures: dict[str, Any] = {"model": options.model, "quantization": options.quantization}
    for part in PARTS:
        figures[part] = run_in_engine_process("preemption", passed, in_child=part)
    _show(figures)
    write_json(options.json, "preemption", figures)
    return 0


def _show(figures: dict[str, Any]) -> None:
    crossing = figures["crossing"]
    print(f"ms for {crossing['tokens']} tokens")
    print(f"{'block':>6}{'out':>9}{'in':>9}{'file out':>10}{'file in':>9}{'recompute':>11}")
    for row in crossing["sizes"]:
        cells = [row[name] * 1e3 for name in ("out_s", "in_s", "disk_out_s", "disk_in_s", "recompute_s")]
        print(
            f"{row['block_size']:>6}{cells[0]:>9.1f}{cells[1]:>9.1f}{cells[2]:>10.1f}{cells[3]:>9.1f}{cells[4]:>11.0f}"
        )
    for way in ("host", "disk"):
        print(
            f"swapping to the {way} beats recomputing from block size {crossing_block_size(crossing['sizes'], way)} on"
        )
    for kind, row in figures["episodes"].items():
        print(
            f"{kind}: auto {row['auto_s'] * 1e3:.0f} ms, {row['auto_move_s'] * 1e3:.0f} of them copies "
            f"({row['auto_swapped']} of {row['episodes']} swapped), {row['forced']} forced "
            f"{row['forced_s'] * 1e3:.0f} ms, {row['forced_move_s'] * 1e3:.0f} of them copies"
        )
    for row in figures["load"]:
        print("  ".join(f"{name} {value:.4g}" if name != "mode" else value for name, value in row.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
