"""Products with packed weights against float64, exact integers, and rows that depend on nothing but themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chatd_kernels.linear import PackedWeight, WeightFormat, linear, pack_linear
from chatd_kernels.linear.cpu import largest_activation
from chatd_kernels.linear.reference import linear as reference
from chatd_kernels.linear.reference import unpack

FORMATS: list[WeightFormat] = ["fp32", "fp16", "int8"]


def run(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    return linear(x, packed, torch.full((len(x), packed.out_features), float("nan")))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(16, 16), (1, 32), (37, 64), (250, 576), (96, 1536)])
def test_products_match_float64(
    weight_format: WeightFormat, has_bias: bool, out_features: int, in_features: int
) -> None:
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features) if has_bias else None
    packed = pack_linear(weight, bias, weight_format)
    for num_rows in (1, 7, 50):
        x = torch.randn(num_rows, in_features)
        expected = torch.empty(num_rows, out_features)
        reference(x, packed, expected)
        # Float32: in_features roundings of sums of size in_features ** 0.5 and more. Int8: each activation is off by
        # at most half of 1/11008 of its row's largest, some 3.5; six standard deviations of their sum.
        tolerance = 6e-4 * in_features**0.5 if weight_format == "int8" else 1e-5 + 4e-7 * in_features
        torch.testing.assert_close(run(x, packed), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("weight_format", "error"), [("fp32", 0.0), ("fp16", 3e-4), ("int8", 1e-2)])
def test_packed_weights_stand_for_the_weights(weight_format: WeightFormat, error: float) -> None:
    weight = torch.randn(50, 128)
    weight[3] = 0
    found = unpack(pack_linear(weight, None, weight_format))
    assert found.shape == weight.shape
    assert ((found - weight).norm() / weight.norm()).item() <= error
    assert not found[3].any()


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("out_features", "in_features"), [(100, 576), (64, 1536)])
def test_a_row_has_the_same_bits_in_every_batch(
    threads: int, weight_format: WeightFormat, out_features: int, in_features: int
) -> None:
    packed = pack_linear(torch.randn(out_features, in_features), torch.randn(out_features), weight_format)
    x = torch.randn(300, in_features)
    alone = torch.cat([run(x[i : i + 1], packed) for i in range(300)])
    for num_rows in (*range(2, 35), 64, 129, 257, 300):
        assert torch.equal(run(x[:num_rows], packed), alone[:num_rows]), num_rows
    order = torch.randperm(300)
    assert torch.equal(run(x[order], packed), alone[order])


def test_int8_sums_are_exact_integers() -> None:
    size = 576
    packed = pack_linear(torch.randn(48, size), None, "int8")
    x = torch.randn(9, size)
    weights = packed.panels.transpose(1, 2).reshape(48, size).numpy().astype(np.int64)
    largest = np.float32(largest_activation(size))
    peaks = x.abs().amax(dim=1).numpy()
    integers = np.rint(x.numpy() * (largest / peaks)[:, None]).astype(np.int64)
    sums = (integers @ weights.T).astype(np.float32)
    assert packed.scales is not None
    expected = sums * packed.scales.numpy() * (peaks / largest)[:, None]
    assert np.array_equal(run(x, packed).numpy(), expected)


@pytest.mark.parametrize("in_features", [16, 576, 16384])
def test_the_largest_int8_sum_does_not_overflow(in_features: int) -> None:
    packed = pack_linear(torch.ones(16, in_features), None, "int8")
    out = run(torch.stack((torch.ones(in_features), -torch.ones(in_features))), packed)
    # The weights' scale 1/127 and the row's are rounded.
    torch.testing.assert_close(out[0], torch.full((16,), float(in_features)), atol=0, rtol=1e-6)
    assert torch.equal(out[1], -out[0])


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_only_itself(weight_format: WeightFormat, bad: float) -> None:
    packed = pack_linear(torch.randn(32, 64), None, weight_format)
    x = torch.randn(8, 64)
    clean = run(x, packed)
    x[3, 17] = bad
    spoiled = run(x, packed)
    assert not spoiled[3].isfinite().any()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_of_zeros_gives_the_bias(weight_format: WeightFormat) -> None:
    bias = torch.randn(20)
    assert torch.equal(run(torch.zeros(2, 32), pack_linear(torch.randn(20, 32), bias, weight_format))[1], bias)


def test_no_rows_are_no_work() -> None:
    assert run(torch.empty(0, 32), pack_linear(torch.randn(20, 32), None, "fp16")).shape == (0, 20)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="in_features 40"):
        pack_linear(torch.zeros(16, 40), None, "fp16")
    with pytest.raises(ValueError, match="3 dimensions"):
        pack_linear(torch.zeros(1, 16, 32), None, "fp16")
    with pytest.raises(ValueError, match="'int4' is not one of"):
        pack_linear(torch.zeros(16, 32), None, "int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a weight of size 70000\.0 cannot be stored as fp16"):
        pack_linear(torch.full((16, 32), 70000.0), None, "fp16")
    with pytest.raises(ValueError, match="a weight of size nan cannot be stored as int8"):
        pack_linear(torch.full((16, 32), float("nan")), None, "int8")
    packed = pack_linear(torch.zeros(16, 32), None, "fp16")
    with pytest.raises(ValueError, match="x is"):
        run(torch.zeros(2, 48), packed)
    with pytest.raises(ValueError, match="out is"):
        linear(torch.zeros(2, 32), packed, torch.zeros(2, 17))
