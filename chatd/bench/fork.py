"""What a fork costs: `python -m chatd.bench fork`.

A session of 32k tokens is forked in the engine core, in the middle of a block, and each fork is gone on with: no KV is
copied by the fork, and one block by its first append. The copy itself is timed on a real KV cache of the small model.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chatd.bench.echo_runner import EchoRunner
from chatd.bench.real_engine import run_in_engine_process
from chatd.bench.record import write_json
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import Fork, LeaseId, Release, Submit
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.prefix_index import Namespace

GOAL_MS = 0.5
_BLOCK = 16
_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)


def fork_figures(num_tokens: int, repeats: int) -> dict[str, float]:
    """Return milliseconds of a fork at `num_tokens`, and what forks and their first appends take in blocks."""
    room = num_tokens + 1024
    config = EngineConfig(
        num_blocks=room // _BLOCK + 2 * repeats,
        namespace=_NAMESPACE,
        max_model_len=room,
        max_num_batched_tokens=room,
        target_step_s=1e9,
    )
    runner = EchoRunner()
    core = EngineCore(config, runner, time.perf_counter)
    rng = random.Random(0)
    ids = [rng.getrandbits(30) for _ in range(num_tokens + 100)]
    core.handle(Submit(RequestId(0), LeaseId(0), "bench", 0, ids, SamplingParams(max_tokens=1)), 0.0)
    core.step(0.0)
    own_blocks = core.pool.num_active
    gc.collect()
    gc.freeze()
    gc.disable()
    times = []
    for number in range(1, repeats + 1):
        fork = Fork(LeaseId(0), LeaseId(number), num_tokens)
        started = time.process_time()  # Of the processor: nothing here waits, and neighbors would be in the other.
        core.handle(fork, 0.0)
        times.append(1e3 * (time.process_time() - started))
    gc.enable()
    gc.unfreeze()
    forked_blocks = core.pool.num_active
    for number in range(1, repeats + 1):
        append = Submit(RequestId(number), LeaseId(number), "bench", num_tokens, [number], SamplingParams(max_tokens=1))
        core.handle(append, 0.0)
    while core.has_work:
        core.step(0.0)
    appended_blocks = core.pool.num_active
    num_held = sum(len(lease.table.block_ids) for lease in core.leases)
    for number in range(repeats + 1):
        core.handle(Release(LeaseId(number)), 0.0)
    assert core.pool.num_active == 0, "forks leave blocks behind"
    return {
        "tokens": num_tokens,
        "forks": repeats,
        "median_ms": statistics.median(times),
        "p95_ms": sorted(times)[int(0.95 * len(times))],
        "blocks_before": own_blocks,
        "blocks_after_forks": forked_blocks,
        "blocks_after_appends": appended_blocks,
        "blocks_without_sharing": num_held,
        "copies_per_append": runner.num_copies / repeats,
    }


def copy_figures(model: str) -> dict[str, float]:
    """Return microseconds of copying one block of the model's KV cache, and its size."""
    import torch

    from chatd.config import cache_dir
    from chatd.models.model_config import load_decoder_config
    from chatd.models.registry import resolve
    from chatd_kernels import runtime
    from chatd_kernels.copy_blocks import copy_blocks
    from chatd_kernels.kv_cache import allocate_kv_cache

    config = load_decoder_config(resolve(model).path)
    num_blocks = 512
    cache = allocate_kv_cache(num_blocks, config.num_layers, config.num_kv_heads, _BLOCK, config.head_dim)
    cache.data.fill_(1)
    runtime.set_cache_root(cache_dir())
    runtime.warm_up()
    rng = random.Random(0)
    times = []
    for _ in range(200):
        pair = tuple(rng.sample(range(num_blocks), 2))
        started = time.perf_counter()
        copy_blocks(cache, [(pair[0], pair[1])])
        times.append(1e6 * (time.perf_counter() - started))
    assert torch.isfinite(cache.data[:1].float()).all(), "a copy made nonsense"
    return {"block_bytes": cache.layout.block_bytes, "copy_us": statistics.median(times)}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench fork", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1031, 8199, 32775], help="at which to fork")
    parser.add_argument("--repeats", type=int, default=100, help="forks of each session")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        print(json.dumps(copy_figures(options.model)))
        return 0
    forks = [fork_figures(num_tokens, options.repeats) for num_tokens in options.tokens]
    copy = run_in_engine_process("fork", ["--model", options.model])
    print(f"{'tokens':>8}{'fork, ms':>12}{'p95':>8}{'copies':>8}{'blocks':>10}{'unshared':>10}   goal < {GOAL_MS} ms")
    for row in forks:
        print(
            f"{row['tokens']:>8,}{row['median_ms']:>12.3f}{row['p95_ms']:>8.3f}{row['copies_per_append']:>8.1f}"
            f"{row['blocks_after_appends']:>10,}{row['blocks_without_sharing']:>10,}"
        )
    print(f"copy of one block ({copy['block_bytes'] / 1024:.0f} KiB): {copy['copy_us']:.0f} us")
    write_json(options.json, "fork", {"goal_ms": GOAL_MS, "forks": forks, "copy": copy})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
