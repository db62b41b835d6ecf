"""Brings a model to the point where it can serve: weights, kernels, pool, one trial step. Reports each phase."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from chatd.config import cache_dir
from chatd.engine.cgroup import MemoryRoom, available_cpus, memory_room
from chatd.engine.core import EngineConfig, EngineCore, TenantLimits
from chatd.engine.decision_log import LogWriter
from chatd.engine.lower_tiers import LowerTiers, allocate_host, open_lower_tiers
from chatd.engine.mapped_memory import map_memory
from chatd.engine.memory import PoolSize, size_host, size_pool
from chatd.engine.messages import Ready
from chatd.engine.model_runner import ModelRunner
from chatd.engine.options import EngineOptions
from chatd.engine.plan import BlockId, Chunk, Plan, RequestId, SampleSpec
from chatd.engine.recording import RecordingCore
from chatd.engine.sampling import SamplingParams
from chatd.errors import EnvironmentProblem
from chatd.kvcache.prefix_index import Namespace
from chatd.models.decoder import Decoder
from chatd.models.loader import load_decoder
from chatd.models.model_config import load_generation_defaults
from chatd_kernels import runtime
from chatd_kernels.kv_cache import KVCache, KVCacheLayout

Report = Callable[[str, float], None]

LAYOUT_VERSION = 1
"""Of rotary arithmetic and block layout: KV of another version is not reused."""

_KV_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run steps.

    Attributes:
        runner: Executes plans.
        decoder: What it runs.
        pool: Size of the KV cache that is bound to the decoder.
        quantization: Weight format that runs.
        notes: For the person at the terminal.
        tiers: What is below the pool.
    """

    runner: ModelRunner
    decoder: Decoder
    pool: PoolSize
    quantization: str
    notes: list[str]
    tiers: LowerTiers


def build_engine(options: EngineOptions, clock: Callable[[], float], report: Report) -> tuple[EngineCore, Ready]:
    """Load a model and put the engine's core on it; return what to tell the front.

    Raises:
        StartupError: As `load_model`, or the options do not fit together, or the decision log cannot be written.
    """
    model = load_model(options, report)
    pool = model.pool
    config = EngineConfig(
        num_blocks=pool.num_blocks,
        namespace=Namespace(
            weights_digest=options.model_digest,
            weight_format=model.quantization,
            kv_format=options.kv_dtype,
            layout_version=LAYOUT_VERSION,
            adapter=None,
            tenant=None,
        ),
        max_model_len=pool.max_model_len,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_waiting=options.max_queued_requests,
        tenants={
            name: TenantLimits(share.weight, int(share.floor * pool.num_blocks))
            for name, share in options.tenants.items()
        },
        eos_token_ids=frozenset(load_generation_defaults(Path(options.model_path)).stop_token_ids),
        vocab_size=model.decoder.config.vocab_size,
        transfer_costs=model.tiers.costs,
        host_slots=0 if model.tiers.host is None else model.tiers.host.num_slots,
        digest_key=model.tiers.key,
    )
    notes = list(model.notes)
    if config.max_model_len < pool.max_model_len:
        notes.append(f"the tenants' floors leave contexts of {config.max_model_len:,} tokens")
    ready = Ready(
        num_blocks=pool.num_blocks,
        block_size=options.block_size,
        max_model_len=config.max_model_len,
        vocab_size=model.decoder.config.vocab_size,
        kv_bytes=pool.kv_bytes,
        quantization=model.quantization,
        notes=notes,
    )
    disk = model.tiers.disk
    if options.decision_log is None:
        return EngineCore(config, model.runner, clock, disk=disk), ready
    path, limit = Path(options.decision_log), options.decision_log_limit_bytes
    core = RecordingCore(
        config, model.runner, clock, disk=disk, make_writer=lambda header: LogWriter(path, header, limit)
    )
    return core, ready


def load_model(options: EngineOptions, report: Report, room: Callable[[], MemoryRoom] = memory_room) -> LoadedModel:
    """Load weights, compile what is not cached, allocate the pool, and run one step.

    Args:
        options: What to load, and how.
        report: Called with each phase and its progress from 0 to 1.
        room: Tells the memory that is left; asked once the weights are loaded.

    Raises:
        ModelError: The model's files do not fit together or cannot run.
        EnvironmentProblem: There is no room for the pool.
        ConfigError: `max_model_len` is beyond the model's context.
    """
    num_threads = options.num_threads or available_cpus()
    runtime.set_num_threads(num_threads)
    # Kernels come from the cache, or the compiler, while the weights come from the disk.
    runtime.set_cache_root(cache_dir())
    kernels = _KernelWarmUp()
    decoder = load_decoder(
        Path(options.model_path),
        quantization=options.quantization,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        num_threads=num_threads,
        progress=report,
    )
    kernels.wait(report)
    report("allocating the KV pool", 0.0)
    pool, num_slots = _bind_pool(decoder, options, room())
    cache = decoder.kv_cache
    host = allocate_host(num_slots, cache.layout, is_pinned=cache.data.is_cuda)
    runner = ModelRunner(decoder, host)
    report("trying a step", 0.0)
    _try_steps(runner, options)
    tiers = open_lower_tiers(options, cache, host)
    return LoadedModel(runner, decoder, pool, options.quantization, [*pool.notes, *tiers.notes], tiers)


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


def _bind_pool(decoder: Decoder, options: EngineOptions, room: MemoryRoom) -> tuple[PoolSize, int]:
    """Allocate the pool, and return its size and the slots that there is room for on the host."""
    config = decoder.config
    dtype = _KV_DTYPES[options.kv_dtype]
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
