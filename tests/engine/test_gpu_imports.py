"""What a box with a GPU needs installed to compute, beside torch and Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

BENCHMARK = ("chatd.bench.__main__", "chatd.bench.gpu", "chatd.bench.gpu.script")
ENGINE = (
    "chatd.bench.resources",
    "chatd.engine.gpu_runner",
    "chatd.engine.gpu_startup",
    "chatd.engine.process",
    "chatd.engine.startup",
)


COMPILER, SERVER, TERMINAL = ("numba", "llvmlite"), ("uvicorn",), ("textual",)
REST = ("gguf", "prometheus_client", "psutil", "pydantic_settings", "starlette", "structlog", "websockets")
"""What the daemon needs beside those and what `docs/gpu.md` says that the benchmark needs."""


@pytest.mark.parametrize(
    ("modules", "missing"),
    [(ENGINE, (*COMPILER, *SERVER, *TERMINAL)), (BENCHMARK, (*COMPILER, *SERVER, *TERMINAL, *REST))],
    ids=["the engine", "the benchmark"],
)
def test_the_way_to_a_gpu_needs_no_compiler_for_cpus_no_server_and_no_terminal(
    modules: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    pytest.importorskip("triton")
    program = f"""
import sys
for name in {missing}:
    sys.modules[name] = None
for name in {modules}:
    __import__(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
