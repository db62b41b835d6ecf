"""The cache's layout, its slots, and copies of blocks."""

from __future__ import annotations

import pytest
import torch

from chatd_kernels.copy_blocks import copy_blocks
from chatd_kernels.copy_blocks.reference import copy_blocks as reference
from chatd_kernels.kv_cache import KVCacheLayout, allocate_kv_cache


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_slot_holds_what_was_written_and_no_two_overlap(dtype: torch.dtype, block_size: int) -> None:
    cache = allocate_kv_cache(2, 2, 3, block_size, 32, dtype)
    for layer in range(2):
        for slot in range(2 * block_size):
            number = float(slot + 1000 * layer)
            cache.write_slot(slot, layer, torch.full((3, 32), number), torch.full((3, 32), -number))
    for layer in range(2):
        for slot in range(2 * block_size):
            key, value = cache.read_slot(slot, layer)
            assert bool((key == slot + 1000 * layer).all() & (value == -(slot + 1000 * layer)).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_slot_of_codes_holds_what_was_written_to_a_step_and_no_two_overlap(
    dtype: torch.dtype, block_size: int
) -> None:
    cache = allocate_kv_cache(2, 2, 3, block_size, 32, dtype, key_group=1)
    numbers = torch.randn(2, 2 * block_size, 2, 3, 32) * torch.logspace(-6, 6, 3)[:, None]
    numbers[:, :, :, 0, 1:] = 0
    for layer in range(2):
        for slot in range(2 * block_size):
            cache.write_slot(slot, layer, *numbers[layer, slot])
    for layer in range(2):
        for slot in range(2 * block_size):
            found, expected = torch.stack(cache.read_slot(slot, layer)), numbers[layer, slot]
            largest = expected.abs().amax(-1, keepdim=True)
            # Half a step: of 1/127 of the largest, or of 1/8 of the number, but at least 2^-9 of 448 of the largest.
            step = largest / 127 if dtype == torch.int8 else torch.maximum(expected.abs() / 8, largest * 2**-9 / 448)
            assert bool(((found - expected).abs() <= step * 0.501).all())


def test_each_layout_lays_the_keys_as_its_kernels_read_them() -> None:
    for key_group in (1, 16):
        cache = allocate_kv_cache(1, 1, 1, 32, 16, key_group=key_group)
        for slot in range(32):
            cache.write_slot(slot, 0, torch.full((1, 16), slot), torch.zeros(1, 16))
        keys = cache.data[0, 0, 0, 0].view(32 // key_group, 16, key_group)
        expected = torch.arange(32.0).half().view(32 // key_group, 1, key_group)
        assert torch.equal(keys, expected.expand_as(keys))


def test_a_block_is_one_contiguous_range() -> None:
    cache = allocate_kv_cache(5, 2, 3, 16, 32)
    assert cache.layout.block_bytes == 2 * 2 * 3 * 16 * 32 * 2
    assert cache.data.stride(0) == cache.layout.block_stride
    assert cache.data[3].is_contiguous()
    assert cache.data[3].data_ptr() - cache.data.data_ptr() == 3 * cache.layout.block_bytes


def test_blocks_are_copied_in_order() -> None:
    caches = [allocate_kv_cache(5, 2, 3, 16, 32) for _ in range(2)]
    content = torch.randn(caches[0].data.shape).half()
    for cache, copy in zip(caches, (copy_blocks, reference), strict=True):
        cache.data.copy_(content)
        copy(cache, [(0, 3), (3, 4), (2, 2), (1, 0)])
    assert torch.equal(caches[0].data, caches[1].data)
    assert torch.equal(caches[0].data[4], content[0])


@pytest.mark.parametrize("pair", [(0, 5), (-1, 0), (7, 7)])
def test_a_block_outside_the_cache_is_refused_before_any_copy(pair: tuple[int, int]) -> None:
    cache = allocate_kv_cache(5, 1, 1, 16, 16)
    cache.data[0] = 1
    with pytest.raises(ValueError, match="is not in the cache of 5 blocks"):
        copy_blocks(cache, [(0, 1), pair])
    assert not cache.data[1].any()


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "message"),
    [
        (8, 64, torch.float16, "block size 8"),
        (48, 64, torch.float16, "block size 48"),
        (16, 40, torch.float16, "head dimension 40"),
        (16, 64, torch.bfloat16, "KV dtype"),
        (16, 64, torch.int8, "KV dtype"),
    ],
)
def test_an_unsupported_layout_is_refused(block_size: int, head_dim: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheLayout(1, 1, block_size, head_dim, dtype)
    with pytest.raises(ValueError, match="key group 2"):
        KVCacheLayout(1, 1, 16, 16, torch.float16, 2)
    with pytest.raises(ValueError, match="0 blocks"):
        allocate_kv_cache(0, 1, 1, 16, 16)
