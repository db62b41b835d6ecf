"""Every operation finds its launcher on each type of device, and every Triton kernel is reached from one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chatd_kernels
from chatd_kernels.dispatch import launcher

FOLDER = Path(chatd_kernels.__file__).parent
# Operation -> functions of its launchers' modules.
FUNCTIONS = {
    "copy_blocks": ["copy_blocks"],
    "paged_attention": ["paged_attention", "build_metadata"],
    "rms_norm": ["rms_norm"],
    "rope_kv_write": ["rope_kv_write"],
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


def test_what_has_no_launcher_says_so() -> None:
    with pytest.raises(NotImplementedError, match="linear has no kernel for device type 'cuda'"):
        launcher("linear", "cuda")
    with pytest.raises(NotImplementedError, match=r"rms_norm has no kernel for device type 'mps' \(known: cpu, cuda\)"):
        launcher("rms_norm", "mps")
