"""Every operation finds its launcher on each type of device, and every Triton kernel is reached from one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import chatd
import chatd_kernels
from chatd_kernels import dispatch
from chatd_kernels.copy_blocks import copy_blocks
from chatd_kernels.dispatch import launcher, use_backend
from chatd_kernels.kv_cache import allocate_kv_cache, device_key_group
from chatd_kernels.launch import Launch
from chatd_kernels.linear import linear, pack_linear
from chatd_kernels.paged_attention import build_metadata, paged_attention
from chatd_kernels.rms_norm import rms_norm
from chatd_kernels.rope_kv_write import rope_kv_write
from chatd_kernels.sampling import sample_rows
from chatd_kernels.sampling.state import allocate_sampling_state
from chatd_kernels.silu_mul import silu_mul
from chatd_kernels.testing import started_kernels

FOLDER = Path(chatd_kernels.__file__).parent
# Operation -> functions of its launchers' modules.
FUNCTIONS = {
    "copy_blocks": ["copy_blocks"],
    "linear": ["linear"],
    "paged_attention": ["paged_attention", "build_metadata"],
    "rms_norm": ["rms_norm"],
    "rope_kv_write": ["rope_kv_write"],
    "sampling": ["sample_rows"],
    "silu_mul": ["silu_mul", "gelu_tanh_mul"],
    "swap_blocks": ["load_blocks", "store_blocks"],
}


def test_every_operation_with_a_module_for_gpus_is_named_here() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/gpu.py")} == set(FUNCTIONS)


@pytest.mark.parametrize(("operation", "function"), [(o, f) for o, functions in FUNCTIONS.items() for f in functions])
def test_a_gpu_finds_its_launcher(operation: str, function: str) -> None:
    pytest.importorskip("triton")
    found = launcher(operation, "cuda", function)
    assert (found.__module__, found.__name__) == (f"chatd_kernels.{operation}.gpu", function)


def test_the_launchers_of_gpus_need_no_compiler_for_cpus() -> None:
    pytest.importorskip("triton")
    modules = [f"chatd_kernels.{operation}.gpu" for operation in FUNCTIONS]
    program = f"""
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
for name in {modules}:
    __import__(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_triton_kernel_is_called_by_nothing() -> None:
    jitted, named = set(), []
    for path in FOLDER.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                jitted.add(node.name)
            elif isinstance(node, ast.Name):
                named.append(node.id)
    assert jitted
    assert not jitted - set(named)


def test_one_module_names_the_cuda_of_torch() -> None:
    roots = (FOLDER, Path(chatd.__file__).parent)
    named = {
        path.name
        for root in roots
        for path in root.rglob("*.py")
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert named == {"gpu_device.py"}


def attend(num_tokens: int, seen: int) -> None:
    """Attention of one sequence in a small cache."""
    cache = allocate_kv_cache(64, 1, 1, 16, 32)
    metadata = build_metadata(
        [0, num_tokens], [seen], [list(range(64))], layout=cache.layout, num_q_heads=1, is_deterministic=num_tokens == 1
    )
    paged_attention(torch.zeros(num_tokens, 1, 32).half(), cache, 0, metadata, torch.zeros(num_tokens, 32).half(), 1.0)


def rotate() -> None:
    cache, index, angles = allocate_kv_cache(1, 1, 1, 16, 32), torch.zeros(1, dtype=torch.int64), torch.zeros(8, 16)
    rope_kv_write(torch.zeros(1, 96), index, index, angles, angles, cache, 0, q_out=torch.zeros(1, 1, 32))


def multiply() -> None:
    packed = pack_linear(torch.zeros(32, 2048), None, "int8")
    linear(torch.zeros(2, 2048), packed, torch.zeros(2, 32))


def sample(is_plain: bool) -> None:
    sample_rows(torch.zeros(1, 32), allocate_sampling_state(32, 1, 1, "cpu"), 1, is_plain=is_plain, num_likeliest=1)


# Operation -> calls of its function, by which all its kernels are started.
CALLS: dict[str, list[Callable[[], object]]] = {
    "copy_blocks": [lambda: copy_blocks(allocate_kv_cache(2, 1, 1, 16, 32), [(0, 1)])],
    "linear": [multiply],
    "paged_attention": [lambda: attend(1, 600), lambda: attend(100, 0)],
    "rms_norm": [lambda: rms_norm(torch.zeros(1, 16), torch.zeros(16), 1e-6, out=torch.zeros(1, 16))],
    "rope_kv_write": [rotate],
    "sampling": [lambda: sample(is_plain=False), lambda: sample(is_plain=True)],
    "silu_mul": [lambda: silu_mul(torch.zeros(1, 32), torch.zeros(1, 16))],
}


def test_the_dispatchers_table_reaches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    started = set()
    monkeypatch.setattr(Launch, "run", lambda launch: started.add(launch.kernel.fn.__name__))
    with use_backend("gpu"):
        for call in (call for calls in CALLS.values() for call in calls):
            call()
    assert started == started_kernels()


def test_what_has_no_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match=r"no kernels for device type 'mps' \(known: cpu, cuda\)"):
        launcher("rms_norm", "mps")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="rms_norm has no kernel for the backend 'cpu'"):
        launcher("rms_norm", "cpu", "a function that nobody asked for before")


def test_a_process_may_choose_the_backend_whatever_the_device_and_the_thread() -> None:
    pytest.importorskip("triton")

    def place() -> tuple[str, int]:
        return launcher("rms_norm", "cpu").__module__, device_key_group("cpu")

    with ThreadPoolExecutor(1) as pool:
        with use_backend("gpu"):
            with use_backend("cpu"):
                assert place() == ("chatd_kernels.rms_norm.cpu", 16)
            assert place() == pool.submit(place).result() == ("chatd_kernels.rms_norm.gpu", 1)
        with pytest.raises(ZeroDivisionError), use_backend("gpu"):
            _ = 1 / 0
        assert place() == pool.submit(place).result() == ("chatd_kernels.rms_norm.cpu", 16)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'tpu' is not one of cpu, gpu"), use_backend("tpu"):  # type: ignore[arg-type]
        pass
