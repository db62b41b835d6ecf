"""Rotation and KV write of GPUs against the reference, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.rope_kv_write import reference

pytest.importorskip("triton")

from chatd_kernels.rope_kv_write import gpu

HALF, BFLOAT, FLOAT, FP8, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
HQ, HKV = 6, 2
# Numbers of size up to 8, computed in float32 and rounded once: a rounding may fall to either side.
ULP = {HALF: 2**-7, BFLOAT: 2**-4, FLOAT: 4e-6}


def tables(num_positions: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(num_positions)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
    return angles.cos(), angles.sin()


def make_cache(block_size: int, head_dim: int, dtype: torch.dtype) -> KVCache:
    cache = allocate_kv_cache(3, 3, HKV, block_size, head_dim, dtype, key_group=1)
    cache.data.fill_(3)
    return cache


def check(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    head_dim: int = 64,
    rotary: int = 64,
    block_size: int = 16,
    has_q_norm: bool = False,
    has_k_norm: bool = False,
    num_tokens: int = 7,
) -> None:
    cos, sin = tables(300, rotary)
    qkv = torch.randn(num_tokens, (HQ + 2 * HKV) * head_dim).to(dtype)
    positions, slots = torch.randint(0, 300, (num_tokens,)), torch.randperm(3 * block_size)[:num_tokens]
    if num_tokens > 3:
        slots[3] = -1
    q_norm = torch.randn(head_dim) if has_q_norm else None
    k_norm = torch.randn(head_dim).to(dtype) if has_k_norm else None
    caches = [make_cache(block_size, head_dim, kv_dtype) for _ in range(2)]
    outs = [torch.full((num_tokens, HQ, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    before = qkv.clone()
    gpu.rope_kv_write(qkv, positions, slots, cos, sin, caches[0], 2, outs[0], q_norm, k_norm, 1e-5)
    reference.rope_kv_write(qkv, positions, slots, cos, sin, caches[1], 2, outs[1], q_norm, k_norm, 1e-5)
    assert torch.equal(qkv, before)
    torch.testing.assert_close(outs[0], outs[1], atol=ULP[dtype], rtol=0)
    if not caches[0].layout.is_quantized:
        torch.testing.assert_close(caches[0].data, caches[1].data, atol=ULP[kv_dtype], rtol=0)
        return
    for slot in set(slots.tolist()) - {-1}:
        for found, expected in zip(caches[0].read_slot(slot, 2), caches[1].read_slot(slot, 2), strict=True):
            largest = expected.abs().amax(-1, keepdim=True)
            # A code may be rounded to either side: in FP8 a step is 1/8 to 1/16 of the number or 2^-9 of 448.
            step = largest / 127 if kv_dtype == INT8 else torch.maximum(found.abs() / 8, largest * 2**-9 / 448)
            assert bool(((found - expected).abs() <= step * 1.001).all())
            assert ((found - expected).abs() > step / 4).float().mean() < 0.03
    written = torch.zeros(3 * block_size, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    for slot in torch.nonzero(~written).flatten().tolist():
        assert torch.equal(caches[0].read_slot(slot, 2)[0], caches[1].read_slot(slot, 2)[0])
    assert torch.equal(caches[0].data[:, :2], caches[1].data[:, :2])


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
def test_rotation_and_write_are_those_of_the_reference(dtype: torch.dtype) -> None:
    check(dtype, dtype)
    check(dtype, dtype, head_dim=80, rotary=24, block_size=32, has_q_norm=True, has_k_norm=True)
    check(dtype, dtype, num_tokens=1, has_k_norm=True)
    check(dtype, dtype, num_tokens=0)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(HALF, INT8), (BFLOAT, FP8)])
def test_codes_and_scales_are_those_of_the_reference(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(dtype, kv_dtype)
    check(dtype, kv_dtype, head_dim=80, rotary=24, block_size=32, has_q_norm=True, has_k_norm=True)


@pytest.mark.night
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("kv_dtype", [None, FP8, INT8])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (64, 32), (80, 24), (96, 96), (128, 128), (256, 256)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_every_rotation_and_write_is_that_of_the_reference(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, block_size: int, head_dim: int, rotary: int, has_norms: bool
) -> None:
    check(
        dtype,
        kv_dtype or dtype,
        head_dim=head_dim,
        rotary=rotary,
        block_size=block_size,
        has_q_norm=has_norms,
        has_k_norm=has_norms,
        num_tokens=13,
    )


@pytest.mark.parametrize("kv_dtype", [FP8, INT8])
def test_zeros_and_what_is_not_finite_keep_what_they_are(kv_dtype: torch.dtype) -> None:
    cos, sin = tables(10, 64)
    cache = make_cache(16, 64, kv_dtype)
    qkv = torch.zeros(3, (HQ + 2 * HKV) * 64)
    qkv[1, -5] = float("nan")
    qkv[2, -5] = float("inf")
    out = torch.empty(3, HQ, 64)
    gpu.rope_kv_write(qkv, torch.arange(3), torch.arange(3), cos, sin, cache, 0, out)
    for slot in range(3):
        key, value = cache.read_slot(slot, 0)
        assert not key.any()
        assert not value[0].any()
        assert value[1].isnan().all() == (slot > 0)


def test_what_does_not_fit_is_refused() -> None:
    cos, sin = tables(10, 64)
    qkv, out, one = torch.zeros(1, (HQ + 2 * HKV) * 64), torch.empty(1, HQ, 64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="groups K by 16 positions, the kernels here by 1"):
        gpu.rope_kv_write(qkv, one, one, cos, sin, allocate_kv_cache(1, 1, HKV, 16, 64), 0, out)
    cache = make_cache(16, 64, HALF)
    with pytest.raises(ValueError, match="layer 3 is not in the cache"):
        gpu.rope_kv_write(qkv, one, one, cos, sin, cache, 3, out)
    with pytest.raises(ValueError, match="does not fit the cache's 64 or rotary 64"):
        gpu.rope_kv_write(qkv, one, one, cos, sin, cache, 0, torch.empty(1, HQ, 48))
    with pytest.raises(ValueError, match=r"k_norm is \(48,\)"):
        gpu.rope_kv_write(qkv, one, one, cos, sin, cache, 0, out, k_norm=torch.zeros(48))
