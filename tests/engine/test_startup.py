import pytest
import torch

from chatd.engine import cpu_startup, startup
from chatd.engine.cgroup import MemoryRoom
from chatd.engine.memory import RESERVE_BYTES
from chatd.engine.options import EngineOptions, TenantShare
from chatd.errors import ConfigError, EnvironmentProblem
from chatd.testing.engine import FakeClock
from chatd_kernels import runtime

MIB = 2**20


def options_for(folder, **fields):
    values = {"model_id": "tiny", "model_path": str(folder), "model_digest": "abc", "kv_memory_bytes": 8 * MIB}
    return EngineOptions(**(values | fields))


def quietly(_phase, _progress):
    pass


def test_the_pool_is_sized_once_the_weights_are_loaded(tiny_model):
    asked = []

    def room():
        asked.append(phases[-1])
        return MemoryRoom(10**9, RESERVE_BYTES + 2 * MIB)

    phases = []
    options = options_for(tiny_model, kv_memory_bytes=None)
    model = startup.load_model(options, lambda phase, _: phases.append(phase), room)
    assert asked == ["allocating the KV pool"]
    assert (
        model.pool.num_blocks
        == model.decoder.kv_cache.num_blocks
        == 2 * MIB // model.decoder.kv_cache.layout.block_bytes
    )


@pytest.mark.parametrize(("kv_dtype", "dtype"), [("float16", torch.float16), ("float32", torch.float32)])
def test_the_cache_has_the_format_that_was_asked_for_and_begins_empty(tiny_model, kv_dtype, dtype):
    model = startup.load_model(options_for(tiny_model, kv_dtype=kv_dtype, block_size=32), quietly)
    cache = model.decoder.kv_cache
    assert cache.data.dtype == dtype
    assert cache.layout.block_size == 32
    assert cache.data.is_contiguous()
    assert cache.data.numel() * cache.layout.element_bytes == model.pool.kv_bytes
    # The trial step has written to the first block only.
    assert not cache.data[1:].any()


def test_memory_that_the_system_refuses_is_a_problem_of_the_machine(tiny_model, monkeypatch):
    def refuse(_size):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(cpu_startup, "map_memory", refuse)
    with pytest.raises(EnvironmentProblem, match="8 MiB for the KV pool could not be allocated"):
        startup.load_model(options_for(tiny_model), quietly)


def test_a_kernel_that_does_not_compile_stops_the_start(tiny_model, monkeypatch):
    def fail(_progress):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(runtime, "warm_up", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        startup.load_model(options_for(tiny_model), quietly)


def test_the_core_gets_the_options_and_the_identity_of_its_kv(tiny_model):
    options = options_for(
        tiny_model,
        quantization="int8",
        max_model_len=512,
        max_num_seqs=3,
        max_num_batched_tokens=40,
        max_queued_requests=5,
        tenants={"acme": TenantShare(2.0, 0.5)},
    )
    core, ready = startup.build_engine(options, FakeClock(), quietly)
    config = core.config
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_waiting) == (3, 40, 5)
    assert (config.namespace.weights_digest, config.namespace.weight_format) == ("abc", "int8")
    assert config.tenants["acme"].weight == 2.0
    assert config.tenants["acme"].floor_blocks == ready.num_blocks // 2
    assert config.eos_token_ids == {2}
    assert (ready.max_model_len, ready.vocab_size, ready.quantization) == (512, 512, "int8")


def test_floors_that_leave_less_than_a_context_are_said(tiny_model):
    options = options_for(tiny_model, kv_memory_bytes=MIB // 2, tenants={"acme": TenantShare(1.0, 0.5)})
    _, ready = startup.build_engine(options, FakeClock(), quietly)
    assert ready.max_model_len < 1024
    assert ready.notes[-1] == f"the tenants' floors leave contexts of {ready.max_model_len:,} tokens"


def test_a_gpu_that_is_not_there_is_a_problem_of_the_machine(tiny_model, monkeypatch):
    monkeypatch.setattr(startup, "has_gpu", lambda: False)
    with pytest.raises(EnvironmentProblem, match="device is cuda, and torch finds no GPU here") as caught:
        startup.load_model(options_for(tiny_model, device="cuda"), quietly)
    assert caught.value.error_code == "no_gpu"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_is_taken_where_there_is_one(tiny_model, monkeypatch, device):
    class TakenError(Exception):
        pass

    def take():
        raise TakenError

    monkeypatch.setattr(startup, "has_gpu", lambda: True)
    monkeypatch.setattr(startup, "GpuStream", take)
    with pytest.raises(TakenError):
        startup.load_model(options_for(tiny_model, device=device), quietly)


def test_what_the_cpu_cannot_do_is_refused_before_anything_is_loaded(tiny_model):
    with pytest.raises(ConfigError, match="kv_dtype is int8"):
        startup.load_model(options_for(tiny_model, kv_dtype="int8", device="cpu"), quietly)
