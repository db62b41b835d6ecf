"""What start-up on a GPU decides and says; the steps that it runs are left out where they would change nothing."""

import pytest
import torch

from chatd.engine import gpu_startup
from chatd.engine.gpu_warm_up import warm_up_steps
from chatd.engine.options import EngineOptions
from chatd.engine.startup import build_engine
from chatd.errors import ConfigError, EnvironmentProblem, ModelError
from chatd.testing.engine import FakeClock
from chatd_kernels.ahead_of_time import ARCHITECTURES, SHAPES, Architecture, ModelShape, choices
from chatd_kernels.gpu_device import INTERPRETED
from chatd_kernels.launch import Launch
from chatd_kernels.linear import gpu
from chatd_kernels.linear.gpu_pack import GpuWeight
from chatd_kernels.paged_attention import gpu_schedule
from chatd_kernels.stream import InterpretedStream

MIB = 2**20


@pytest.fixture
def start(llama, monkeypatch):
    """Start an engine whose steps are not run; return its core, what it said, and the phases that it told of."""
    monkeypatch.setattr(gpu_startup, "_run", lambda _runner, plans, report: report(0.0))
    monkeypatch.setattr(gpu_startup.GpuRunner, "capture", lambda _runner, sizes, report: report(1.0))

    monkeypatch.setattr(gpu_startup, "GRAPH_BYTES", MIB)

    def start_engine(memory_bytes=16 * MIB, **fields):
        phases = []
        options = EngineOptions(model_id="tiny", model_path=str(llama), model_digest="d", **fields)
        stream = InterpretedStream(memory_bytes)
        return *build_engine(options, FakeClock(), lambda phase, _: phases.append(phase), stream), phases

    return start_engine


def test_the_pool_takes_what_the_graphs_leave_of_the_part_that_may_be_used(start):
    core, ready, phases = start(dtype="float16", max_num_seqs=8, gpu_memory_utilization=0.5)
    block_bytes = 2 * 2 * 2 * 16 * 16 * 2
    assert ready.num_blocks == (8 - 4) * MIB // block_bytes
    assert core.config.num_blocks == ready.num_blocks
    assert phases[-1] == "trying a step"
    assert [phase for phase in dict.fromkeys(phases) if phase != "loading weights"] == [
        "profiling a step",
        "allocating the KV pool",
        "capturing graphs",
        "trying a step",
    ]
    assert core.config.steps_in_flight == 2


def test_what_runs_is_said_and_kept_apart_in_the_identity_of_kv(start):
    plain, ready, _ = start(dtype="float16", kv_dtype="fp8", quantization="int8", enforce_eager=True)
    assert ready.quantization == "int8"
    assert ready.notes[0] == ("runs on Triton's interpreter in float16, KV in fp8, no graphs (enforce_eager)")
    fixed, ready, _ = start(dtype="float16", kv_dtype="fp8", quantization="int8", deterministic=True)
    assert ready.notes[0].endswith(", deterministic")
    other, _, _ = start(dtype="bfloat16", kv_dtype="fp8", quantization="int8")
    formats = {core.config.namespace.kv_format for core in (plain, fixed, other)}
    assert formats == {"fp8/gpu/float16", "fp8/gpu/float16/deterministic", "fp8/gpu/bfloat16"}


def test_a_gpu_that_is_too_small_is_refused_with_the_numbers_and_what_mends_it(start):
    with pytest.raises(EnvironmentProblem, match="a context of 256 tokens needs 17 blocks") as caught:
        start(memory_bytes=MIB + 2**16, max_num_seqs=1)
    assert "1 MiB of the GPU's 1 MiB are free, steps and graphs take 1 MiB of them" in caught.value.message
    assert "--gpu-memory-utilization" in caught.value.hint


def test_memory_that_runs_out_while_loading_is_a_problem_of_the_machine(start, monkeypatch):
    def fail(*_args, **_fields):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_startup, "load_decoder", fail)
    with pytest.raises(EnvironmentProblem, match="do not fit on Triton's interpreter") as caught:
        start()
    assert caught.value.error_code == "no_room_for_model"


def test_what_the_kernels_refuse_is_said_of_the_model(start, monkeypatch):
    def fail(*_args, **_fields):
        raise ValueError("head dimension 512 is beyond 256")

    monkeypatch.setattr(gpu_startup, "GpuRunner", fail)
    with pytest.raises(ModelError, match="cannot run this model: head dimension 512 is beyond 256") as caught:
        start()
    assert caught.value.error_code == "model_unsupported"


