"""Attention on GPUs against the reference, and what must not matter, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.paged_attention import reference
from chatd_kernels.paged_attention.batch import Batch, check_batch

pytest.importorskip("triton")

from chatd_kernels.gpu_device import INTERPRETED
from chatd_kernels.paged_attention import gpu
from chatd_kernels.paged_attention.gpu_schedule import GpuAttentionMetadata, build_tiles, tile_shapes

HALF, BFLOAT, FLOAT, FP8, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
# Outputs are means of values of size 1. Weights are rounded to the 16-bit type before they meet the values, which errs
# by at most half a unit (2^-11, 2^-8) of the largest value, about 4; then the result is rounded. Float32 differs by its
# sums. Codes are read exactly; their weights, times a scale, are rounded as well.
TOLERANCE = {HALF: 3e-3, BFLOAT: 2.4e-2, FLOAT: 5e-6}


@dataclass
class Case:
    """A cache at layer 1 of 2, chunks (length, first position), and queries."""

    cache: KVCache
    batch: Batch
    q: torch.Tensor
    owned: set[int]

    def expected(self, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
        out = torch.full((len(self.q), self.q[0].numel()), float("nan"), dtype=torch.float64)
        scale = self.q.shape[2] ** -0.5
        reference.paged_attention(self.q, self.cache, 1, self.batch, out, scale, window, soft_cap)
        return out

    def metadata(
        self, *, longest: int = 0, num_decodes: int = 0, is_deterministic: bool = False
    ) -> GpuAttentionMetadata:
        layout, num_q_heads = self.cache.layout, self.q.shape[1]
        shapes = tile_shapes(layout, num_q_heads, INTERPRETED, is_deterministic=is_deterministic)
        tiles = build_tiles(
            self.batch, shapes, layout.num_kv_heads, INTERPRETED,
            longest=longest, num_decodes=num_decodes,
        )  # fmt: skip
        found = GpuAttentionMetadata.from_host(tiles, shapes, layout, num_q_heads, torch.device("cpu"))
        for kind in (found.decode, found.prefill):
            for tensor in (kind.partials, kind.partial_max, kind.partial_sum):
                tensor.fill_(float("nan"))
        return found

    def attend(
        self, metadata: GpuAttentionMetadata, window: int | None = None, soft_cap: float | None = None
    ) -> torch.Tensor:
        out = torch.full((len(self.q), self.q[0].numel()), float("nan"), dtype=self.q.dtype)
        gpu.paged_attention(self.q, self.cache, 1, metadata, out, self.q.shape[2] ** -0.5, window, soft_cap)
        return out

    def check(self, metadata: GpuAttentionMetadata, window: int | None = None, soft_cap: float | None = None) -> None:
        found, expected = self.attend(metadata, window, soft_cap), self.expected(window, soft_cap)
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[self.q.dtype], rtol=0)


def make(
    chunks: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype = HALF,
    kv_dtype: torch.dtype | None = None,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
) -> Case:
    """Chunks are (length of the sequence, first position of the rows); slots that nobody owns hold NaN."""
    counts = [-(-length // block_size) for length, _ in chunks]
    cache = allocate_kv_cache(sum(counts) + 2, 2, num_kv_heads, block_size, head_dim, kv_dtype or dtype, key_group=1)
    cache.data.view(torch.uint8).fill_(0xFF)
    free = torch.randperm(cache.num_blocks).tolist()
    tables, owned = [], set()
    for (length, _), count in zip(chunks, counts, strict=True):
        blocks = [free.pop() for _ in range(count)]
        tables.append(blocks)
        keys, values = torch.randn(2, length, num_kv_heads, head_dim)
        for position in range(length):
            slot = blocks[position // block_size] * block_size + position % block_size
            owned.add(slot)
            cache.write_slot(slot, 1, keys[position], values[position])
    bounds = np.cumsum([0, *(length - first for length, first in chunks)])
    batch = check_batch(bounds, [first for _, first in chunks], tables, block_size)
    q = torch.randn(batch.num_tokens, num_q_heads, head_dim).to(dtype)
    return Case(cache, batch, q, owned)


MIXED = [(1, 0), (90, 89), (33, 30), (70, 40), (20, 20), (129, 128)]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
def test_decode_and_prefill_are_those_of_the_reference(dtype: torch.dtype) -> None:
    case = make(MIXED, dtype=dtype)
    case.check(case.metadata())


@pytest.mark.parametrize("kv_dtype", [FP8, INT8])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_codes_are_read_as_the_reference_reads_them(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = make(MIXED[1:4], dtype=dtype, kv_dtype=kv_dtype)
    case.check(case.metadata())


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("chunk", [(200, 199), (140, 100)])
def test_splits_are_merged_to_the_whole(dtype: torch.dtype, chunk: tuple[int, int]) -> None:
    case = make([chunk], dtype=dtype, num_kv_heads=1)
    metadata = case.metadata(longest=1 << 20)
    assert metadata.decode.num_splits > 4 or metadata.prefill.num_splits > 3
    case.check(metadata)


@pytest.mark.parametrize("window", [1, 16, 50])
def test_a_window_hides_what_is_before_it(window: int) -> None:
    case = make([(150, 149), (100, 60), (3, 0)], dtype=FLOAT)
    case.check(case.metadata(longest=1 << 20), window=window)


def test_scores_are_capped() -> None:
    case = make([(60, 59), (40, 10)], dtype=FLOAT)
    case.q *= 30
    case.check(case.metadata(), soft_cap=5.0)
    assert not torch.allclose(case.expected(), case.expected(soft_cap=5.0), atol=0.1)


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (8, 1, 80, 32), (5, 1, 128, 64), (17, 1, 64, 16), (2, 2, 256, 32)],
)
def test_any_heads_are_those_of_the_reference(
    num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = make(
        [(70, 69), (80, 20)],
        dtype=FLOAT,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    case.check(case.metadata())


def test_padding_writes_nothing_and_changes_nothing() -> None:
    case = make([(70, 69), (1, 0), (64, 63)])
    case.check(case.metadata(num_decodes=8, longest=4096))


def test_slots_that_nobody_owns_have_no_influence() -> None:
    case = make([(70, 69), (30, 20)])
    clean = case.attend(case.metadata(longest=1 << 20))
    for poison in (float("inf"), -60000.0):
        dirty = torch.full((2, 64), poison)
        for slot in set(range(case.cache.num_blocks * 16)) - case.owned:
            case.cache.write_slot(slot, 1, dirty, dirty)
        assert torch.equal(case.attend(case.metadata(longest=1 << 20)), clean)


@pytest.mark.parametrize(
    ("kv_dtype", "window"),
    [
        (HALF, None),
        (INT8, 70),
        pytest.param(HALF, 70, marks=pytest.mark.night),
        pytest.param(INT8, None, marks=pytest.mark.night),
    ],
)
def test_in_deterministic_mode_a_token_depends_on_its_sequence_alone(
    kv_dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatd_kernels.paged_attention.gpu_schedule.SEGMENT", 128)
    case = make([(300, 230)], kv_dtype=kv_dtype, num_q_heads=2, num_kv_heads=1)
    whole = case.attend(case.metadata(is_deterministic=True), window)
    torch.testing.assert_close(whole.double(), case.expected(window), atol=TOLERANCE[HALF], rtol=0)
    table = case.batch.block_tables
    for first, end in ((230, 231), (231, 240), (254, 258), (256, 300)):
        batch = check_batch([0, end - first], [first], table, 16)
        part = Case(case.cache, batch, case.q[first - 230 : end - 230], case.owned)
        found = part.attend(part.metadata(is_deterministic=True, num_decodes=3, longest=1000), window)
        assert torch.equal(found, whole[first - 230 : end - 230])


def test_an_empty_batch_starts_nothing() -> None:
    case = make([(20, 20)])
    assert (
        gpu.launches(case.q, case.cache, 1, case.metadata(), torch.empty(0, 256).half(), 1.0, facts=INTERPRETED) == []
    )


def test_what_does_not_fit_is_refused() -> None:
    case = make([(20, 19)])
    metadata, out = case.metadata(), torch.empty(1, 256).half()
    with pytest.raises(ValueError, match="layer 2 is not in the cache"):
        gpu.paged_attention(case.q, case.cache, 2, metadata, out, 1.0)
    with pytest.raises(ValueError, match="window 0"):
        gpu.paged_attention(case.q, case.cache, 1, metadata, out, 1.0, 0)
    with pytest.raises(ValueError, match="soft cap 0"):
        gpu.paged_attention(case.q, case.cache, 1, metadata, out, 1.0, None, 0.0)
    with pytest.raises(ValueError, match=r"q is torch.float32, the cache torch.float16"):
        gpu.paged_attention(case.q.float(), case.cache, 1, metadata, out, 1.0)
    with pytest.raises(ValueError, match="metadata was built for"):
        gpu.paged_attention(case.q, make([(1, 0)], block_size=32).cache, 1, metadata, out, 1.0)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        tile_shapes(case.cache.layout, 3, INTERPRETED)


@pytest.mark.night
@pytest.mark.parametrize("kv_dtype", [None, FP8, INT8])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (4, 1, 80), (6, 2, 96), (4, 2, 256)]
)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (40, None), (None, 30.0), (7, 5.0)])
@pytest.mark.parametrize("longest", [0, 1 << 20])
def test_every_attention_is_that_of_the_reference(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    longest: int,
) -> None:
    case = make(
        [(1, 0), (90, 89), (33, 31), (70, 48)],
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    case.check(case.metadata(longest=longest), window, soft_cap)
