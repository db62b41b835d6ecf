"""What a dispatcher may start on sm_80 and sm_90, compiled without a GPU: nothing spills, everything fits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from chatd.config import cache_dir
from chatd_kernels.ahead_of_time import (
    ARCHITECTURES,
    LLAMA_31_8B,
    QWEN3_8B,
    SHAPES,
    SMOLLM2_135M,
    Architecture,
    Choice,
    ModelShape,
    Resources,
    choices,
)
from chatd_kernels.testing import started_kernels

HALF, BFLOAT, FP8, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8


def cache_folder() -> Path:
    return cache_dir() / "kernels" / "gpu"


def distinct(found: Sequence[Choice]) -> list[Choice]:
    """One choice of those that are compiled alike."""
    return list({(choice.key, choice.architecture.capability): choice for choice in found}.values())


# Those of the deterministic mode are split, summed, gathered, and of one segment.
PRODUCTS = (
    *(f"product, float, {name} rows" for name in ("down, 1", "down, sum of 1", "down, 8192", "logits, 1")),
    *(f"product, int8, {name} rows" for name in ("down, 1", "logits, 1")),
)
ATTENTIONS = ("attention, decode, split", "attention, decode", "attention, prefill")


# Of these one is near the limit, on sm_80; it stands for that architecture.
SAMPLINGS = {
    80: ["draw_tokens, any"],
    90: [
        *(f"{name}, any" for name in ("scan_parts", "weigh_parts", "gather_candidates")),
        *(f"{name}, any" for name in ("list_part_likeliest", "list_likeliest")),
        "pick_likeliest, plain",
    ],
}


def few(architecture: Architecture) -> Iterator[Choice]:
    """Every kernel for a model that is shipped; of others what differs, in the types they are shipped in."""
    for choice in choices(QWEN3_8B, BFLOAT, BFLOAT, architecture):
        kind, _, name = choice.label.partition(", ")
        if name in SAMPLINGS[architecture.capability] if kind == "sampling" else kind != "product":
            yield choice
    yield from (c for c in choices(SMOLLM2_135M, HALF, HALF, architecture) if c.label in (*ATTENTIONS, "rope_kv_write"))
    yield from (c for c in choices(LLAMA_31_8B, BFLOAT, BFLOAT, architecture) if c.label == "rope_kv_write")
    for is_deterministic in (False, True):
        for choice in choices(QWEN3_8B, BFLOAT, BFLOAT, architecture, is_deterministic=is_deterministic):
            if choice.label in PRODUCTS and ("float" in choice.label) == is_deterministic:
                yield choice
    for kv_dtype in (FP8, INT8):
        for choice in choices(QWEN3_8B, BFLOAT, kv_dtype, architecture):
            if choice.label in (ATTENTIONS[0], ATTENTIONS[2]):
                yield choice


def check(found: Sequence[Choice]) -> None:
    rows = []
    for choice in found:
        resources = choice.resources(cache_folder())
        rows.append(f"sm_{choice.architecture.capability}  {choice.label}  {resources}")
        assert resources.spilled_bytes == 0, rows[-1]
        assert resources.shared_bytes <= choice.architecture.shared_bytes, rows[-1]
        assert 0 < resources.registers <= 255
    sys.stdout.write("\n".join(rows) + "\n")


def test_what_is_shipped_compiles_without_a_spill() -> None:
    found = distinct([choice for architecture in ARCHITECTURES for choice in few(architecture)])
    assert len(found) <= 60
    assert {choice.label for choice in found} >= {"rms_norm", *ATTENTIONS, *PRODUCTS}
    check(found)


@pytest.mark.night
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: f"sm_{architecture.capability}")
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, FP8, INT8])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_all_that_may_be_chosen_compiles_without_a_spill(
    shape: ModelShape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    is_deterministic: bool,
    architecture: Architecture,
) -> None:
    found = []
    for block_size in (16, 32, 64):
        found += choices(
            shape, dtype, kv_dtype or dtype, architecture, block_size=block_size, is_deterministic=is_deterministic
        )
    check(distinct(found))


def test_every_kernel_is_among_what_is_compiled() -> None:
    found = (choice for architecture in ARCHITECTURES for choice in few(architecture))
    compiled = {choice.launch.kernel.fn.__name__ for choice in found}
    assert compiled == started_kernels()


def test_a_result_is_read_again_and_another_source_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silu, norm = (
        next(c for c in choices(SMOLLM2_135M, HALF, HALF, ARCHITECTURES[1]) if c.label == label)
        for label in ("silu_mul", "rms_norm")
    )
    resources = silu.resources(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(path.read_text().replace(f'"registers": {resources.registers}', '"registers": 77'))
    assert silu.resources(tmp_path) == Resources(77, 0, resources.shared_bytes)
    assert norm.resources(tmp_path).registers != 77
