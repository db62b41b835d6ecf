"""The whole script for a GPU under Triton's interpreter: every part runs, at sizes that take no time."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from chatd_kernels.dispatch import use_backend

pytest.importorskip("triton")

from chatd.bench.gpu import script, timing
from chatd.bench.gpu.attention import Heads, decode_rows, layout_rows, prefill_rows
from chatd.bench.gpu.checks import check_rows
from chatd.bench.gpu.engine import host_rows, prefix_rows
from chatd.bench.gpu.models import LLAMA_31_8B, QWEN3_8B, Rates, roofline_s
from chatd.bench.gpu.parts import Bench, NoRoom, Part
from chatd.bench.gpu.peer import peer_rows
from chatd.bench.gpu.rates import copy_rows, measured_rates, product_rows
from chatd.bench.gpu.sampling import KINDS, sampling_rows
from chatd.bench.gpu.steps import step_rows
from chatd.models.model_config import parse_decoder_config
from chatd_kernels.kv_cache import KVCacheLayout
from chatd_kernels.stream import InterpretedStream

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "dtype": "float32",
}
QWEN3, LLAMA = {**QWEN3_8B, **SIZES}, {**LLAMA_31_8B, **SIZES}
HEADS = Heads(2, 1, 16, 16, torch.float16)
STEPS = {"batches": (1,), "context": 17, "num_steps": 1, "max_model_len": 32}
SMALL = {
    "checks": partial(check_rows, dtypes=(torch.float16,), chunks=((1, 0), (33, 30), (20, 20)), vocab_size=1500),
    "copies": partial(copy_rows, sizes=(1 << 10,)),
    "products": partial(product_rows, shape=(16, 32), row_counts=(1,)),
    "steps": partial(step_rows, raw=QWEN3, **(STEPS | {"batches": (1, 2)})),
    "host": partial(host_rows, raw=QWEN3, batch=2, prompt=5, num_steps=1, max_num_batched_tokens=8),
    "decode": partial(decode_rows, heads=HEADS, batches=(1,), contexts=(20,)),
    "prefill": partial(prefill_rows, heads=HEADS, lengths=(5,)),
    "deterministic": partial(step_rows, raw=QWEN3, is_deterministic=True, **STEPS),
    "fp8-steps": partial(step_rows, raw=QWEN3, kv_dtype=script.FP8, **STEPS),
    "fp8-decode": partial(
        decode_rows, heads=Heads(2, 1, 16, 16, torch.float16, script.FP8), batches=(1,), contexts=(20,)
    ),
    "peer": partial(
        peer_rows,
        raw=QWEN3,
        batch=2,
        prompt=4,
        max_tokens=3,
        max_num_batched_tokens=8,
        options={"num_blocks": 16, "max_batch_tokens": 64},
    ),
    "prefix": partial(prefix_rows, raw=QWEN3, system=16, own=2, repeats=1, max_num_batched_tokens=16),
    "layouts": partial(layout_rows, heads=HEADS, batch=1, length=20, num_layers=2),
    "llama": partial(step_rows, name="Llama", raw=LLAMA, **STEPS),
    "sampling": partial(sampling_rows, batches=(1,), vocabularies=(500,), kinds=KINDS[:3:2]),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    monkeypatch.setattr(script, "GpuStream", InterpretedStream)
    # Layers that fill a card's cache would take the interpreter minutes.
    monkeypatch.setattr("chatd.bench.gpu.attention._MOST_LAYERS", 2)
    monkeypatch.setattr("chatd.bench.gpu.attention.NUM_IN_RUN", 1)
    monkeypatch.setattr(timing, "NUM_IN_RUN", 1)
    # Nothing here is so large that it has to be gone at once.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    with use_backend("gpu"):
        yield


def test_every_part_runs_and_its_table_and_figures_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert {part.name for part in script.PARTS} == set(SMALL)
    parts = [Part(part.name, part.title, 0.0, SMALL[part.name]) for part in script.PARTS]
    monkeypatch.setattr(script, "PARTS", parts)
    code = script.main(["--json", str(tmp_path / "gpu.json")])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert figures["card"] == "Triton's interpreter"
    for part in parts:
        outcome = figures["parts"][part.name]
        assert outcome["rows"], part.name
        assert (outcome["error"], outcome["skipped"]) == (None, None)
        assert len({tuple(row) for row in outcome["rows"]}) == 1, f"rows of {part.name} have different columns"
        assert part.title in printed.out


def test_a_roofline_is_the_sum_of_the_least_time_of_each_product_and_of_attention() -> None:
    config = parse_decoder_config(QWEN3_8B)
    layout = KVCacheLayout(36, 8, 16, 128, torch.bfloat16, 1)
    weights = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12_288) + 151_936 * 4096
    # With nothing but bytes that take time: weights, KV, and what goes in and out.
    rows = 36 * (4096 + 6144 + 2 * 4096 + 4096 + 2 * 12_288 + 12_288 + 4096) + 4096 + 151_936
    num_bytes = 2 * (weights + 3 * rows) + 3 * 1000 * 36 * 2 * 8 * 128 * 2
    assert roofline_s(config, layout, 3, 1000, Rates(1e9, 1e99)) == pytest.approx(num_bytes / 1e9)
    flops = 2 * 3 * weights + 36 * 4 * 3 * 1000 * 4096
    assert roofline_s(config, layout, 3, 1000, Rates(1e99, 1e9)) == pytest.approx(flops / 1e9)


def test_rates_that_no_part_has_measured_are_measured_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatd.bench.gpu.rates.COPIED", (1 << 10,))
    monkeypatch.setattr("chatd.bench.gpu.rates.ROWS", (1,))
    monkeypatch.setattr("chatd.bench.gpu.rates.GATE_AND_UP", (16, 32))
    bench = Bench(InterpretedStream())
    assert measured_rates(bench) == Rates(bench.copy_bandwidth, bench.product_flops)
    assert measured_rates(Bench(InterpretedStream(), 2.0, 3.0)) == Rates(2.0, 3.0)


def test_a_model_that_does_not_fit_is_told_by_its_blocks() -> None:
    with pytest.raises(NoRoom, match=r"has room for \d+ blocks, 0 are wanted"):
        list(step_rows(Bench(InterpretedStream(1000), 1.0, 1.0), raw=QWEN3, **STEPS))
    with pytest.raises(NoRoom, match=r"32.0 GiB are wanted, 1.0 GiB are free"):
        list(layout_rows(Bench(InterpretedStream())))
