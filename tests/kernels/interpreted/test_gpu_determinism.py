"""A layer made of the GPU's operations in deterministic mode: its bits depend on a token's own sequence alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from chatd_kernels.dispatch import use_backend
from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.linear import WeightFormat, linear, pack_linear
from chatd_kernels.paged_attention import build_metadata, paged_attention
from chatd_kernels.rms_norm import rms_norm
from chatd_kernels.rope_kv_write import rope_kv_write
from chatd_kernels.silu_mul import silu_mul

pytest.importorskip("triton")

HALF, BFLOAT, FP8, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 96, 160, 4, 2, 32, 16

Chunk = tuple[int, int, int]  # sequence, first position, end


class Layer:
    """One decoder layer and a cache with room for every sequence's blocks, which lie mixed."""

    def __init__(self, weight_format: WeightFormat, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        def packed(out_features: int, in_features: int) -> object:
            weight = torch.randn(out_features, in_features) * in_features**-0.5
            return pack_linear(weight, None, weight_format, is_deterministic=True)

        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.norms = torch.rand(2, HIDDEN) + 0.5
        self.qkv = packed((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.output = packed(HIDDEN, HEADS * HEAD_DIM)
        self.gate_up = packed(2 * INTERMEDIATE, HIDDEN)
        self.down = packed(HIDDEN, INTERMEDIATE)
        angles = torch.rand(1024, HEAD_DIM // 2) * 6
        self.cos, self.sin = angles.cos(), angles.sin()

    def run(self, sequences: Sequence[torch.Tensor], steps: Sequence[Sequence[Chunk]]) -> list[torch.Tensor]:
        """What every token of every sequence comes out as, computed in these steps."""
        count = -(-max(map(len, sequences)) // BLOCK)
        cache = allocate_kv_cache(count * len(sequences), 1, KV_HEADS, BLOCK, HEAD_DIM, self.kv_dtype)
        tables = [list(range(which, count * len(sequences), len(sequences))) for which in range(len(sequences))]
        found = [torch.full_like(sequence, float("nan")) for sequence in sequences]
        for step in steps:
            x = torch.cat([sequences[which][first:end] for which, first, end in step])
            rows = self._step(x, step, cache, tables)
            for (which, first, end), part in zip(step, rows.split([e - f for _, f, e in step]), strict=True):
                found[which][first:end] = part
        return found

    def _step(
        self, x: torch.Tensor, step: Sequence[Chunk], cache: KVCache, tables: Sequence[list[int]]
    ) -> torch.Tensor:
        def rows(*size: int) -> torch.Tensor:
            return torch.full((len(x), *size), float("nan"), dtype=self.dtype)

        places = [(which, position) for which, first, end in step for position in range(first, end)]
        positions = torch.tensor([position for _, position in places])
        slots = torch.tensor([tables[which][p // BLOCK] * BLOCK + p % BLOCK for which, p in places])
        bounds = [0]
        for _, first, end in step:
            bounds.append(bounds[-1] + end - first)
        metadata = build_metadata(
            bounds,
            [first for _, first, _ in step],
            [tables[which] for which, _, _ in step],
            layout=cache.layout,
            num_q_heads=HEADS,
            is_deterministic=True,
        )
        residual, normed, delta, query = x.clone(), rows(HIDDEN), rows(HIDDEN), rows(HEADS, HEAD_DIM)
        rms_norm(residual, self.norms[0], 1e-5, out=normed)
        qkv = linear(normed, self.qkv, rows((HEADS + 2 * KV_HEADS) * HEAD_DIM))  # type: ignore[arg-type]
        rope_kv_write(qkv, positions, slots, self.cos, self.sin, cache, 0, q_out=query)
        attended = paged_attention(query, cache, 0, metadata, rows(HEADS * HEAD_DIM), HEAD_DIM**-0.5)
        linear(attended, self.output, delta)  # type: ignore[arg-type]
        rms_norm(delta, self.norms[1], 1e-5, out=normed, residual=residual)
        gate_up = linear(normed, self.gate_up, rows(2 * INTERMEDIATE))  # type: ignore[arg-type]
        linear(silu_mul(gate_up, rows(INTERMEDIATE)), self.down, delta)  # type: ignore[arg-type]
        return residual + delta


def random_steps(lengths: Sequence[int], chooser: random.Random) -> list[list[Chunk]]:
    """Steps that mix sequences, chunks and single tokens until all is computed."""
    done = [0] * len(lengths)
    steps = []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        step = []
        for which in chooser.sample(range(len(lengths)), len(lengths)):
            size = min(lengths[which] - done[which], chooser.choice([0, 1, 3, 40, 90]))
            if size:
                step.append((which, done[which], done[which] + size))
                done[which] += size
        if step:
            steps.append(step)
    return steps


def check(weight_format: WeightFormat, dtype: torch.dtype, kv_dtype: torch.dtype, lengths: list[int]) -> None:
    chooser = random.Random(0)
    with use_backend("gpu"):
        layer = Layer(weight_format, dtype, kv_dtype)
        sequences = [torch.randn(length, HIDDEN).to(dtype) for length in lengths]
        alone = [layer.run([sequence], [[(0, 0, len(sequence))]])[0] for sequence in sequences]
        assert all(found.isfinite().all() for found in alone)
        together = layer.run(sequences, random_steps(lengths, chooser))
        for which, (found, expected) in enumerate(zip(together, alone, strict=True)):
            assert torch.equal(found, expected), which


def test_a_token_depends_on_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatd_kernels.paged_attention.gpu_schedule.SEGMENT", 64)
    check("fp16", HALF, HALF, [100, 20, 1])


@pytest.mark.night
@pytest.mark.parametrize("kv_dtype", [None, FP8, INT8])
@pytest.mark.parametrize(("weight_format", "dtype"), [("fp16", HALF), ("bf16", BFLOAT), ("int8", HALF)])
def test_a_token_depends_on_its_sequence_alone_in_every_format(
    weight_format: WeightFormat, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    check(weight_format, dtype, kv_dtype or dtype, [600, 200, 33, 1])
