"""Attention against torch's own, and what must not matter: unowned slots, layouts, windows."""

from __future__ import annotations

import pytest
import torch

from chatd_kernels.paged_attention import build_metadata, paged_attention
from chatd_kernels.paged_attention.reference import paged_attention as reference
from chatd_kernels.testing import Conversation, Paged, make_paged

# K and V are rounded to the cache's dtype before torch sees them, so what is left is float32 summation: up to 300
# products of numbers of size 1, some 1e-7 each.
TOLERANCE = 3e-6


def sdpa(conversation: Conversation, first: int, end: int, window: int | None = None) -> torch.Tensor:
    """The rows first to end by torch, in float64."""
    q = conversation.queries[first:end].double().transpose(0, 1)
    k, v = (t[:end].double().transpose(0, 1) for t in (conversation.keys, conversation.values))
    rows, columns = torch.arange(first, end)[:, None], torch.arange(end)
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(0, 1).reshape(end - first, -1).float()


def check(paged: Paged, chunks: list[tuple[int, int, int]], window: int | None = None) -> None:
    expected = torch.cat([sdpa(paged.conversations[which], first, end, window) for which, first, end in chunks])
    torch.testing.assert_close(paged.attend(chunks, window=window), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_a_mixed_step_matches_torch(dtype: torch.dtype, block_size: int) -> None:
    paged = make_paged([1, 300, 257, 17, 290], dtype=dtype, block_size=block_size)
    check(paged, [(0, 0, 1), (1, 100, 300), (2, 256, 257), (3, 14, 17), (4, 280, 290)])


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (8, 1, 48), (4, 2, 80), (5, 1, 128), (7, 7, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_heads_match_torch(num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    paged = make_paged([33, 270, 6], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    check(paged, [(0, 32, 33), (1, 200, 270), (2, 0, 6)])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 511, 513])
def test_one_row_at_the_edges_of_blocks_and_segments_matches_torch(length: int) -> None:
    check(make_paged([length]), [(0, length - 1, length)])


@pytest.mark.parametrize("window", [1, 16, 40, 256, 1000])
def test_a_window_hides_what_is_before_it(window: int) -> None:
    paged = make_paged([560, 300, 20], shared={1: (0, 256)})
    check(paged, [(0, 500, 560), (1, 299, 300), (2, 3, 20)], window)


def test_sessions_over_one_prefix_match_torch() -> None:
    shared = {1: (0, 288), 2: (0, 272), 3: (1, 288), 4: (0, 16)}
    paged = make_paged([300, 310, 290, 289, 40], shared=shared)
    check(paged, [(4, 39, 40), (2, 288, 290), (0, 299, 300), (3, 288, 289), (1, 309, 310)])


def test_the_reference_says_the_same() -> None:
    paged = make_paged([40, 3])
    metadata = build_metadata(
        [0, 2, 5], [38, 0], [c.blocks for c in paged.conversations], layout=paged.cache.layout, num_q_heads=9
    )
    q = torch.cat((paged.conversations[0].queries[38:], paged.conversations[1].queries))
    out, expected = torch.empty(5, 9 * 64), torch.empty(5, 9 * 64)
    paged_attention(q, paged.cache, 1, metadata, out, 0.125)
    reference(q, paged.cache, 1, metadata, expected, 0.125)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 64])
def test_slots_that_nobody_owns_have_no_influence(dtype: torch.dtype, block_size: int) -> None:
    paged = make_paged([300, 261, 1, 30], shared={1: (0, 256)}, dtype=dtype, block_size=block_size)
    chunks = [(0, 240, 300), (1, 260, 261), (2, 0, 1), (3, 25, 30)]
    clean = paged.attend(chunks)
    owned = paged.owned_slots()
    for poison in (float("nan"), float("inf"), 1e30, -1e30):
        dirty = torch.full((3, 64), poison)
        for slot in set(range(paged.cache.num_blocks * block_size)) - owned:
            paged.cache.write_slot(slot, 1, dirty, dirty)
        assert torch.equal(paged.attend(chunks), clean)


