"""Start-up on the CPU: kernels are compiled while weights come from the disk, and the pool is mapped memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from chatd.config import cache_dir
from chatd.engine.cgroup import MemoryRoom
from chatd.engine.loaded_model import LoadedModel, Report
from chatd.engine.lower_tiers import allocate_host, open_lower_tiers
from chatd.engine.mapped_memory import map_memory
from chatd.engine.memory import PoolSize, size_host, size_pool
from chatd.engine.model_runner import ModelRunner
from chatd.engine.number_formats import NumberFormats, formats_for_cpu
from chatd.engine.options import EngineOptions
from chatd.engine.plan import BlockId, Chunk, Plan, RequestId, SampleSpec
from chatd.engine.sampling import SamplingParams
from chatd.errors import EnvironmentProblem
from chatd.models.decoder import Decoder
from chatd.models.loader import load_decoder
from chatd_kernels import runtime
from chatd_kernels.cpus import available_cpus
from chatd_kernels.kv_cache import KVCache, KVCacheLayout

_KV_DTYPES = {"float16": torch.float16, "float32": torch.float32}


def load_on_cpu(options: EngineOptions, report: Report, room: Callable[[], MemoryRoom]) -> LoadedModel:
    """Load weights, compile what is not cached, allocate the pool, and run one step; see `startup.load_model`."""
    formats = formats_for_cpu(options)
    num_threads = options.num_threads or available_cpus()
    runtime.set_num_threads(num_threads)
    # Kernels come from the cache, or the compiler, while the weights come from the disk.
    runtime.set_cache_root(cache_dir())
    kernels = _KernelWarmUp()
    decoder = load_decoder(
        Path(options.model_path),
        quantization=formats.weights,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        num_threads=num_threads,
        progress=report,
    )
    kernels.wait(report)
    report("allocating the KV pool", 0.0)
    pool, num_slots = _bind_pool(decoder, options, formats, room())
    cache = decoder.kv_cache
    host = allocate_host(num_slots, cache.layout, is_pinned=False)
    runner = ModelRunner(decoder, host)
    report("trying a step", 0.0)
    _try_steps(runner, options)
    tiers = open_lower_tiers(options, cache, host)
    return LoadedModel(
        runner, decoder, pool, formats.weights, formats.kv_dtype, notes=[*pool.notes, *tiers.notes], tiers=tiers
    )


class _KernelWarmUp:
    """Compiles the kernels, or loads them from the cache, on a thread that does not keep a failed start waiting."""

    def __init__(self) -> None:
        self._progress = 0.0
        self._done: Future[int] = Future()
        threading.Thread(target=self._run, name="compile kernels", daemon=True).start()

    def wait(self, report: Report) -> None:
        """Wait for the end, and raise what went wrong."""
        while True:
            report("compiling kernels", self._progress)
            with contextlib.suppress(TimeoutError):
                self._done.result(timeout=0.2)
                return

    def _run(self) -> None:
        try:
            self._done.set_result(runtime.warm_up(self._count))
        except BaseException as error:
            self._done.set_exception(error)

    def _count(self, name: str, done: int, total: int) -> None:
        self._progress = done / total


def _bind_pool(
    decoder: Decoder, options: EngineOptions, formats: NumberFormats, room: MemoryRoom
) -> tuple[PoolSize, int]:
    """Allocate the pool, and return its size and the slots that there is room for on the host."""
    config = decoder.config
    dtype = _KV_DTYPES[formats.kv_dtype]
    layout = KVCacheLayout(config.num_layers, config.num_kv_heads, options.block_size, config.head_dim, dtype)
    num_slots, room = size_host(
        block_bytes=layout.block_bytes,
        host_memory_bytes=options.host_memory_bytes,
        needs_staging=options.disk_space_bytes > 0,
        room=room,
    )
    pool = size_pool(
        block_bytes=layout.block_bytes,
        block_size=options.block_size,
        max_model_len=decoder.max_model_len,
        kv_memory_bytes=options.kv_memory_bytes,
        room=room,
    )
    try:
        memory = map_memory(pool.kv_bytes)
    except OSError as error:
        raise EnvironmentProblem(
            f"{pool.kv_bytes / 2**20:,.0f} MiB for the KV pool could not be allocated: {error}",
            code="no_room_for_pool",
            param="engine.kv_memory",
            hint="ask for less with --kv-memory",
        ) from error
    shape = (pool.num_blocks, *layout.block_shape)
    decoder.bind_kv_cache(KVCache(memory.view(layout.storage_dtype).view(shape), layout))
    return pool, num_slots


def _try_steps(runner: ModelRunner, options: EngineOptions) -> None:
    """Run a step of each kind in block 0, whose content no request has seen: the first turn pays for no first time."""
    sample = SampleSpec(SamplingParams(max_tokens=1), 0)
    block = [BlockId(0)]
    num_rows = min(options.block_size, options.max_num_batched_tokens)
    prefill = Chunk(RequestId(-1), 0, [0] * num_rows, block, sample)
    decode = Chunk(RequestId(-1), num_rows - 1, [0], block, sample)
    for chunk in (prefill, decode):
        runner.execute(Plan(-1, (chunk,), (), options.block_size))
