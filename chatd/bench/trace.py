"""How much of a production trace the pool finds again: `python -m chatd.bench trace --data DIR`.

The trace names the content of each prompt by blocks of 512 tokens. One simulated token stands for 32 of them, and a
simulated block holds 16, so a block of the pool is a block of the trace: tables, index, pool, eviction and scheduler
are the engine's own. Its ids spell the trace's block ids, so equal content is found and nothing else. The runner
computes nothing; a step is a second, the time of 32 tokens at 31 ms, and every request ends at its trace's output
length and keeps no lease. What is seen is the pool and its eviction alone.

The ideal is what a cache without end would have found: for each prompt, the whole blocks that begin an earlier prompt.
"Plain LRU" is the same blocks in one list with the prefix touched first, as a cache that knows no trees keeps them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatd.bench.echo_runner import EchoRunner
from chatd.bench.record import write_json
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import Done, EngineMessage, LeaseId, Submit
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.prefix_index import Namespace

TRACE = "mooncake_conversation_trace.jsonl"
TRACE_BLOCK = 512
SCALE = 32
BLOCK = TRACE_BLOCK // SCALE
STEP_S = 1.0
POOL_SIZES = (1_500, 3_000, 6_000, 12_000, 25_000, 50_000, 100_000, 200_000)
_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)
_FIRST_PARTIAL_ID = 2**30


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of the trace; lengths in its own tokens."""

    arrival_s: float
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...]

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The ids of its whole blocks."""
        return self.hash_ids[: self.num_prompt // TRACE_BLOCK]


def load_trace(folder: Path, first: int | None = None) -> list[TraceRequest]:
    """Return the trace's requests, in the order of their arrival."""
    requests = []
    for line in (folder / TRACE).read_text().splitlines()[:first]:
        row = json.loads(line)
        requests.append(
            TraceRequest(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        )
    return requests


def ideal_hit_rate(requests: Iterable[TraceRequest]) -> float:
    """Return the share of prompt tokens that a cache without end would have found."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        found += TRACE_BLOCK * _leading(request.full_blocks, seen)
        total += request.num_prompt
        seen.update(request.full_blocks)
    return found / total


def plain_lru_hit_rate(requests: Iterable[TraceRequest], num_blocks: int) -> float:
    """Return the hit rate of one LRU list of so many blocks, all of it for prompts that have ended."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for request in requests:
        blocks = request.full_blocks
        found += TRACE_BLOCK * _leading(blocks, kept)
        total += request.num_prompt
        for block in blocks:
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return found / total


def _leading(blocks: Sequence[int], known: Iterable[int]) -> int:
    """Return how many of the first blocks are known, before the first that is not."""
    container: Any = known
    for place, block in enumerate(blocks):
        if block not in container:
            return place
    return len(blocks)


def simulated_ids(request: TraceRequest, number: int) -> list[int]:
    """Return the prompt in simulated tokens: the trace's ids spelled out, and a last partial block of its own."""
    ids: list[int] = []
    for block in request.full_blocks:
        ids += range(block * BLOCK, (block + 1) * BLOCK)
    rest = -(-(request.num_prompt % TRACE_BLOCK) // SCALE)
    if rest == BLOCK:
        rest -= 1  # It would be a whole block that the trace does not have.
    ids += [_FIRST_PARTIAL_ID + number] * rest
    return ids or [_FIRST_PARTIAL_ID + number]


class TraceRun:
    """Serves a trace with an engine core.

    Args:
        requests: In the order of their arrival.
        num_blocks: Of the pool, 512 tokens each.
    """

    def __init__(self, requests: Sequence[TraceRequest], num_blocks: int) -> None:
        self._requests = requests
        config = EngineConfig(
            num_blocks=num_blocks,
            namespace=_NAMESPACE,
            max_model_len=num_blocks * BLOCK,
            block_size=BLOCK,
            max_num_seqs=4096,
            max_num_batched_tokens=2**20,
            max_waiting=len(requests),
            target_step_s=1e9,
            waiting_interval_s=1e9,
        )
        self._core = EngineCore(config, EchoRunner(), lambda: 0.0)
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.num_failed = 0
        self.most_active = 0

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were emptied for something else."""
        return self._core.pool.num_evictions

    @property
    def num_preemptions(self) -> int:
        """Requests that lost their blocks."""
        return self._core.scheduler.num_preemptions

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found."""
        return self.cached_tokens / self.prompt_tokens

    def run(self) -> None:
        """Serve all requests."""
        now, number, core = 0.0, 0, self._core
        while number < len(self._requests) or core.has_work:
            while number < len(self._requests) and self._requests[number].arrival_s <= now:
                self._submit(number, now)
                number += 1
            self._see(core.step(now))
            self.most_active = max(self.most_active, core.pool.num_active)
            now += STEP_S

    def _submit(self, number: int, now: float) -> None:
        request = self._requests[number]
        params = SamplingParams(max_tokens=max(1, -(-request.num_output // SCALE)), ignore_eos=True)
        ids = simulated_ids(request, number)
        self._see(
            self._core.handle(
                Submit(RequestId(number), LeaseId(number), "trace", 0, ids, params, keep_lease=False), now
            )
        )

    def _see(self, said: Iterable[EngineMessage]) -> None:
        for message in said:
            if isinstance(message, Done):
                self.num_failed += bool(message.error_code)
                self.prompt_tokens += self._requests[message.request].num_prompt
                self.cached_tokens += message.num_cached_tokens * SCALE


def measure(requests: Sequence[TraceRequest], pool_sizes: Sequence[int]) -> dict[str, Any]:
    """Serve the trace with pools of each size."""
    rows = []
    for num_blocks in pool_sizes:
        run = TraceRun(requests, num_blocks)
        run.run()
        row = {
            "blocks": num_blocks,
            "tokens": num_blocks * TRACE_BLOCK,
            "hit_rate": run.hit_rate,
            "plain_lru": plain_lru_hit_rate(requests, num_blocks),
            "evictions": run.num_evictions,
            "preemptions": run.num_preemptions,
            "most_active": run.most_active,
            "failed": run.num_failed,
        }
        print(
            f"{num_blocks:>10,}{row['tokens'] / 1e6:>10.1f}{run.hit_rate:>12.1%}{row['plain_lru']:>12.1%}"
            f"{run.num_evictions:>12,}{run.num_preemptions:>10}{run.most_active:>10,}",
            flush=True,
        )
        rows.append(row)
    return {"trace": TRACE, "requests": len(requests), "ideal": ideal_hit_rate(requests), "pools": rows}


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench trace", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {TRACE}")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(POOL_SIZES), help="pool sizes")
    parser.add_argument("--first", type=int, help="only so many requests")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    requests = load_trace(options.data, options.first)
    print(f"{'blocks':>10}{'M tokens':>10}{'hit rate':>12}{'plain LRU':>12}{'evictions':>12}{'preempted':>10}", end="")
    print(f"{'active':>10}")
    figures = measure(requests, options.blocks)
    print(f"ideal {figures['ideal']:.1%}")
    write_json(options.json, "trace", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
