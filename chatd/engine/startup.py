"""Brings a model to the point where it can serve: weights, kernels, pool, one trial step. Reports each phase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chatd.engine.cgroup import MemoryRoom, memory_room
from chatd.engine.core import EngineConfig, EngineCore, TenantLimits
from chatd.engine.decision_log import LogWriter
from chatd.engine.loaded_model import LoadedModel as LoadedModel
from chatd.engine.loaded_model import Report
from chatd.engine.messages import Ready
from chatd.engine.options import EngineOptions
from chatd.engine.recording import RecordingCore
from chatd.errors import EnvironmentProblem
from chatd.kvcache.prefix_index import Namespace
from chatd.models.model_config import load_generation_defaults
from chatd_kernels.gpu_device import GpuStream, has_gpu
from chatd_kernels.stream import Stream

LAYOUT_VERSION = 1
"""Of rotary arithmetic and block layout: KV of another version is not reused."""


def build_engine(
    options: EngineOptions, clock: Callable[[], float], report: Report, stream: Stream | None = None
) -> tuple[EngineCore, Ready]:
    """Load a model and put the engine's core on it; return what to tell the front.

    Raises:
        StartupError: As `load_model`, or the options do not fit together, or the decision log cannot be written.
    """
    model = load_model(options, report, memory_room, stream)
    pool = model.pool
    config = EngineConfig(
        num_blocks=pool.num_blocks,
        namespace=Namespace(
            weights_digest=options.model_digest,
            weight_format=model.quantization,
            kv_format=model.kv_format,
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
        cost=model.cost,
        target_step_s=model.target_step_s,
        steps_in_flight=model.steps_in_flight,
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


def load_model(
    options: EngineOptions,
    report: Report,
    room: Callable[[], MemoryRoom] = memory_room,
    stream: Stream | None = None,
) -> LoadedModel:
    """Load weights, compile what is not cached, allocate the pool, and run one step, on the device that was asked for.

    Args:
        options: What to load, and how.
        report: Called with each phase and its progress from 0 to 1.
        room: Tells the memory of the host that is left; asked once the weights are loaded.
        stream: Stands in the place of a GPU's.

    Raises:
        ModelError: The model's files do not fit together or cannot run.
        EnvironmentProblem: There is no room for the pool, or no GPU.
        ConfigError: `max_model_len` is beyond the model's context, or number formats do not go with the device.
    """
    if stream is None and _runs_on_gpu(options):
        stream = GpuStream()
    # Each brings in the kernels of its device, and their compiler.
    if stream is not None:
        from chatd.engine.gpu_startup import load_on_gpu

        return load_on_gpu(options, stream, report, room)
    from chatd.engine.cpu_startup import load_on_cpu

    return load_on_cpu(options, report, room)


def _runs_on_gpu(options: EngineOptions) -> bool:
    if options.device == "cuda" and not has_gpu():
        raise EnvironmentProblem(
            "device is cuda, and torch finds no GPU here",
            code="no_gpu",
            param="engine.device",
            hint="check the driver and that this torch is built for the GPU (python -m torch.utils.collect_env), or"
            " serve from the CPU with --device cpu",
        )
    return options.device == "cuda" or (options.device == "auto" and has_gpu())
