"""How fast the CPU kernels are at SmolLM2-135M's sizes: `python -m chatd.bench kernels [--json PATH]`.

Prints attention in GFLOP/s and decode attention in ms a step, all 121 linear layers in ms a step beside FBGEMM's fp16
and torch's float32, the small operations in µs, and what compiled kernels cost at a start. Each figure is the best of
several runs: neighbors make it larger, never smaller.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Idle OpenMP threads must not spin; libgomp reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from chatd.bench.record import write_json
from chatd.config import cache_dir
from chatd_kernels import runtime
from chatd_kernels.copy_blocks import copy_blocks
from chatd_kernels.cpus import available_cpus
from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.linear import WeightFormat, linear, pack_linear
from chatd_kernels.paged_attention import build_metadata, paged_attention
from chatd_kernels.paged_attention.schedule import AttentionMetadata
from chatd_kernels.rms_norm import rms_norm
from chatd_kernels.rope_kv_write import rope_kv_write
from chatd_kernels.silu_mul import silu_mul

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY, BLOCK = 30, 576, 9, 3, 64, 1536, 49152, 16
LINEARS = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
"""(outputs, inputs) of a layer's four linear layers: QKV, output, gate and up, down."""
SHARED_TOKENS, CONTEXT_TOKENS = 460, 550

Figures = dict[str, Any]


def best_ms(work: Callable[[], object], seconds: float) -> float:
    """Milliseconds of the fastest run within about `seconds`, after one that does not count."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def paged(contexts: list[tuple[int, int]], shared_tokens: int, num_layers: int) -> tuple[KVCache, AttentionMetadata]:
    """A cache of random content and the metadata of sequences (computed, rows) that share their first whole blocks."""
    shared = shared_tokens // BLOCK
    counts = [-(-(computed + rows) // BLOCK) for computed, rows in contexts]
    cache = allocate_kv_cache(sum(counts) + shared, num_layers, KV_HEADS, BLOCK, HEAD_DIM)
    cache.data.uniform_(-1, 1)
    free = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    prefix = [free.pop() for _ in range(shared)]
    tables = [prefix[:count] + [free.pop() for _ in range(count - shared)] for count in counts]
    bounds = np.cumsum([0, *(rows for _, rows in contexts)])
    return cache, build_metadata(
        bounds, [computed for computed, _ in contexts], tables, layout=cache.layout, num_q_heads=HEADS
    )


def attention_figures(seconds: float) -> Figures:
    """GFLOP/s of one layer's attention of one sequence, by rows and context before them."""
    figures: Figures = {}
    for context in (512, 2048):
        for rows in (1, 4, 16, 64, 256):
            cache, metadata = paged([(context, rows)], 0, 1)
            q, out = torch.randn(rows, HEADS, HEAD_DIM), torch.empty(rows, HEADS * HEAD_DIM)
            ms = best_ms(partial(paged_attention, q, cache, 0, metadata, out, 0.125), seconds)
            flops = 4 * HEAD_DIM * HEADS * metadata.work
            figures[f"{rows}x{context}"] = round(flops / ms / 1e6, 1)
    return figures


def decode_figures(seconds: float) -> Figures:
    """Milliseconds of all layers' attention of one decode step, with and without a shared prefix, and of its plan."""
    figures: Figures = {}
    for batch in (1, 8, 16):
        for name, shared in (("private", 0), ("shared", SHARED_TOKENS)):
            contexts = [(CONTEXT_TOKENS - 1, 1)] * batch
            cache, metadata = paged(contexts, shared, LAYERS)
            q, out = torch.randn(batch, HEADS, HEAD_DIM), torch.empty(batch, HEADS * HEAD_DIM)

            def step(q: Any = q, c: Any = cache, m: Any = metadata, o: Any = out) -> None:
                for layer in range(LAYERS):
                    paged_attention(q, c, layer, m, o, 0.125)

            def plan(m: Any = metadata, c: Any = cache, b: int = batch) -> None:
                build_metadata(np.arange(b + 1), m.lengths - 1, m.block_tables, layout=c.layout, num_q_heads=HEADS)

            figures[f"{batch} {name}"] = {
                "attention_ms": round(best_ms(step, seconds), 2),
                "metadata_ms": round(best_ms(plan, seconds / 4), 3),
            }
    return figures


def linear_figures(batches: list[int], seconds: float) -> Figures:
    """Milliseconds of all 121 linear layers of one step, by format and batch."""
    figures: Figures = {}
    for name in ("fp16", "int8", "fp32", "FBGEMM fp16", "torch fp32"):
        figures[name] = {}
        for batch, work in zip(batches, _linear_steps(name, batches), strict=True):
            figures[name][str(batch)] = round(best_ms(work, seconds), 2)
    return figures


