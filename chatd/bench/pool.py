"""What the engine costs beside the model: `python -m chatd.bench pool`.

Prints microseconds per pool operation for pools of 1k to 1M blocks, and milliseconds of plan and commit for batches of
decodes. Times are the processor's: nothing here waits, and neighbors would be in the others.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chatd.bench.echo_runner import EchoRunner
from chatd.bench.record import write_json
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import LeaseId, Submit
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.block_table import BlockTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.prefix_index import Namespace, NamespaceId, PrefixIndex

POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
BATCH_SIZES = (16, 64, 256)
TENANTS = (1, 10, 1_000)
_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)
_REPEATS = 7


def best_us(work: Callable[[], int]) -> float:
    """Return the median over repeats of microseconds per operation; `work` returns how many it did."""
    times = []
    for _ in range(_REPEATS):
        started = time.process_time()
        number = work()
        times.append((time.process_time() - started) / number * 1e6)
    return round(statistics.median(times), 3)


def pool_figures(num_blocks: int) -> dict[str, float]:
    """Return microseconds per block of each operation on a pool of this size."""
    pool = BlockPool(num_blocks, PrefixIndex())
    kv = KVCacheManager(pool, 16, _NAMESPACE)
    gc.freeze()
    account = pool.account("acme")
    number = min(num_blocks // 2, 2000)
    figures: dict[str, float] = {}

    def allocate_and_free() -> int:
        for _ in range(number):
            taken = pool.allocate(account, 1)
            assert taken is not None
            pool.release(taken)
        return 2 * number

    figures["allocate or free an empty block"] = best_us(allocate_and_free)

    # Fill the pool with cached blocks, so that each allocation evicts and each release caches.
    table = kv.open_table("acme")
    ids = array("i", range(16 * (num_blocks - 1)))
    allocation = kv.allocate_slots(table, len(ids))
    assert allocation is not None
    gc.disable()
    started = time.process_time()
    kv.commit(allocation, len(ids), ids)
    figures["register a block"] = round((time.process_time() - started) / (num_blocks - 1) * 1e6, 3)
    kv.free(table)

    def find() -> int:
        return len(kv.get_computed_blocks(kv.open_table("acme"), ids[: 16 * number + 1]))

    def hold_and_release() -> int:
        found = kv.get_computed_blocks(kv.open_table("acme"), ids[: 16 * number + 1])
        started = time.process_time()
        pool.hold(found)
        pool.release(found)
        timed.append((time.process_time() - started) / (2 * len(found)) * 1e6)
        return len(found)

    figures["find a block"] = best_us(find)
    timed: list[float] = []
    best_us(hold_and_release)
    figures["hold or release a cached block"] = round(statistics.median(timed), 3)
    forked = kv.open_table("acme")
    held = kv.get_computed_blocks(forked, ids[: 32 * 1024])
    kept = kv.allocate_slots(forked, 16 * len(held), held)
    assert kept is not None

    def fork() -> int:
        forks.append(kv.fork(forked, 16 * len(held)))
        return len(held)

    forks: list[BlockTable] = []
    figures["fork a table"] = best_us(fork)
    for table in forks:
        kv.free(table)
    kv.free(forked)
    started = time.process_time()
    evicted = pool.allocate(account, number)
    assert evicted is not None
    figures["evict and allocate"] = round((time.process_time() - started) / number * 1e6, 3)
    gc.enable()
    gc.unfreeze()
    return figures


def tenant_figures(num_blocks: int, num_tenants: int, *, with_floors: bool) -> float:
    """Return microseconds of evicting a block and charging it to another tenant, where `num_tenants` have cached all.

    Each tenant has as many cached blocks as the others, and the one that allocates is one of them, so the order of who
    is most over its share changes with every block.
    """
    pool = BlockPool(num_blocks, PrefixIndex())
    each = num_blocks // num_tenants
    for number in range(num_tenants):
        account = pool.account(f"tenant-{number}", floor=each // 4 if with_floors else 0)
        taken = pool.allocate(account, each)
        assert taken is not None
        for block_id in taken:
            # A root each: what is evicted then is always the head of its owner's queue.
            pool.register(block_id, NamespaceId(number + 1), None, block_id.to_bytes(4, "little"))
        pool.release(taken)
    account = pool.accounts[0]
    assert pool.allocate(account, len(pool.empty)) is not None
    gc.collect()
    gc.freeze()
    gc.disable()
    number = min(num_blocks // 20, 1000)

    def evict() -> int:
        for _ in range(number):
            taken = pool.allocate(account, 1)
            assert taken is not None
        return number

    figure = best_us(evict)
    gc.enable()
    gc.unfreeze()
    return figure


def step_figures(batch_size: int, context: int, num_steps: int = 100) -> dict[str, float]:
    """Return milliseconds that plan, commit and messages take beside the runner, for a batch of decodes."""
    blocks_each = (context + num_steps + 64) // 16 + 2
    config = EngineConfig(
        num_blocks=batch_size * blocks_each,
        namespace=_NAMESPACE,
        max_model_len=context + num_steps + 64,
        max_num_seqs=batch_size,
        max_num_batched_tokens=batch_size * context,
    )
    core = EngineCore(config, EchoRunner(), time.perf_counter)
    params = SamplingParams(max_tokens=num_steps + 8)
    for number in range(batch_size):
        ids = [number + 1, *range(context - 1)]
        core.handle(Submit(RequestId(number), LeaseId(number), "acme", 0, ids, params), 0.0)
    core.step(0.0)
    assert all(request.is_decode for request in core.scheduler.running)
    gc.collect()
    gc.freeze()
    gc.disable()
    times = []
    for step in range(num_steps):
        started = time.process_time()
        core.step(float(step))
        times.append((time.process_time() - started) * 1e3)
    gc.enable()
    gc.unfreeze()
    return {"median": round(statistics.median(times), 4), "p90": round(sorted(times)[int(len(times) * 0.9)], 4)}


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m chatd.bench pool", description="what the engine costs beside the model"
    )
    parser.add_argument("--max-blocks", type=int, default=POOL_SIZES[-1])
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {}
    pools = {size: pool_figures(size) for size in POOL_SIZES if size <= options.max_blocks}
    report["pool_us"] = pools
    for tenants in TENANTS:
        for with_floors in (False, True):
            name = f"evict, {tenants:,} tenant{'s'[: tenants != 1]}{', with floors' * with_floors}"
            for size, figures in pools.items():
                if tenants * 20 <= size:
                    figures[name] = tenant_figures(size, tenants, with_floors=with_floors)
    names = list(dict.fromkeys(name for figures in pools.values() for name in figures))
    print(f"{'us per block':36s}" + "".join(f"{size:>12,}" for size in pools))
    for name in names:
        cells = (f"{figures[name]:12.3f}" if name in figures else f"{'':12}" for figures in pools.values())
        print(f"{name:36s}" + "".join(cells))
    steps = {f"{batch} x {context}": step_figures(batch, context) for batch in BATCH_SIZES for context in (512, 4096)}
    report["plan_commit_ms"] = steps
    print(f"\n{'plan + commit, ms':36s}{'median':>12s}{'p90':>12s}")
    for name, figures in steps.items():
        print(f"{name:36s}{figures['median']:12.3f}{figures['p90']:12.3f}")
    write_json(options.json, "pool", report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
