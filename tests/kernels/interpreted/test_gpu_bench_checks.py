"""What the GPU's benchmark checks and measures on a device, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from chatd_kernels.dispatch import use_backend

pytest.importorskip("triton")

from chatd.bench.gpu.attention import DecodeBatch, Heads, decode_rows, layout_rows
from chatd.bench.gpu.checks import check_rows
from chatd.bench.gpu.parts import Bench, NoRoom
from chatd.bench.gpu.rates import copy_rows
from chatd.bench.gpu.sampling import KINDS, Kind, draw_by_sort, sampling_rows
from chatd_kernels.stream import InterpretedStream

CPU = torch.device("cpu")
SMALL = Heads(4, 2, 32, 16, torch.float16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Layers that fill a card's cache would take the interpreter minutes.
    monkeypatch.setattr("chatd.bench.gpu.attention._MOST_LAYERS", 2)
    with use_backend("gpu"):
        yield


@pytest.mark.night
def test_every_check_passes() -> None:
    rows = list(check_rows(Bench(InterpretedStream())))
    assert [row for row in rows if not row["ok"]] == []
    kernels = {row["kernel"].split(",")[0] for row in rows}
    assert kernels >= {"rms_norm", "silu_mul", "rope_kv_write", "attention", "linear", "copy_blocks", "sampling"}


def test_decode_is_measured_paged_and_contiguous_against_the_bandwidth_of_copies() -> None:
    bench = Bench(InterpretedStream())
    [copied] = copy_rows(bench, (1 << 16,))
    assert bench.copy_bandwidth == pytest.approx(copied["GB/s read and written"] * 1e9)
    [row] = decode_rows(bench, SMALL, (2,), (40,))
    assert row["MiB read"] == 2 * 40 * 2 * 2 * 32 * 2 / (1 << 20)
    assert row["share of copies"] == pytest.approx(row["GB/s"] * 1e9 / bench.copy_bandwidth)


def test_copies_are_as_large_as_the_card_has_room_for() -> None:
    bench = Bench(InterpretedStream(10_000))
    rows = list(copy_rows(bench, (1 << 10, 1 << 16, 1 << 32)))
    assert [row["copied MiB"] * 2**20 for row in rows] == [1024, 3584]
    assert bench.copy_bandwidth == pytest.approx(rows[-1]["GB/s read and written"] * 1e9)
    with pytest.raises(NoRoom, match="has no room for a copy"):
        list(copy_rows(Bench(InterpretedStream(1000))))


def test_both_layouts_hold_the_same_tokens() -> None:
    rows = list(layout_rows(Bench(InterpretedStream()), SMALL, 2, 20, 3))
    assert [(row["layout"], row["layers in a block"]) for row in rows] == [("block-major", 3), ("layer-major", 1)]
    assert DecodeBatch(SMALL, 2, 20, CPU, num_layers=3).bytes_read == DecodeBatch(SMALL, 2, 20, CPU).bytes_read


def test_drawing_is_measured_beside_a_sort() -> None:
    rows = list(sampling_rows(Bench(InterpretedStream()), (1,), (500,), KINDS[:2]))
    assert [(row["rows"], row["batch"]) for row in rows] == [("greedy", 1), ("temperature", 1)]
    assert all(row["sort / ours"] > 0 for row in rows)


def test_a_draw_by_sort_keeps_what_it_should() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 4.5], [9.0, 0.0, 0.0, 0.0]])
    for _ in range(20):
        tokens = draw_by_sort(logits, Kind("", top_k=2, top_p=0.99)).tolist()
        assert tokens[0] in (1, 3)
        assert tokens[1] == 0
    assert draw_by_sort(logits, Kind("", temperature=0.0)).tolist() == [1, 0]
    assert len(draw_by_sort(logits, Kind("")).tolist()) == 2
