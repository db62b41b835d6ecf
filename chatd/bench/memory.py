"""What KV memory holds, paged and contiguous: `python -m chatd.bench memory`.

The same requests, the turns of recorded MT-bench conversations with their history as prompt, arrive faster than any of
the allocators can serve them. Each of four servers has the same memory and computes one token a step for each sequence
that it holds: three give a sequence one contiguous range (at the maximal length, at the next power of two of its final
length, or at exactly its final length, which no real server knows), the fourth is this project's scheduler on its
block pool. While requests wait, each slot at each step is one of:

    tokens        holds the KV of a token
    reserved      is kept for a token that its sequence will have later
    internal      is kept for a sequence and never used
    external      is kept for nobody, and still did not serve who waits

Nothing is shared between sequences here. Source: figure 2 of the PagedAttention paper, and the baselines in its
section 6.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatd.bench.contiguous import Allocator, Buddy, FirstFit
from chatd.bench.echo_runner import EchoRunner
from chatd.bench.lengths import LENGTHS, Turn, load_lengths
from chatd.bench.record import write_json
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import LeaseId, Submit
from chatd.engine.plan import Plan, RequestId
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.prefix_index import Namespace

KINDS = ("tokens", "reserved", "internal", "external")
_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)


@dataclass(frozen=True, slots=True)
class Work:
    """One request: it arrives at a step, with a prompt, and is answered with `num_output` tokens."""

    arrival: int
    num_prompt: int
    num_output: int

    @property
    def num_final(self) -> int:
        """Tokens whose KV is stored at the end: the last one drawn is never read."""
        return self.num_prompt + self.num_output - 1


@dataclass(slots=True)
class Usage:
    """Sums over steps; one row for each kind of slot."""

    num_slots: int
    steps: int = 0
    running: int = 0
    tokens: int = 0
    reserved: int = 0
    internal: int = 0

    def add(self, sequences: Iterator[tuple[int, int, int]]) -> None:
        """Count a step from (stored tokens, final tokens, allocated slots) of each sequence."""
        self.steps += 1
        for stored, final, allocated in sequences:
            self.running += 1
            self.tokens += stored
            self.reserved += min(final, allocated) - stored
            self.internal += max(0, allocated - final)

    def figures(self) -> dict[str, float]:
        """Return shares of all slots over all steps, and the mean number of sequences."""
        total = self.num_slots * self.steps
        held = {kind: getattr(self, kind) / total for kind in KINDS[:3]}
        return {**held, "external": 1 - sum(held.values()), "running": self.running / self.steps}


def workload(
    conversations: Sequence[Sequence[Turn]], rate: float, max_len: int, repeats: int, seed: int = 0
) -> list[Work]:
    """Return the turns of all conversations in random order, each with its history, as a Poisson process."""
    turns: list[tuple[int, int]] = []
    for conversation in conversations:
        history = 0
        for turn in conversation:
            num_prompt = history + turn.num_prompt
            if num_prompt < max_len:
                turns.append((num_prompt, min(turn.num_output, max_len - num_prompt)))
            history = num_prompt + turn.num_output
    rng = random.Random(seed)
    order = [turn for _ in range(repeats) for turn in rng.sample(turns, len(turns))]
    now, works = 0.0, []
    for num_prompt, num_output in order:
        now += rng.expovariate(rate)
        works.append(Work(int(now), num_prompt, max(1, num_output)))
    return works


def run_contiguous(allocator: Allocator, works: Sequence[Work]) -> Usage:
    """Serve first come first served from contiguous ranges, until the last request has arrived."""
    usage = Usage(allocator.num_slots)
    coming, waiting = deque(works), deque[Work]()
    running: list[tuple[Work, int, int]] = []
    for step in range(works[-1].arrival + 1):
        while coming and coming[0].arrival <= step:
            waiting.append(coming.popleft())
        while waiting and (start := allocator.allocate(waiting[0].num_final)) is not None:
            running.append((waiting.popleft(), start, step))
        if waiting:
            usage.add(
                (work.num_prompt + step - since, work.num_final, allocator.size_of(start))
                for work, start, since in running
            )
        going: list[tuple[Work, int, int]] = []
        for work, start, since in running:
            if step - since + 1 < work.num_output:
                going.append((work, start, since))
            else:
                allocator.free(start)
        running = going
    return usage


def run_paged(num_slots: int, block_size: int, max_len: int, works: Sequence[Work]) -> tuple[Usage, int]:
    """Serve the same with the engine's own scheduler and pool; return also how often a request was preempted."""
    config = EngineConfig(
        num_blocks=num_slots // block_size,
        namespace=_NAMESPACE,
        max_model_len=max_len,
        block_size=block_size,
        max_num_seqs=num_slots // block_size,
        max_num_batched_tokens=num_slots,
        max_waiting=len(works),
        target_step_s=1e9,  # A prompt is one step here, as for the other servers.
    )
    usage = Usage(num_slots)

    def count(plan: Plan) -> None:
        """Count slots as they are while the step runs: what ends with it still has them."""
        if core.scheduler.waiting:
            ends = {chunk.request_id: chunk.start + chunk.num_tokens for chunk in plan.chunks}
            usage.add(
                (
                    ends.get(request.request_id, request.num_computed_tokens),
                    works[request.request_id].num_final,
                    len(request.lease.table.block_ids) * block_size,
                )
                for request in core.scheduler.running
            )

    core = EngineCore(config, EchoRunner(count), lambda: 0.0)
    rng = random.Random(1)
    coming = deque(enumerate(works))
    for step in range(works[-1].arrival + 1):
        while coming and coming[0][1].arrival <= step:
            number, work = coming.popleft()
            ids = [rng.getrandbits(30) for _ in range(work.num_prompt)]
            params = SamplingParams(max_tokens=work.num_output, ignore_eos=True)
            core.handle(Submit(RequestId(number), LeaseId(number), "bench", 0, ids, params, keep_lease=False), step)
        core.step(step)
    return usage, core.scheduler.num_preemptions


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all servers."""
    lengths = load_lengths(options.lengths)
    works = workload(lengths.conversations, options.rate, options.max_len, options.repeats)
    servers: dict[str, Callable[[], tuple[Usage, int]]] = {
        "contiguous, maximal length": lambda: (
            run_contiguous(FirstFit(options.slots, fixed_size=options.max_len), works),
            0,
        ),
        "contiguous, power of two": lambda: (run_contiguous(Buddy(options.slots), works), 0),
        "contiguous, final length known": lambda: (run_contiguous(FirstFit(options.slots), works), 0),
        **{
            f"paged, blocks of {size}": lambda size=size: run_paged(options.slots, size, options.max_len, works)  # type: ignore[misc]
            for size in options.block_size
        },
    }
    rows = []
    for name, serve in servers.items():
        usage, num_preemptions = serve()
        rows.append({"server": name, **usage.figures(), "preemptions": num_preemptions, "steps": usage.steps})
    return {
        "slots": options.slots,
        "max_len": options.max_len,
        "requests": len(works),
        "mean_final": sum(work.num_final for work in works) / len(works),
        "rate": options.rate,
        "servers": rows,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m chatd.bench memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="what `lengths` has recorded")
    parser.add_argument("--slots", type=int, default=16384, help="tokens that the memory can hold; a power of two")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16])
    parser.add_argument("--rate", type=float, default=0.5, help="requests that arrive in a step")
    parser.add_argument("--repeats", type=int, default=10, help="how often each turn arrives")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    figures = measure(options)
    print(f"{figures['requests']} requests of {figures['mean_final']:.0f} tokens (mean), {options.slots} slots\n")
    print(f"{'':32}" + "".join(f"{kind:>10}" for kind in (*KINDS, "running")))
    for row in figures["servers"]:
        shares = "".join(f"{row[kind]:>10.1%}" for kind in KINDS)
        print(f"{row['server']:32}{shares}{row['running']:>10.1f}")
    write_json(options.json, "memory", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