def _linear_steps(name: str, batches: list[int]) -> list[Callable[[], object]]:
    weights = [[torch.randn(shape) * 0.05 for shape in LINEARS] for _ in range(LAYERS)]
    weights.append([torch.randn(VOCABULARY, HIDDEN) * 0.05])
    packed: list[list[Any]]
    if name == "torch fp32":
        packed, call = weights, torch.nn.functional.linear
    elif name == "FBGEMM fp16":
        prepack = torch.ops.quantized.linear_prepack_fp16
        packed = [[prepack(weight, None) for weight in layer] for layer in weights]
        call = torch.ops.quantized.linear_dynamic_fp16
    else:
        formats: dict[str, WeightFormat] = {"fp16": "fp16", "int8": "int8", "fp32": "fp32"}
        packed = [[pack_linear(weight, None, formats[name]) for weight in layer] for layer in weights]
        call = None

    def step(batch: int) -> Callable[[], object]:
        inputs = {size: torch.randn(batch, size) for size in (HIDDEN, INTERMEDIATE)}
        outputs = {size: torch.empty(batch, size) for size, _ in (*LINEARS, (VOCABULARY, HIDDEN))}

        def work() -> None:
            for layer in packed:
                shapes = LINEARS if len(layer) > 1 else ((VOCABULARY, HIDDEN),)
                for weight, (size, inner) in zip(layer, shapes, strict=True):
                    if call is None:
                        linear(inputs[inner], weight, outputs[size])
                    else:
                        call(inputs[inner], weight)

        return work

    return [step(batch) for batch in batches]


def small_figures(seconds: float) -> Figures:
    """Microseconds of one call of each small operation, by rows."""
    figures: Figures = {}
    cache = allocate_kv_cache(64, 1, KV_HEADS, BLOCK, HEAD_DIM)
    cos, sin = torch.rand(2, 1024, HEAD_DIM // 2).unbind(0)
    for rows in (1, 16, 256):
        x, residual = torch.randn(rows, HIDDEN), torch.zeros(rows, HIDDEN)
        weight, out = torch.ones(HIDDEN), torch.empty(rows, HIDDEN)
        gate_up, activation = torch.randn(rows, 2 * INTERMEDIATE), torch.empty(rows, INTERMEDIATE)
        qkv, q = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM), torch.empty(rows, HEADS, HEAD_DIM)
        places = torch.arange(rows)
        calls: dict[str, Callable[[], object]] = {
            "rms_norm": partial(rms_norm, x, weight, 1e-5, out=out, residual=residual),
            "rope_kv_write": partial(rope_kv_write, qkv, places, places, cos, sin, cache, 0, q_out=q),
            "silu_mul": partial(silu_mul, gate_up, activation),
        }
        figures[str(rows)] = {name: round(best_ms(call, seconds / 2) * 1e3, 1) for name, call in calls.items()}
    whole = allocate_kv_cache(4, LAYERS, KV_HEADS, BLOCK, HEAD_DIM)
    figures["copy of one block"] = round(best_ms(partial(copy_blocks, whole, [(0, 1)]), seconds / 2) * 1e3, 1)
    return figures


def start_figures(is_cold: bool) -> Figures:
    """Seconds of a fresh process to import torch, to import the kernels, and to have all of them ready."""
    program = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); "
        "from chatd_kernels import runtime; from chatd.config import cache_dir; runtime.set_cache_root(cache_dir()); "
        "c = time.perf_counter(); n = runtime.warm_up(); d = time.perf_counter(); "
        "print(b - a, c - b, d - c, n)"
    )
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as empty:
        environments = {"cached": dict(os.environ)}
        if is_cold:
            environments["cold"] = {**os.environ, "XDG_CACHE_HOME": empty}
        for name, environment in environments.items():
            result = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
            )
            torch_s, import_s, ready_s, compiled = result.stdout.split()
            figures[name] = {
                "import_torch_s": round(float(torch_s), 2),
                "import_kernels_s": round(float(import_s), 2),
                "ready_s": round(float(ready_s), 2),
                "compiled": int(compiled),
            }
    return figures


def _print(title: str, figures: Figures) -> None:
    print(f"\n{title}")
    for name, value in figures.items():
        text = "  ".join(f"{key} {number}" for key, number in value.items()) if isinstance(value, dict) else value
        print(f"  {name:18} {text}")


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench kernels", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--threads", type=int, help="threads (default: as many as this process may use)")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure (default 0.3)")
    parser.add_argument("--cold", action="store_true", help="also measure a start that compiles everything")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,256", help="rows of the linear layers")
    options = parser.parse_args(arguments)
    runtime.set_cache_root(cache_dir())
    runtime.set_num_threads(options.threads or available_cpus())
    runtime.warm_up()
    batches = [int(batch) for batch in options.batches.split(",")]
    figures: Figures = {
        "threads": runtime.num_threads(),
        "attention_gflops": attention_figures(options.seconds),
        "decode": decode_figures(options.seconds),
        "linears_ms": linear_figures(batches, options.seconds),
        "small_us": small_figures(options.seconds),
        "start": start_figures(options.cold),
    }
    print(f"SmolLM2-135M's sizes, {figures['threads']} threads")
    _print("attention, one layer, GFLOP/s by rows x context", figures["attention_gflops"])
    _print(f"decode at {CONTEXT_TOKENS} tokens, {LAYERS} layers, by batch", figures["decode"])
    _print(f"all {4 * LAYERS + 1} linear layers, ms by batch", figures["linears_ms"])
    _print("small operations, µs a call by rows", figures["small_us"])
    _print("start of a process", figures["start"])
    write_json(options.json, "kernels", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
