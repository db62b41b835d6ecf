"""Every kernel of GPUs against its reference, on the device itself.

The references run on copies on the host. Tolerances are those of the tests under the interpreter, with the same
reasons; what moves bytes or integers must be equal, and drawn tokens but for one in many, where an exponential of the
device differs in its last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from chatd.bench.gpu.parts import Bench, Row, Rows
from chatd_kernels.copy_blocks import copy_blocks
from chatd_kernels.copy_blocks import reference as copy_reference
from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.linear import WeightFormat, linear, pack_linear
from chatd_kernels.linear import reference as linear_reference
from chatd_kernels.paged_attention import build_metadata, paged_attention
from chatd_kernels.paged_attention import reference as attention_reference
from chatd_kernels.paged_attention.batch import check_batch
from chatd_kernels.rms_norm import reference as norm_reference
from chatd_kernels.rms_norm import rms_norm
from chatd_kernels.rope_kv_write import reference as rope_reference
from chatd_kernels.rope_kv_write import rope_kv_write
from chatd_kernels.sampling import reference as sampling_reference
from chatd_kernels.sampling import sample_rows
from chatd_kernels.sampling.state import HAS_LOGPROBS, IS_GREEDY, SamplingState, allocate_sampling_state, pack_slot
from chatd_kernels.silu_mul import gelu_tanh_mul, silu_mul
from chatd_kernels.silu_mul import reference as gate_reference
from chatd_kernels.swap_blocks import load_blocks, store_blocks

HALF, BFLOAT, FLOAT, FP8, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
DTYPES = (HALF, BFLOAT, FLOAT)
_ONE_ULP = {HALF: 2**-10, BFLOAT: 2**-7, FLOAT: 3e-6}
_ATTENTION = {HALF: 3e-3, BFLOAT: 2.4e-2, FLOAT: 5e-6}
_CHUNKS = [(1, 0), (90, 89), (33, 30), (70, 40), (20, 20), (129, 128), (700, 699), (64, 0)]
"""(length, computed before) of sequences; a step computes the rest, at least one position."""


def check_rows(
    bench: Bench,
    dtypes: Sequence[torch.dtype] = DTYPES,
    chunks: Sequence[tuple[int, int]] = _CHUNKS,
    vocab_size: int = 20_011,
) -> Rows:
    """Yield a row for each check: the largest error, and what it may be.

    Args:
        bench: See there.
        dtypes: Of activations.
        chunks: Of the attention's batch.
        vocab_size: Of the logits that are drawn from.
    """
    device = bench.device
    torch.manual_seed(0)
    yield from _norms(device, dtypes)
    yield from _gates(device, dtypes)
    yield from _rotations(device, dtypes)
    yield from _attention(device, dtypes, chunks)
    yield from _products(device)
    yield from _copies(device)
    yield from _draws(device, dtypes, vocab_size)


def _row(kernel: str, dtype: torch.dtype, error: float, most: float) -> Row:
    name = str(dtype).removeprefix("torch.")
    return {"kernel": kernel, "dtype": name, "error": error, "at most": most, "ok": bool(error <= most)}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, each relative to its number or, below 1, absolute; infinite where something is NaN."""
    errors = (found.cpu().double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    return float(errors.nan_to_num(nan=float("inf")).max()) if errors.numel() else 0.0


def _poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _norms(device: torch.device, dtypes: Sequence[torch.dtype]) -> Rows:
    for dtype in dtypes:
        x, residual, weight = torch.randn(17, 4096).to(dtype), torch.randn(17, 4096).to(dtype), torch.randn(4096)
        here = residual.to(device, copy=True)
        out, expected = _poisoned(17, 4096, dtype=dtype, device=device), torch.empty_like(x)
        rms_norm(x.to(device), weight.to(device), 1e-5, out=out, residual=here)
        norm_reference.rms_norm(x, weight, 1e-5, expected, residual)
        yield _row(
            "rms_norm, residual", dtype, max(_relative(out, expected), _relative(here, residual)), _ONE_ULP[dtype]
        )


def _gates(device: torch.device, dtypes: Sequence[torch.dtype]) -> Rows:
    operations: tuple[tuple[Callable[..., object], Callable[..., object]], ...] = (
        (silu_mul, gate_reference.silu_mul),
        (gelu_tanh_mul, gate_reference.gelu_tanh_mul),
    )
    for operation, reference in operations:
        for dtype in dtypes:
            gate_up = torch.randn(17, 2 * 2048).to(dtype)
            out, expected = _poisoned(17, 2048, dtype=dtype, device=device), torch.empty(17, 2048, dtype=dtype)
            operation(gate_up.to(device), out)
            reference(gate_up, expected)
            yield _row(operation.__name__, dtype, _relative(out, expected), _ONE_ULP[dtype])


def _on_host(cache: KVCache) -> KVCache:
    return KVCache(cache.data.cpu(), cache.layout)


def _rotations(device: torch.device, dtypes: Sequence[torch.dtype]) -> Rows:
    angles = torch.arange(300)[:, None] / 10000 ** (torch.arange(0, 64, 2) / 64)
    cos, sin = angles.cos(), angles.sin()
    for dtype in dtypes:
        cache = allocate_kv_cache(3, 3, 2, 16, 64, dtype, device)
        expected_cache = _on_host(cache)
        qkv = torch.randn(20, 10 * 64).to(dtype)
        positions, slots = torch.randint(0, 300, (20,)), torch.randperm(48)[:20]
        q_norm, k_norm = torch.rand(64), torch.rand(64)
        out, expected = _poisoned(20, 6, 64, dtype=dtype, device=device), torch.empty(20, 6, 64, dtype=dtype)
        rope_kv_write(
            qkv.to(device),
            positions.to(device),
            slots.to(device),
            cos.to(device),
            sin.to(device),
            cache,
            1,
            q_out=out,
            q_norm=q_norm.to(device),
            k_norm=k_norm.to(device),
            eps=1e-6,
        )
        rope_reference.rope_kv_write(qkv, positions, slots, cos, sin, expected_cache, 1, expected, q_norm, k_norm, 1e-6)
        error = max(_relative(out, expected), _relative(cache.data, expected_cache.data))
        yield _row("rope_kv_write", dtype, error, _ONE_ULP[dtype])


def _attention(device: torch.device, dtypes: Sequence[torch.dtype], chunks: Sequence[tuple[int, int]]) -> Rows:
    for dtype, kv_dtype in (*((dtype, dtype) for dtype in dtypes), (BFLOAT, FP8), (BFLOAT, INT8)):
        counts = [-(-length // 16) for length, _ in chunks]
        host = allocate_kv_cache(sum(counts) + 2, 2, 2, 16, 64, kv_dtype, "cpu", key_group=1)
        # What no sequence owns is NaN.
        host.data.view(torch.uint8).fill_(0xFF)
        free = torch.randperm(host.num_blocks).tolist()
        tables = [[free.pop() for _ in range(count)] for count in counts]
        for (length, _), table in zip(chunks, tables, strict=True):
            for position in range(length):
                slot = table[position // 16] * 16 + position % 16
                host.write_slot(slot, 1, torch.randn(2, 64), torch.randn(2, 64))
        bounds = np.cumsum([0, *(max(1, length - seen) for length, seen in chunks)])
        seen = [min(seen, length - 1) for length, seen in chunks]
        q = torch.randn(int(bounds[-1]), 6, 64).to(dtype)
        expected = torch.empty(len(q), 6 * 64, dtype=torch.float64)
        cache = KVCache(host.data.to(device), host.layout)
        for window, soft_cap in ((None, None), (48, 20.0)):
            batch = check_batch(bounds.tolist(), seen, tables, 16)
            attention_reference.paged_attention(q, host, 1, batch, expected, 0.125, window, soft_cap)
            for is_deterministic in (False, True):
                metadata = build_metadata(
                    bounds,
                    seen,
                    tables,
                    layout=cache.layout,
                    num_q_heads=6,
                    device=device,
                    is_deterministic=is_deterministic,
                )
                out = _poisoned(len(q), 6 * 64, dtype=dtype, device=device)
                paged_attention(q.to(device), cache, 1, metadata, out, 0.125, window, soft_cap)
                name = "attention" + (", window, soft cap" if window else "")
                name += ", deterministic" if is_deterministic else ""
                # Outputs are means of values of size 1, so that errors are absolute.
                error = float((out.cpu().double() - expected).abs().nan_to_num(nan=float("inf")).max())
                yield _row(f"{name}, KV {str(kv_dtype).removeprefix('torch.')}", dtype, error, _ATTENTION[dtype])


def _products(device: torch.device) -> Rows:
    formats: tuple[tuple[torch.dtype, WeightFormat], ...] = (
        (HALF, "fp16"),
        (BFLOAT, "bf16"),
        (FLOAT, "fp32"),
        (BFLOAT, "int8"),
    )
    for dtype, weight_format in formats:
        for is_deterministic in (False, True):
            packed = pack_linear(
                torch.randn(130, 1056), None, weight_format, device=device, is_deterministic=is_deterministic
            )
            for num_rows in (1, 70):
                x = torch.randn(num_rows, 1056).to(dtype).to(device)
                out = _poisoned(num_rows, 130, dtype=FLOAT, device=device)
                expected = torch.empty(num_rows, 130, dtype=torch.float64, device=device)
                linear(x, packed, out)
                linear_reference.linear(x, packed, expected)
                name = f"linear, {weight_format}, {num_rows} rows{', deterministic' if is_deterministic else ''}"
                # Float32 sums of 1056 products of size 1.
                yield _row(name, dtype, _relative(out, expected.cpu()), 2e-4)


def _copies(device: torch.device) -> Rows:
    for dtype in (HALF, INT8):
        cache = allocate_kv_cache(9, 3, 2, 16, 80, dtype, device)
        cache.data.view(torch.uint8).random_(0, 256)
        expected = _on_host(cache)
        pairs = [(0, 3), (3, 4), (2, 2), (1, 0), (5, 6), (5, 7), (8, 7), (7, 5)]
        copy_blocks(cache, pairs)
        copy_reference.copy_blocks(expected, pairs)
        yield _row("copy_blocks", dtype, _different_bytes(cache.data, expected.data), 0.0)
        host = torch.zeros((4, *cache.layout.block_shape), dtype=cache.layout.storage_dtype)
        host = host.pin_memory() if device.type != "cpu" else host
        moves = [(3, 0), (4, 1), (8, 3)]
        store_blocks(cache, host, moves)
        errors = [_different_bytes(cache.data[block], host[slot]) for block, slot in moves]
        load_blocks(cache, host, [(block - 1, slot) for block, slot in moves])
        errors += [_different_bytes(cache.data[block - 1], host[slot]) for block, slot in moves]
        yield _row("store_blocks, load_blocks", dtype, max(errors), 0.0)


def _different_bytes(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().view(torch.uint8) != expected.cpu().view(torch.uint8)).sum())


def _draws(device: torch.device, dtypes: Sequence[torch.dtype], vocab_size: int) -> Rows:
    kinds: tuple[dict[str, Any], ...] = (
        {"flags": IS_GREEDY | HAS_LOGPROBS, "num_likeliest": 20},
        {"flags": 0, "temperature": 1.0},
        {"flags": 0, "temperature": 0.7, "top_p": 0.9},
        {"flags": 0, "temperature": 1.5, "top_k": 40, "min_p": 0.01},
        {"flags": 0, "temperature": 2.0, "top_k": 9000, "top_p": 0.95},
    )
    num_rows = 4 * len(kinds)
    for dtype in dtypes:
        state = allocate_sampling_state(vocab_size, num_rows, num_rows, device)
        state.row_slots.copy_(torch.arange(num_rows, dtype=torch.int32))
        slots = [pack_slot(seed=row, position=row, **kinds[row % len(kinds)]) for row in range(num_rows)]
        state.table.copy_(torch.from_numpy(np.stack(slots)))
        logits = (torch.randn(num_rows, vocab_size) * 2).to(dtype)
        expected = _state_on_host(state)
        sample_rows(logits.to(device), state, num_rows, num_likeliest=20)
        sampling_reference.sample_rows(logits, expected, num_rows)
        other = int((state.drawn.cpu() != expected.drawn).sum())
        other += int((state.likeliest.cpu() != expected.likeliest).sum())
        yield _row("sampling, other tokens", dtype, float(other), 1.0)
        yield _row("sampling, log probabilities", dtype, _relative(state.logprobs, expected.logprobs), 1e-5)
        sample_rows(logits.to(device), state, num_rows, is_plain=True)
        other = int((state.drawn[0].cpu() != logits.float().argmax(dim=1)).sum())
        yield _row("sampling, greedy, other tokens", dtype, float(other), 0.0)


def _state_on_host(state: SamplingState) -> SamplingState:
    return replace(state, **{field.name: getattr(state, field.name).cpu().clone() for field in fields(state)})
