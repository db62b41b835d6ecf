"""`python -m chatd.bench NAME …`: runs one benchmark; each is a module of this package with a `main(arguments)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

BENCHMARKS = {
    "chat": "sessions of several turns against a real daemon",
    "step": "where the time of one decode step goes",
    "kernels": "kernels and linear layers, alone",
    "resources": "registers and shared memory of the kernels for GPUs, compiled without one",
    "gpu": "what a GPU does: kernels checked and measured, in minutes",
    "front": "deltas that the front carries on one core",
    "pool": "operations of the block pool and the prefix index",
    "ahead": "how long a device stands still between two steps, with and without one step ahead",
    "lengths": "lengths of MT-bench conversations in the small model's tokens, for others to use",
    "memory": "what memory holds, paged and contiguous",
    "waste": "allocated slots that hold no token, over whole conversations",
    "trace": "how much of a production trace the pool finds again, by its size",
    "fork": "a fork of a long session, and what it shares",
    "prefix": "what finding prefixes costs, and what a cached system prompt saves",
    "samples": "what parallel samples and beams save by sharing",
    "turn": "the work of a turn, counted, by its history",
    "preemption": "swap against recompute, by block size and on a running engine",
    "tiers": "the next turn of a session, by where its KV is",
    "typeahead": "the time to the first token with what was typed computed before Enter",
    "probe": "whether the time to the first token tells what another tenant has cached",
    "join": "equal prompts at once, beside different ones",
    "journal": "what keeping conversations costs: commits, size, start, search, erasure",
    "neighbor": "what one tenant sees of another that floods",
    "terminal": "how the terminal client feels: stalls, keys, long conversations, pastes, other sizes",
    "load": "streams, idle sockets, cancels and lost connections for half an hour, and what is left over",
}
"""Each prints its figures, and writes them where `--json PATH` says."""

COMMANDS = {
    **BENCHMARKS,
    "figures": "takes all figures of README and docs anew",
    "report": "writes the tables and pictures of README and docs from docs/figures",
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names and return the exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        wanted = bool(arguments) and arguments[0] in ("-h", "--help")
        out = sys.stdout if wanted else sys.stderr
        print("usage: python -m chatd.bench NAME [--help] [--json PATH] …\n", file=out)
        for name, what in COMMANDS.items():
            print(f"  {name:10} {what}", file=out)
        return 0 if wanted else 2
    # Here and not above: one of them imports torch, another the terminal client.
    run: Callable[[Sequence[str]], int] = import_module(f"chatd.bench.{arguments[0]}").main
    return run(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
