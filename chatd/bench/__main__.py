"""`python -m chatd.bench NAME …`: runs one benchmark; each is a module of this package with `main(arguments)`."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "step": "where the time of one decode step goes",
    "kernels": "kernels and linear layers, alone",
    "front": "deltas that the front carries on one core",
    "pool": "operations of the block pool and the prefix index",
}


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names and return its exit code."""
    if not arguments or arguments[0] not in BENCHMARKS:
        print("usage: python -m chatd.bench NAME [--help]\n", file=sys.stderr)
        for name, what in BENCHMARKS.items():
            print(f"  {name:10} {what}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"chatd.bench.{arguments[0]}")
    exit_code: int = module.main(arguments[1:])
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