def test_what_later_positions_hold_has_no_influence_on_earlier_rows() -> None:
    paged = make_paged([100])
    clean = paged.attend([(0, 40, 60)])
    blocks = paged.conversations[0].blocks
    for position in range(60, 100):
        slot = blocks[position // 16] * 16 + position % 16
        paged.cache.write_slot(slot, 1, torch.full((3, 64), float("nan")), torch.full((3, 64), float("inf")))
    assert torch.equal(paged.attend([(0, 40, 60)]), clean)


def test_a_row_that_holds_nan_spoils_only_rows_that_see_it() -> None:
    paged = make_paged([64])
    clean = paged.attend([(0, 0, 64)])
    slot = paged.conversations[0].blocks[2] * 16 + 1
    paged.cache.write_slot(slot, 1, torch.zeros(3, 64), torch.full((3, 64), float("nan")))
    spoiled = paged.attend([(0, 0, 64)])
    assert torch.equal(spoiled[:33], clean[:33])
    assert spoiled[33:].isnan().all()


def test_sequences_without_rows_and_padded_tables_are_accepted() -> None:
    paged = make_paged([40, 20])
    layout = paged.cache.layout
    first, second = (c.blocks for c in paged.conversations)
    padded = torch.full((3, 9), 7, dtype=torch.int32).numpy()
    padded[0, :3], padded[2, :2] = first, second
    q = torch.cat((paged.conversations[0].queries[39:], paged.conversations[1].queries[19:]))
    out = torch.empty(2, 9 * 64)
    metadata = build_metadata([0, 1, 1, 2], [39, 5, 19], padded, layout=layout, num_q_heads=9)
    paged_attention(q, paged.cache, 1, metadata, out, 0.125)
    assert torch.equal(out, paged.attend([(0, 39, 40), (1, 19, 20)]))


def test_one_metadata_serves_every_layer() -> None:
    paged = make_paged([600, 300])
    metadata = build_metadata(
        [0, 1, 2], [599, 299], [c.blocks for c in paged.conversations], layout=paged.cache.layout, num_q_heads=9
    )
    q = torch.cat((paged.conversations[0].queries[599:], paged.conversations[1].queries[299:]))
    expected = paged.attend([(0, 599, 600), (1, 299, 300)])
    for _ in range(5):
        out = torch.full((2, 9 * 64), float("nan"))
        paged_attention(q, paged.cache, 0, metadata, out, 0.125)
        assert not out.any()
        assert torch.equal(paged_attention(q, paged.cache, 1, metadata, out, 0.125), expected)


def test_what_does_not_fit_is_refused() -> None:
    paged = make_paged([40])
    layout, blocks = paged.cache.layout, paged.conversations[0].blocks
    with pytest.raises(ValueError, match="block table 0 has 2 blocks, its sequence needs 3"):
        build_metadata([0, 1], [39], [blocks[:2]], layout=layout, num_q_heads=9)
    with pytest.raises(ValueError, match="no multiple"):
        build_metadata([0, 1], [39], [blocks], layout=layout, num_q_heads=8)
    with pytest.raises(ValueError, match="negative block ids"):
        build_metadata([0, 1], [39], [[0, -2, 1]], layout=layout, num_q_heads=9)
    with pytest.raises(ValueError, match="do not agree"):
        build_metadata([0, 1], [39, 2], [blocks], layout=layout, num_q_heads=9)
    metadata = build_metadata([0, 1], [39], [[0, 1, 1000]], layout=layout, num_q_heads=9)
    q, out = torch.zeros(1, 9, 64), torch.zeros(1, 9 * 64)
    with pytest.raises(ValueError, match="block 1000 is not in the cache"):
        paged_attention(q, paged.cache, 1, metadata, out, 0.125)
    metadata = build_metadata([0, 1], [39], [blocks], layout=layout, num_q_heads=9)
    with pytest.raises(ValueError, match="layer 2 is not in the cache"):
        paged_attention(q, paged.cache, 2, metadata, out, 0.125)
    with pytest.raises(ValueError, match="expected contiguous"):
        paged_attention(q.double(), paged.cache, 1, metadata, out, 0.125)
    with pytest.raises(ValueError, match="window 0"):
        paged_attention(q, paged.cache, 1, metadata, out, 0.125, 0)
    with pytest.raises(ValueError, match=r"soft cap 5.0: scores are capped on GPUs only"):
        paged_attention(q, paged.cache, 1, metadata, out, 0.125, None, 5.0)
