"""Takes the figures of docs anew: `python -m chatd.bench figures --data DIR`.

Runs each benchmark with the arguments that its table is made with, one after another, and makes tables and pictures
from what they wrote. None of them takes more than five minutes on a quiet machine of two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FIGURES = Path(__file__).parent.parent.parent / "docs" / "figures"

RUNS: dict[str, tuple[str, ...]] = {
    "chat": ("chat", "--repeat", "3"),
    "chat-neighbor": ("chat", "--neighbor"),
    "step": ("step",),
    "step-neighbor": ("step", "--neighbor"),
    "lengths": ("lengths", "--data", "DATA"),
    "memory": ("memory",),
    "waste": ("waste",),
    "trace": ("trace", "--data", "DATA"),
    "fork": ("fork",),
    "samples": (
        *("samples", "--questions", "DATA/mt_bench_questions.jsonl", "--first", "8", "--max-tokens", "96"),
        *("--samples", "2", "4", "6", "8"),
    ),
    "prefix": ("prefix",),
    "turn": ("turn",),
    "preemption": ("preemption",),
    "tiers": ("tiers",),
    "join": ("join",),
    "journal": ("journal",),
    "neighbor": ("neighbor",),
    "probe": ("probe",),
    "pool": ("pool",),
    "kernels": ("kernels",),
    "ahead": ("ahead",),
    "front": ("front",),
    "terminal": ("terminal",),
}
"""By the name of the JSON, the command; DATA stands for the folder with what is not in the repository."""


def command(name: str, data: Path | None, out: Path) -> list[str] | None:
    """Return the command that takes a figure, None where it needs data that there is not."""
    if any(argument.startswith("DATA") for argument in RUNS[name]) and data is None:
        return None
    arguments = [argument.replace("DATA", str(data)) for argument in RUNS[name]]
    return [sys.executable, "-m", "chatd.bench", *arguments, "--json", str(out / f"{name}.json")]


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; return the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench figures", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with MT-bench's questions and Mooncake's conversation trace")
    parser.add_argument("--out", type=Path, default=FIGURES, help="where the figures go (default: docs/figures)")
    parser.add_argument("--only", nargs="+", choices=RUNS, help="some of them")
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.only or RUNS:
        run = command(name, options.data, options.out)
        if run is None:
            print(f"== {name}: kept, it needs --data", flush=True)
            continue
        print(f"== {name}", flush=True)
        started = time.perf_counter()
        exit_code = subprocess.run(run, check=False).returncode
        failed += exit_code != 0
        print(f"== {name}: {time.perf_counter() - started:.0f} s, exit code {exit_code}\n", flush=True)
    if options.out.resolve() == FIGURES.resolve():
        failed += subprocess.run([sys.executable, "-m", "chatd.bench", "report"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
