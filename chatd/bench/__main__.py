"""`python -m chatd.bench NAME …`: runs one benchmark; each is a module of this package that runs as a program."""

from __future__ import annotations

import runpy
import sys

BENCHMARKS = {
    "chat": "sessions of several turns against a real daemon",
    "step": "where the time of one decode step goes",
    "kernels": "kernels and linear layers, alone",
    "front": "deltas that the front carries on one core",
    "pool": "operations of the block pool and the prefix index",
    "tui": "how the terminal client feels while an answer streams",
    "report": "writes the tables of README and docs from docs/figures",
}


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names and return the exit code."""
    if not arguments or arguments[0] not in BENCHMARKS:
        print("usage: python -m chatd.bench NAME [--help]\n", file=sys.stderr)
        for name, what in BENCHMARKS.items():
            print(f"  {name:10} {what}", file=sys.stderr)
        return 2
    name = f"chatd.bench.{arguments[0]}"
    sys.argv = [f"python -m {name}", *arguments[1:]]
    runpy.run_module(name, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
