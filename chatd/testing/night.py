"""Many seeded simulations, spread over processes: what `make night` runs, and how one of them is run again.

```
python -m chatd.testing.night                                            over two million steps of the engine
python -m chatd.testing.night --seeds 3 --steps 500 --session-seeds 10           fewer
python -m chatd.testing.night --shape 2 --hash constant --seed 17 --steps 1700   one run, in this process
python -m chatd.testing.night --session-seed 17 --actions 1000                   one run of sessions, likewise
```
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
from dataclasses import dataclass, replace
from typing import Literal

import xxhash

from chatd.testing.constant_hash import constant_hash
from chatd.testing.session_simulation import VERBS as SESSION_VERBS
from chatd.testing.session_simulation import simulate_sessions
from chatd.testing.simulation import SHAPES, VERBS, simulate

Ahead = Literal["", "late", "early"]
AHEAD: tuple[Ahead, ...] = ("", "late", "early")
HASHES = {"xxh3": xxhash.xxh3_128_digest, "constant": constant_hash}
STEPS = 1700
SEEDS = 60
ACTIONS = 1000
SESSION_SEEDS = 400


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: which of `SHAPES`, which hash, which seed, how many steps, and how steps overlap.

    Attributes:
        ahead: "" is one step at a time; "late" and "early" are one step ahead, on a device that is slow or fast.
    """

    shape: int
    hash_name: str
    seed: int
    num_steps: int
    ahead: Ahead = ""

    def __str__(self) -> str:
        ahead = f" --ahead {self.ahead}" if self.ahead else ""
        return f"--shape {self.shape} --hash {self.hash_name} --seed {self.seed} --steps {self.num_steps}{ahead}"


@dataclass(frozen=True, slots=True)
class SessionRun:
    """One simulation of sessions: which seed, how many actions."""

    seed: int
    num_actions: int

    def __str__(self) -> str:
        return f"--session-seed {self.seed} --actions {self.num_actions}"


def all_runs(num_seeds: int, num_steps: int) -> Iterator[Run]:
    """Yield as many seeds of every shape under every hash, two of three one step ahead."""
    for seed in range(num_seeds):
        for shape in range(len(SHAPES)):
            for hash_name in HASHES:
                yield Run(shape, hash_name, 10**6 + 1000 * shape + seed, num_steps, AHEAD[seed % len(AHEAD)])


def all_session_runs(num_seeds: int, num_actions: int) -> Iterator[SessionRun]:
    """Yield as many runs of sessions."""
    for seed in range(num_seeds):
        yield SessionRun(10**6 + seed, num_actions)


def simulate_run(run: Run | SessionRun) -> Counter[str]:
    """Run one and return what happened in it.

    Raises:
        AssertionError: What was wrong.
    """
    logging.disable(logging.CRITICAL)  # Failed steps are logged with their traceback, thousands of times.
    try:
        return _simulate_sessions(run) if isinstance(run, SessionRun) else _simulate_engine(run)
    finally:
        logging.disable(logging.NOTSET)


def _simulate_sessions(run: SessionRun) -> Counter[str]:
    blocks, events = (45, 60, 120)[run.seed % 3], (3, 40, 1000, 12)[run.seed % 4]
    return simulate_sessions(run.seed, run.num_actions, num_blocks=blocks, replay_events=events)


def _simulate_engine(run: Run) -> Counter[str]:
    shape = SHAPES[run.shape]
    if run.ahead:
        shape = replace(shape, steps_in_flight=2, is_eager=run.ahead == "early")
    simulation = simulate(run.seed, run.num_steps, shape=shape, hash_function=HASHES[run.hash_name])
    simulation.count_engine()
    return simulation.counts


def simulate_all(
    runs: Sequence[Run | SessionRun], num_processes: int
) -> tuple[Counter[str], list[tuple[Run | SessionRun, str]]]:
    """Run all, and return what happened, and each run that found something with what it found."""
    counts: Counter[str] = Counter()
    found: list[tuple[Run | SessionRun, str]] = []
    with ProcessPoolExecutor(num_processes) as pool:
        futures = {pool.submit(simulate_run, run): run for run in runs}
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                counts += future.result()
            else:
                found.append((futures[future], "".join(traceback.format_exception(error))))
    return counts, found


def describe(found: Sequence[tuple[Run | SessionRun, str]]) -> str:
    """Return what runs found, and how each is run again."""
    return "\n".join(f"{error}\nagain: python -m chatd.testing.night {run}\n" for run, error in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, print what happened, and return 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m chatd.testing.night", description="Simulate the engine at random.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each shape under each hash")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="at a time")
    parser.add_argument("--shape", type=int, help="with --seed: the shape of the one run")
    parser.add_argument("--hash", choices=HASHES, default="xxh3", help="likewise")
    parser.add_argument("--seed", type=int, help="run one simulation of the engine only")
    parser.add_argument("--ahead", choices=AHEAD, default="", help="likewise: one step ahead, late or early")
    parser.add_argument("--session-seeds", type=int, default=SESSION_SEEDS, help="of the simulation of sessions")
    parser.add_argument("--actions", type=int, default=ACTIONS, help="of each of those")
    parser.add_argument("--session-seed", type=int, help="run one simulation of sessions only")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        print(dict(simulate_run(Run(options.shape or 0, options.hash, options.seed, options.steps, options.ahead))))
        return 0
    if options.session_seed is not None:
        print(dict(simulate_run(SessionRun(options.session_seed, options.actions))))
        return 0
    runs: list[Run | SessionRun] = [*all_runs(options.seeds, options.steps)]
    runs += all_session_runs(options.session_seeds, options.actions)
    started = time.monotonic()
    counts, found = simulate_all(runs, options.processes)
    seconds = time.monotonic() - started
    print(describe(found))
    for name in sorted(counts):
        print(f"{counts[name]:10,}  {name}")
    print(
        f"{len(runs)} seeds, {counts['steps']:,} steps in {seconds:.0f} s with {options.processes} processes"
        f" ({counts['steps'] / seconds:,.0f} a second), {len(found)} found something"
    )
    verbs = [f"verb {verb}" for verb in VERBS] + [f"session {verb}" for verb in SESSION_VERBS]
    never = [verb for verb in verbs if not counts[verb]]
    if never:
        print(f"never happened: {', '.join(never)}")
    return int(bool(found or never))


if __name__ == "__main__":
    sys.exit(main())
