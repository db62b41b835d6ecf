"""Products of GPUs against float64, and rows that depend on nothing but themselves, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chatd_kernels.dispatch import use_backend
from chatd_kernels.linear import GpuWeight, WeightFormat, linear, pack_linear
from chatd_kernels.linear import reference as reference_linear

pytest.importorskip("triton")

from chatd_kernels.gpu_device import INTERPRETED, SM_80, SM_90
from chatd_kernels.linear import gpu
from chatd_kernels.linear.gpu_pack import pack_linear as pack_for_gpu

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES: dict[WeightFormat, torch.dtype] = {"fp16": HALF, "bf16": BFLOAT, "fp32": FLOAT}
CPU = torch.device("cpu")


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, weight_format: WeightFormat, *, is_deterministic: bool = True
) -> GpuWeight:
    return pack_for_gpu(weight, bias, weight_format, device=CPU, is_deterministic=is_deterministic)


def run(x: torch.Tensor, packed: GpuWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.full((len(x), packed.out_features), float("nan"), dtype=dtype or x.dtype)
    gpu.linear(x, packed, out)
    return out


def check(packed: GpuWeight, x: torch.Tensor) -> None:
    expected = torch.empty(len(x), packed.out_features, dtype=torch.float64)
    reference_linear.linear(x, packed, expected)
    # Float32 sums of `size` products of size 1 err by at most some roundings of sums of size `size ** 0.5`.
    absolute = 1e-6 + 1e-7 * packed.in_features
    torch.testing.assert_close(run(x, packed, FLOAT).double(), expected, atol=absolute, rtol=0)
    # Rounding the result adds half a unit in the last place; torch on a CPU may round 16-bit sums on the way as well.
    relative = {HALF: 2**-10, BFLOAT: 2**-7, FLOAT: 0.0}[x.dtype]
    torch.testing.assert_close(run(x, packed).double(), expected, atol=absolute + 4 * relative, rtol=relative)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("has_codes", [False, True])
def test_a_product_is_that_of_the_reference(has_codes: bool, dtype: torch.dtype, is_deterministic: bool) -> None:
    weight_format = "int8" if has_codes else next(name for name, known in DTYPES.items() if known == dtype)
    for num_rows, out_features, in_features in ((5, 37, 48), (70, 130, 1056), (0, 16, 16)):
        bias = torch.randn(out_features) if out_features == 130 else None
        packed = pack(torch.randn(out_features, in_features), bias, weight_format, is_deterministic=is_deterministic)
        check(packed, torch.randn(num_rows, in_features).to(dtype))


@pytest.mark.night
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16, 33, 64, 129])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 16), (576, 576), (200, 2064)])
def test_every_product_is_that_of_the_reference(
    num_rows: int, out_features: int, in_features: int, has_codes: bool, dtype: torch.dtype, is_deterministic: bool
) -> None:
    weight_format = "int8" if has_codes else next(name for name, known in DTYPES.items() if known == dtype)
    packed = pack(
        torch.randn(out_features, in_features),
        torch.randn(out_features),
        weight_format,
        is_deterministic=is_deterministic,
    )
    check(packed, torch.randn(num_rows, in_features).to(dtype))


def check_rows(packed: GpuWeight, dtype: torch.dtype, sizes: list[int]) -> None:
    x = torch.randn(257, packed.in_features).to(dtype)
    together = run(x, packed)
    for row in {size - 1 for size in sizes}:
        assert torch.equal(run(x[row : row + 1], packed)[0], together[row]), row
    for num_rows in sizes:
        assert torch.equal(run(x[:num_rows], packed), together[:num_rows]), num_rows
    order = torch.randperm(len(x))
    assert torch.equal(run(x[order], packed), together[order])


# Of one segment, of two that are split or gathered by the number of rows, and of a size that no block divides.
SHAPES = [(33, 64), (100, 1024), (101, 1552)]


@pytest.mark.parametrize(("weight_format", "dtype"), [("fp16", HALF), ("bf16", BFLOAT), ("int8", HALF)])
def test_in_deterministic_mode_a_row_has_the_same_bits_in_every_batch(
    weight_format: WeightFormat, dtype: torch.dtype
) -> None:
    packed = pack(torch.randn(100, 1040), torch.randn(100), weight_format)
    check_rows(packed, dtype, [1, 2, 16, 63, 64, 65, 129])


@pytest.mark.night
@pytest.mark.parametrize(("weight_format", "dtype"), [*DTYPES.items(), ("int8", HALF), ("int8", BFLOAT)])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_in_deterministic_mode_a_row_has_the_same_bits_in_more_batches(
    out_features: int, in_features: int, weight_format: WeightFormat, dtype: torch.dtype
) -> None:
    packed = pack(torch.randn(out_features, in_features), torch.randn(out_features), weight_format)
    check_rows(packed, dtype, [*range(1, 258, 16), 63, 64, 127, 128])


@pytest.mark.parametrize(("weight_format", "dtype"), [("fp16", HALF), ("bf16", BFLOAT), ("int8", BFLOAT)])
def test_segments_that_are_split_give_the_bits_of_those_that_are_gathered(
    weight_format: WeightFormat, dtype: torch.dtype
) -> None:
    packed = pack(torch.randn(150, 2064), torch.randn(150), weight_format)
    x = torch.randn(70, 2064).to(dtype)
    split, gathered = torch.empty(2, 70, 150, dtype=dtype)
    # The same segments on both; what differs is how many programs fill a device.
    shape = gpu.product_shape(packed, len(x), dtype, SM_90)
    assert -(-2064 // shape.segment) == 4
    for out, num_processors, count in ((split, 100, 2), (gathered, 1, 1)):
        facts = replace(INTERPRETED, num_processors=num_processors)
        found = gpu.launches(x, packed, out, facts=facts, shape=shape)
        assert len(found) == count
        for launch in found:
            launch.run()
    assert torch.equal(split, gathered)


@pytest.mark.parametrize("facts", [SM_80, SM_90, INTERPRETED])
@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_in_deterministic_mode_the_number_of_rows_chooses_nothing(weight_format: WeightFormat, facts: object) -> None:
    for out_features, in_features in ((6144, 4096), (4096, 12288), (960, 576), (49152, 576)):
        packed = GpuWeight(weight_format, in_features, out_features, torch.empty(0, dtype=BFLOAT), None, None, True)
        shapes = {gpu.product_shape(packed, num_rows, BFLOAT, facts) for num_rows in range(1, 9000, 7)}  # type: ignore[arg-type]
        assert len(shapes) == 1


def test_a_product_of_few_rows_has_work_for_the_whole_device() -> None:
    for out_features, in_features in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)):
        packed = GpuWeight("bf16", in_features, out_features, torch.empty(0, dtype=BFLOAT), None, None, True)
        for facts in (SM_80, SM_90):
            shape = gpu.product_shape(packed, 1, BFLOAT, facts)
            programs = -(-out_features // shape.outputs) * -(-in_features // shape.segment)
            rounds = -(-programs // facts.num_processors)
            assert programs >= 0.8 * rounds * facts.num_processors


def test_codes_are_multiplied_exactly() -> None:
    packed = pack(torch.randn(40, 64), None, "int8", is_deterministic=False)
    x = torch.randint(-8, 9, (7, 64)).half()
    assert packed.scales is not None
    expected = (x.long() @ packed.rows.long().T).float() * packed.scales
    assert torch.equal(run(x, packed, FLOAT), expected)


@pytest.mark.parametrize("weight_format", ["fp16", "int8"])
def test_a_row_that_is_not_finite_spoils_only_itself(weight_format: WeightFormat) -> None:
    packed = pack(torch.randn(33, 64), None, weight_format)
    x = torch.randn(20, 64).half()
    clean = run(x, packed)
    x[19, 5] = float("nan")
    spoiled = run(x, packed)
    assert spoiled[19].isnan().all()
    assert torch.equal(spoiled[:19], clean[:19])


def test_the_dispatcher_packs_for_the_backend_and_multiplies_on_it() -> None:
    with use_backend("gpu"):
        packed = pack_linear(torch.randn(32, 64), None, "bf16", is_deterministic=True)
        assert isinstance(packed, GpuWeight)
        x = torch.randn(3, 64).bfloat16()
        assert torch.equal(linear(x, packed, torch.empty(3, 32, dtype=BFLOAT)), run(x, packed))


def test_a_weight_in_place_is_not_copied() -> None:
    weight = torch.randn(16, 32).half()
    assert pack(weight, None, "fp16").rows.data_ptr() == weight.data_ptr()
    assert pack(weight, None, "int8").num_bytes == weight.numel()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="in_features 40"):
        pack(torch.zeros(16, 40), None, "bf16")
    with pytest.raises(ValueError, match="'int4' is not one of fp32, fp16, bf16, int8"):
        pack(torch.zeros(16, 32), None, "int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be stored as fp16"):
        pack(torch.full((16, 32), 70000.0), None, "fp16")
    for is_deterministic in (False, True):
        packed = pack(torch.zeros(16, 32), None, "fp16", is_deterministic=is_deterministic)
        with pytest.raises(ValueError, match=r"x is \(2, 32\) torch.bfloat16; expected"):
            run(torch.zeros(2, 32).bfloat16(), packed)
        with pytest.raises(ValueError, match="out is"):
            run(torch.zeros(2, 32).half(), packed, BFLOAT)
