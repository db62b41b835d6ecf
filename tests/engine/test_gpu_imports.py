"""What a box with a GPU needs installed to compute, beside torch and Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "chatd.bench.__main__",
    "chatd.bench.gpu",
    "chatd.bench.gpu.script",
    "chatd.bench.resources",
    "chatd.engine.gpu_runner",
    "chatd.engine.gpu_startup",
    "chatd.engine.process",
    "chatd.engine.startup",
)


def test_the_way_to_a_gpu_needs_no_compiler_for_cpus_no_server_and_no_terminal() -> None:
    pytest.importorskip("triton")
    program = f"""
import sys
for name in ("numba", "llvmlite", "textual", "uvicorn"):
    sys.modules[name] = None
for name in {MODULES}:
    __import__(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
