"""Copies and moves of blocks on GPUs against their references, bit for bit, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from chatd_kernels.copy_blocks import reference as copy_reference
from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.swap_blocks import reference as swap_reference

pytest.importorskip("triton")

from chatd_kernels.copy_blocks import gpu as copy_gpu
from chatd_kernels.swap_blocks import gpu as swap_gpu

KV_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]


def make(kv_dtype: torch.dtype, block_size: int = 16, head_dim: int = 80) -> KVCache:
    """A cache of random bytes, NaN among them, whose blocks are no whole number of a program's words."""
    cache = allocate_kv_cache(9, 3, 2, block_size, head_dim, kv_dtype, key_group=1)
    cache.data.view(torch.uint8).random_(0, 256)
    return cache


def copy_of(cache: KVCache) -> KVCache:
    return KVCache(cache.data.clone(), cache.layout)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


CHAIN = [(0, 3), (3, 4), (2, 2), (1, 0), (5, 6), (5, 7), (8, 7), (7, 5)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_are_copied_in_order(kv_dtype: torch.dtype) -> None:
    cache = make(kv_dtype)
    expected = copy_of(cache)
    for pairs in ([], [(4, 4)], CHAIN):
        copy_gpu.copy_blocks(cache, pairs)
        copy_reference.copy_blocks(expected, pairs)
        assert same_bits(cache.data, expected.data)


def test_a_block_outside_is_refused_before_any_copy() -> None:
    cache = make(torch.float16)
    expected = copy_of(cache)
    with pytest.raises(ValueError, match="block 9 is not in the cache of 9 blocks"):
        copy_gpu.copy_blocks(cache, [(0, 1), (0, 9)])
    assert same_bits(cache.data, expected.data)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("is_small", [True, False])
def test_moves_are_those_of_the_reference(
    kv_dtype: torch.dtype, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(kv_dtype)
    monkeypatch.setattr(swap_gpu, "SMALL_BLOCK_BYTES", cache.layout.block_bytes + is_small)
    host = torch.empty((6, *cache.layout.block_shape), dtype=cache.layout.storage_dtype)
    host.view(torch.uint8).random_(0, 256)
    expected, expected_host = copy_of(cache), host.clone()
    for runs in ([], [(3, 0, 2), (8, 5, 1)]):
        moves = [(block + i, slot + i) for block, slot, count in runs for i in range(count)]
        swap_gpu.store_blocks(cache, host, runs)
        swap_reference.store_blocks(expected, expected_host, moves)
        assert same_bits(host, expected_host)
    runs = [(0, 1, 3), (7, 0, 1)]
    swap_gpu.load_blocks(cache, host, runs)
    swap_reference.load_blocks(expected, expected_host, [(0, 1), (1, 2), (2, 3), (7, 0)])
    assert same_bits(cache.data, expected.data)
    assert same_bits(host, expected_host)


@pytest.mark.night
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_layout_is_copied(kv_dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    cache = make(kv_dtype, block_size, head_dim)
    expected = copy_of(cache)
    copy_gpu.copy_blocks(cache, CHAIN)
    copy_reference.copy_blocks(expected, CHAIN)
    assert same_bits(cache.data, expected.data)