def test_a_step_holds_a_row_of_each_request(start):
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 16, the least is 17"):
        start(max_num_seqs=17, max_num_batched_tokens=16)


def test_formats_that_do_not_go_together_are_refused_before_anything_is_loaded(start, monkeypatch):
    monkeypatch.setattr(gpu_startup, "load_decoder", None)
    with pytest.raises(ConfigError, match="kv_dtype is float16 and dtype bfloat16"):
        start(dtype="bfloat16", kv_dtype="float16")


SHAPE = ModelShape("tiny", 2, 64, 96, 4, 2, 16, 256)


def variant(launch):
    """What of a launch is compiled: the kernel, its constants (in capitals), and how."""
    constants = sorted((name, value) for name, value in launch.arguments.items() if name.isupper())
    return launch.kernel.fn.__name__, tuple(constants), tuple(launch.options.items())


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_every_kernel_is_compiled_before_it_serves(llama, monkeypatch, is_deterministic):
    """What may be chosen later is started at start-up: a compilation would hold everybody up for seconds."""
    monkeypatch.setattr(gpu_schedule, "_DECODE_POSITIONS", 32)
    monkeypatch.setattr(gpu_schedule, "_PREFILL_POSITIONS", 32)
    started = set()
    monkeypatch.setattr(Launch, "run", lambda launch: started.add(variant(launch)))
    monkeypatch.setattr(gpu_startup.GpuRunner, "capture", lambda _runner, sizes, report: report(1.0))
    options = EngineOptions(
        model_id="tiny",
        model_path=str(llama),
        model_digest="d",
        dtype="float16",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enforce_eager=True,
        deterministic=is_deterministic,
    )
    build_engine(options, FakeClock(), lambda *_: None, InterpretedStream(64 * MIB))
    architecture = Architecture(0, INTERPRETED, 0)
    half = torch.float16
    for choice in choices(SHAPE, half, half, architecture, is_deterministic=is_deterministic):
        if not choice.label.startswith("product"):
            assert variant(choice.launch) in started, choice.label


def edges(most):
    """Numbers of rows at which tiles of any size begin and end."""
    numbers = {around for edge in (1, 16, 32, 64, *range(128, most, 128)) for around in (edge, edge + 1)}
    return sorted(number for number in numbers | {most} if number <= most)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: f"sm_{architecture.capability}")
@pytest.mark.parametrize(("weights", "is_deterministic"), [("int8", False), ("int8", True), ("fp16", True)])
@pytest.mark.parametrize(
    ("most_rows", "most_seqs", "most_tokens"),
    [(2048, 256, 32768), (3000, 100, 32768), (512, 64, 32768), (8192, 64, 1000)],
)
def test_every_product_is_compiled_before_it_serves(
    shape, architecture, weights, is_deterministic, most_rows, most_seqs, most_tokens
):
    """Of models too large to be run here, whatever the number of rows, without graphs that would start some as well."""
    steps = [plan.chunks for plan in warm_up_steps(most_rows, most_seqs, most_tokens, 16)]
    rows_of_steps = {sum(chunk.num_tokens for chunk in chunks) for chunks in steps}
    draws_of_steps = {sum(chunk.sample is not None for chunk in chunks) for chunks in steps}
    meta, started, later = torch.device("meta"), set(), {}
    for name, size in shape.products.items():
        has_codes = weights == "int8"
        rows = torch.empty(size, dtype=torch.int8 if has_codes else torch.half, device=meta)
        scales = torch.empty(size[0], device=meta) if has_codes else None
        packed = GpuWeight(weights, size[1], size[0], rows, scales, None, is_deterministic)

        def variants(num_rows, packed=packed):
            x = torch.empty((num_rows, packed.in_features), dtype=torch.half, device=meta)
            out = torch.empty((num_rows, packed.out_features), dtype=torch.half, device=meta)
            return {variant(launch) for launch in gpu.launches(x, packed, out, facts=architecture.facts)}

        is_last = name == "logits"
        started.update(*map(variants, draws_of_steps if is_last else rows_of_steps))
        for number in edges(most_seqs if is_last else most_rows):
            later.update(dict.fromkeys(variants(number), (name, number)))
    assert not {key: later[key] for key in later.keys() - started}
