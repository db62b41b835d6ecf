"""Many seeded simulations, spread over processes: what `make night` runs, and how one of them is run again.

python -m chatd.testing.night                                    1,200 seeds, over two million steps
python -m chatd.testing.night --seeds 3 --steps 500              fewer
python -m chatd.testing.night --shape 2 --hash constant --seed 17 --steps 1700       one run, in this process
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import xxhash

from chatd.testing.simulation import SHAPES, VERBS, simulate
from chatd.testing.witness import constant_hash

HASHES = {"xxh3": xxhash.xxh3_128_digest, "constant": constant_hash}
STEPS = 1700
SEEDS = 60


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: which of `SHAPES`, which hash, which seed, how many steps."""

    shape: int
    hash_name: str
    seed: int
    num_steps: int

    def __str__(self) -> str:
        return f"--shape {self.shape} --hash {self.hash_name} --seed {self.seed} --steps {self.num_steps}"


def all_runs(num_seeds: int, num_steps: int) -> Iterator[Run]:
    """Yield as many seeds of every shape under every hash."""
    for seed in range(num_seeds):
        for shape in range(len(SHAPES)):
            for hash_name in HASHES:
                yield Run(shape, hash_name, 10**6 + 1000 * shape + seed, num_steps)


def simulate_run(run: Run) -> Counter[str]:
    """Run one and return what happened in it.

    Raises:
        AssertionError: What was wrong.
    """
    logging.disable(logging.CRITICAL)  # Failed steps are logged with their traceback, thousands of times.
    try:
        simulation = simulate(run.seed, run.num_steps, shape=SHAPES[run.shape], hash_function=HASHES[run.hash_name])
    finally:
        logging.disable(logging.NOTSET)
    counts, core = simulation.counts, simulation.core
    counts["preempted"] = core.scheduler.num_preemptions
    counts["joined"] = core.scheduler.joins.num_joins
    counts["swapped"] = core.scheduler.num_swapped
    counts["evicted"] = core.pool.num_evictions
    counts["from disk"] = 0 if simulation.disk is None else simulation.disk.num_loaded
    return counts


def simulate_all(runs: Sequence[Run], num_processes: int) -> tuple[Counter[str], list[tuple[Run, str]]]:
    """Run all, and return what happened, and each run that found something with what it found."""
    counts: Counter[str] = Counter()
    found: list[tuple[Run, str]] = []
    with ProcessPoolExecutor(num_processes) as pool:
        futures = {pool.submit(simulate_run, run): run for run in runs}
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                counts += future.result()
            else:
                found.append((futures[future], "".join(traceback.format_exception(error))))
    return counts, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, print what happened, and return 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m chatd.testing.night", description="Simulate the engine at random.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each shape under each hash")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="at a time")
    parser.add_argument("--shape", type=int, help="with --seed: the shape of the one run")
    parser.add_argument("--hash", choices=HASHES, default="xxh3", help="likewise")
    parser.add_argument("--seed", type=int, help="run one simulation only")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        print(dict(simulate_run(Run(options.shape or 0, options.hash, options.seed, options.steps))))
        return 0
    runs = list(all_runs(options.seeds, options.steps))
    started = time.monotonic()
    counts, found = simulate_all(runs, options.processes)
    seconds = time.monotonic() - started
    for run, error in found:
        print(f"{error}\nagain: python -m chatd.testing.night {run}\n")
    for name in sorted(counts):
        print(f"{counts[name]:10,}  {name}")
    print(
        f"{len(runs)} seeds, {counts['steps']:,} steps in {seconds:.0f} s with {options.processes} processes"
        f" ({counts['steps'] / seconds:,.0f} a second), {len(found)} found something"
    )
    never = [verb for verb in VERBS if not counts[f"verb {verb}"]]
    if never:
        print(f"never happened: {', '.join(never)}")
    return int(bool(found or never))


if __name__ == "__main__":
    sys.exit(main())
