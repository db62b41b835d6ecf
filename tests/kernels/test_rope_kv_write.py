"""Rotation against transformers' own, the write into slots, and what is refused."""

from __future__ import annotations

import pytest
import torch

from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.rope_kv_write import rope_kv_write
from chatd_kernels.rope_kv_write.reference import rope_kv_write as reference

HQ, HKV, D = 6, 2, 64


def tables(num_positions: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(num_positions)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
    return angles.cos(), angles.sin()


def filled(cache: KVCache, value: float) -> KVCache:
    cache.data.fill_(value)
    return cache


def test_rotation_matches_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = tables(50, D)
    qkv, positions = torch.randn(7, (HQ + 2 * HKV) * D), torch.tensor([0, 1, 49, 3, 3, 17, 20])
    q, k, v = qkv.view(7, HQ + 2 * HKV, D).split([HQ, HKV, HKV], dim=1)
    full_cos, full_sin = (torch.cat((t, t), dim=-1)[positions][None] for t in (cos, sin))
    q_expected, k_expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], full_cos, full_sin)
    cache = allocate_kv_cache(3, 2, HKV, 16, D, torch.float32)
    slots = torch.tensor([47, 0, 13, 16, 31, 5, 40])
    out = torch.full((7, HQ, D), float("nan"))
    rope_kv_write(qkv.clone(), positions, slots, cos, sin, cache, 1, q_out=out)
    # Two products and a sum of numbers of size 1; a fused multiply-add rounds once less.
    torch.testing.assert_close(out, q_expected[0].transpose(0, 1), atol=1e-6, rtol=0)
    for token, slot in enumerate(slots.tolist()):
        key, value = cache.read_slot(slot, 1)
        torch.testing.assert_close(key, k_expected[0, :, token], atol=1e-6, rtol=0)
        assert torch.equal(value, v[token])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (64, 32), (80, 24), (16, 16), (128, 128)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_every_layout_and_norm_matches_the_reference(
    dtype: torch.dtype, block_size: int, head_dim: int, rotary: int, has_norms: bool
) -> None:
    num_tokens = 13
    cos, sin = tables(300, rotary)
    qkv = torch.randn(num_tokens, (HQ + 2 * HKV) * head_dim)
    positions, slots = torch.randint(0, 300, (num_tokens,)), torch.randperm(2 * block_size)[:num_tokens]
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if has_norms else (None, None)
    caches = [filled(allocate_kv_cache(2, 3, HKV, block_size, head_dim, dtype), 7.0) for _ in range(2)]
    outs = [torch.full((num_tokens, HQ, head_dim), float("nan")) for _ in range(2)]
    q_norm, k_norm = norms
    rope_kv_write(
        qkv.clone(), positions, slots, cos, sin, caches[0], 2, q_out=outs[0], q_norm=q_norm, k_norm=k_norm, eps=1e-5
    )
    reference(qkv, positions, slots, cos, sin, caches[1], 2, outs[1], q_norm, k_norm, 1e-5)
    torch.testing.assert_close(outs[0], outs[1], atol=4e-6, rtol=0)
    # Half floats of size up to 8: an ulp is 2^-8, and a rounding may fall to either side.
    tolerance = 2**-8 if dtype == torch.float16 else 4e-6
    torch.testing.assert_close(caches[0].data, caches[1].data, atol=tolerance, rtol=0)


def test_other_slots_and_layers_are_left_alone() -> None:
    cos, sin = tables(10, D)
    cache = filled(allocate_kv_cache(2, 3, HKV, 16, D), 7.0)
    rope_kv_write(
        torch.randn(1, (HQ + 2 * HKV) * D), torch.tensor([3]), torch.tensor([21]), cos, sin, cache, 1,
        q_out=torch.empty(1, HQ, D),
    )  # fmt: skip
    for slot in set(range(32)) - {21}:
        key, value = cache.read_slot(slot, 1)
        assert bool((key == 7).all() & (value == 7).all())
    assert bool((cache.data[:, [0, 2]] == 7).all())


def test_a_token_does_not_depend_on_its_batch(threads: int) -> None:
    cos, sin = tables(100, D)
    qkv, positions, slots = torch.randn(90, (HQ + 2 * HKV) * D), torch.arange(90), torch.randperm(96)[:90]
    caches = [allocate_kv_cache(6, 1, HKV, 16, D) for _ in range(2)]
    whole, alone = torch.empty(90, HQ, D), torch.empty(90, HQ, D)
    rope_kv_write(qkv.clone(), positions, slots, cos, sin, caches[0], 0, q_out=whole)
    for i in range(90):
        part = slice(i, i + 1)
        rope_kv_write(qkv[part].clone(), positions[part], slots[part], cos, sin, caches[1], 0, q_out=alone[part])
    assert torch.equal(whole, alone)
    assert torch.equal(caches[0].data, caches[1].data)


@pytest.mark.parametrize(("position", "slot"), [(10, 0), (-1, 0), (0, 32), (0, -1)])
def test_a_position_or_slot_out_of_range_is_refused(position: int, slot: int) -> None:
    cos, sin = tables(10, D)
    cache = filled(allocate_kv_cache(2, 1, HKV, 16, D), 7.0)
    with pytest.raises(ValueError, match="1 of 1 tokens have a position or a slot out of range"):
        rope_kv_write(
            torch.randn(1, (HQ + 2 * HKV) * D), torch.tensor([position]), torch.tensor([slot]), cos, sin, cache, 0,
            q_out=torch.empty(1, HQ, D),
        )  # fmt: skip
    assert bool((cache.data == 7).all())
