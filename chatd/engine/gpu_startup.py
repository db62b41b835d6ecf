"""Start-up on a GPU: the pool takes the memory that weights, the largest step and the graphs leave.

```
weights → buffers → profiled steps, of the largest sizes and of every kind → pool → graphs → a trial step
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from chatd.engine.cgroup import MemoryRoom
from chatd.engine.cost_model import GPU_COST
from chatd.engine.decode_graphs import bucket_sizes
from chatd.engine.gpu_runner import GpuRunner
from chatd.engine.gpu_warm_up import trial_step, warm_up_steps
from chatd.engine.loaded_model import LoadedModel, Report
from chatd.engine.lower_tiers import allocate_host, open_lower_tiers
from chatd.engine.memory import size_gpu_pool, size_host
from chatd.engine.number_formats import NumberFormats, formats_for_gpu
from chatd.engine.options import EngineOptions
from chatd.engine.plan import Plan
from chatd.errors import ConfigError, EnvironmentProblem, ModelError
from chatd.models.decoder import Decoder
from chatd.models.loader import load_decoder
from chatd.models.model_config import load_decoder_config
from chatd_kernels.cpus import available_cpus
from chatd_kernels.gpu_device import OutOfDeviceMemory
from chatd_kernels.kv_cache import KVCache, KVCacheLayout, device_key_group
from chatd_kernels.stream import Stream

GRAPH_BYTES = 32 * 2**20
"""Taken for what a captured graph takes beside the buffers that all share: its nodes, and what the driver keeps."""

_MAX_LOADING_THREADS = 4
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def load_on_gpu(options: EngineOptions, stream: Stream, report: Report, room: Callable[[], MemoryRoom]) -> LoadedModel:
    """Load weights, profile a step, allocate the pool and capture graphs; see `startup.load_model`.

    Args:
        options: What to load, and how.
        stream: Of the GPU.
        report: Called with each phase and its progress from 0 to 1.
        room: Tells the memory of the host that is left.
    """
    config = load_decoder_config(Path(options.model_path))
    formats = formats_for_gpu(options, config.dtype, has_bfloat16=stream.has_bfloat16)
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {options.max_num_batched_tokens}, the least is {options.max_num_seqs}"
            " (max_num_seqs): each running request computes a row in a step",
            param="engine.max_num_batched_tokens",
        )
    with _told_by_cause(stream):
        decoder = load_decoder(
            Path(options.model_path),
            quantization=formats.weights,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            max_num_logits=options.max_num_seqs,
            device=stream.device,
            dtype=_DTYPES[formats.dtype],
            is_deterministic=options.deterministic,
            num_threads=min(_MAX_LOADING_THREADS, available_cpus()),
            progress=report,
        )
        # Threads have copied the weights, each in the order of its own.
        stream.synchronize()
        layout = _layout(decoder, options, formats)
        host_slots, _ = size_host(
            block_bytes=layout.block_bytes,
            host_memory_bytes=options.host_memory_bytes,
            needs_staging=options.disk_space_bytes > 0,
            room=room(),
        )
        host = allocate_host(host_slots, layout, is_pinned=stream.device.type == "cuda")
        # One block that every row of the profiled steps writes to.
        _bind_cache(decoder, layout, 1)
        runner = GpuRunner(
            decoder, stream, max_num_seqs=options.max_num_seqs, is_deterministic=options.deterministic, host=host
        )
        steps = warm_up_steps(
            options.max_num_batched_tokens, options.max_num_seqs, decoder.max_model_len, options.block_size
        )
        step_bytes = stream.peak_bytes(lambda: _run(runner, steps, partial(report, "profiling a step")))
        sizes = [] if options.enforce_eager else bucket_sizes(options.max_num_seqs)
        report("allocating the KV pool", 0.0)
        memory = stream.memory()
        pool = size_gpu_pool(
            block_bytes=layout.block_bytes,
            block_size=options.block_size,
            max_model_len=decoder.max_model_len,
            kv_memory_bytes=options.kv_memory_bytes,
            utilization=options.gpu_memory_utilization,
            total_bytes=memory.total,
            free_bytes=memory.free,
            step_bytes=step_bytes,
            graph_bytes=GRAPH_BYTES * len(sizes),
        )
        _bind_cache(decoder, layout, pool.num_blocks)
        if sizes:
            runner.capture(sizes, partial(report, "capturing graphs"))
        _run(runner, [trial_step(steps[-1], pool.num_blocks)], partial(report, "trying a step"))
    tiers = open_lower_tiers(options, decoder.kv_cache, host)
    stream.synchronize()
    notes = [*_describe(stream, formats, runner, options), *pool.notes, *tiers.notes]
    return LoadedModel(
        runner,
        decoder,
        pool,
        formats.weights,
        _kv_format(formats, options),
        notes,
        tiers,
        cost=GPU_COST,
        # Decodes take milliseconds: a pause of 50 would be seen.
        target_step_s=0.0,
        steps_in_flight=2,
    )


@contextmanager
def _told_by_cause(stream: Stream) -> Iterator[None]:
    """Say of memory that is not there how much there is and what mends it, and of sizes that kernels refuse which."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"the kernels of GPUs cannot run this model: {error}", code="model_unsupported") from error
    except OutOfDeviceMemory as error:
        memory = stream.memory()
        raise EnvironmentProblem(
            f"the model and its largest step do not fit on {stream.name}: {memory.free / 2**20:,.0f} of "
            f"{memory.total / 2**20:,.0f} MiB are free beside what was loaded",
            code="no_room_for_model",
            param="model.name",
            hint="use a smaller model, weights in 8 bits (--quantization int8), or smaller steps "
            "(--max-num-batched-tokens, --max-num-seqs)",
        ) from error


def _layout(decoder: Decoder, options: EngineOptions, formats: NumberFormats) -> KVCacheLayout:
    config = decoder.config
    return KVCacheLayout(
        config.num_layers,
        config.num_kv_heads,
        options.block_size,
        config.head_dim,
        _DTYPES[formats.kv_dtype],
        device_key_group(decoder.device),
    )


def _bind_cache(decoder: Decoder, layout: KVCacheLayout, num_blocks: int) -> None:
    shape = (num_blocks, *layout.block_shape)
    data = torch.zeros(shape, dtype=layout.storage_dtype, device=decoder.device)
    decoder.bind_kv_cache(KVCache(data, layout))


def _run(runner: GpuRunner, plans: Sequence[Plan], report: Callable[[float], None]) -> None:
    for number, plan in enumerate(plans):
        report(number / len(plans))
        runner.execute(plan)


def _kv_format(formats: NumberFormats, options: EngineOptions) -> str:
    """Name what the bits of a block depend on: two engines that name the same may read each other's."""
    computed = f"{formats.kv_dtype}/gpu/{formats.dtype}"
    return f"{computed}/deterministic" if options.deterministic else computed


def _describe(stream: Stream, formats: NumberFormats, runner: GpuRunner, options: EngineOptions) -> list[str]:
    """Return what a person at the terminal wants to know of the device and how it runs."""
    graphs = f"{runner.num_graphs} graphs of decode steps" if runner.num_graphs else "no graphs (enforce_eager)"
    kind = ", deterministic" if options.deterministic else ""
    return [f"runs on {stream.name} in {formats.dtype}, KV in {formats.kv_dtype}, {graphs}{kind}"]
