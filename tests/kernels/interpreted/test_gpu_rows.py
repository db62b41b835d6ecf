"""Norms and activations of GPUs against their references, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from chatd_kernels.rms_norm import reference as rms_norm_reference
from chatd_kernels.silu_mul import reference as silu_mul_reference

pytest.importorskip("triton")

from chatd_kernels.rms_norm import gpu as rms_norm_gpu
from chatd_kernels.silu_mul import gpu as silu_mul_gpu

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = [HALF, BFLOAT, FLOAT]
# Both sides compute in float32 and round once, and a rounding may fall to either side: one unit in the last place. In
# float32 sums of up to 1040 squares, and exponentials, differ by a few units.
RELATIVE = {HALF: 2**-10, BFLOAT: 2**-7, FLOAT: 2e-6}


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def check_norm(num_rows: int, size: int, dtype: torch.dtype, residual_dtype: torch.dtype | None) -> None:
    x, weight = (torch.randn(num_rows, size) * 3).to(dtype), torch.randn(size)
    residual = None if residual_dtype is None else torch.randn(num_rows, size).to(residual_dtype)
    expected_residual = None if residual is None else residual.clone()
    expected, out = poisoned(num_rows, size, dtype=dtype), poisoned(num_rows, size, dtype=dtype)
    rms_norm_reference.rms_norm(x, weight, 1e-5, expected, expected_residual)
    rms_norm_gpu.rms_norm(x, weight, 1e-5, out, residual)
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=RELATIVE[dtype])
    if residual is not None:
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_that_of_the_reference(dtype: torch.dtype) -> None:
    check_norm(5, 576, dtype, None)
    check_norm(3, 48, dtype, dtype)
    check_norm(1, 33, dtype, FLOAT)
    check_norm(0, 48, dtype, dtype)


@pytest.mark.night
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", [None, *DTYPES])
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize("size", [1, 16, 31, 576, 1000, 4096])
def test_every_norm_is_that_of_the_reference(
    num_rows: int, size: int, dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    check_norm(num_rows, size, dtype, residual_dtype)


def test_a_norm_may_be_written_over_its_input() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    expected = poisoned(3, 64, dtype=FLOAT)
    rms_norm_gpu.rms_norm(x, weight, 1e-5, expected)
    rms_norm_gpu.rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(9, 576).to(dtype), torch.randn(9, 576).to(dtype), torch.randn(576)
    sums, out, activated = residual.clone(), poisoned(9, 576, dtype=dtype), poisoned(9, 288, dtype=dtype)
    rms_norm_gpu.rms_norm(x, weight, 1e-5, out, sums)
    silu_mul_gpu.silu_mul(x, activated)
    for row in range(9):
        part = slice(row, row + 1)
        alone, alone_activated = poisoned(1, 576, dtype=dtype), poisoned(1, 288, dtype=dtype)
        rms_norm_gpu.rms_norm(x[part], weight, 1e-5, alone, residual[part])
        silu_mul_gpu.silu_mul(x[part], alone_activated)
        assert torch.equal(alone, out[part])
        assert torch.equal(alone_activated, activated[part])


def check_activation(num_rows: int, size: int, dtype: torch.dtype, name: str) -> None:
    gate_up = (torch.randn(num_rows, 2 * size) * 4).to(dtype)
    expected, out = poisoned(num_rows, size, dtype=dtype), poisoned(num_rows, size, dtype=dtype)
    getattr(silu_mul_reference, name)(gate_up, expected)
    getattr(silu_mul_gpu, name)(gate_up, out)
    # Where torch's 1 + tanh cancels, its own error is an ulp of 1 times the gate.
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=RELATIVE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_an_activation_is_that_of_the_reference(name: str, dtype: torch.dtype) -> None:
    check_activation(3, 1536, dtype, name)
    check_activation(1, 17, dtype, name)
    check_activation(0, 17, dtype, name)


@pytest.mark.night
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize("size", [1, 16, 1023, 1024, 1025, 2304])
def test_every_activation_is_that_of_the_reference(num_rows: int, size: int, name: str, dtype: torch.dtype) -> None:
    check_activation(num_rows, size, dtype, name)


@pytest.mark.parametrize("activation", [silu_mul_gpu.silu_mul, silu_mul_gpu.gelu_tanh_mul])
def test_extreme_gates_stay_finite_and_nan_stays_nan(activation: object) -> None:
    gates = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e10, float("nan")])
    out = poisoned(1, 8, dtype=FLOAT)
    activation(torch.cat((gates, torch.ones(8)))[None], out)  # type: ignore[operator]
    assert out[0, 3] == 0
    assert out[0, :3].abs().max() < 1e-30
    assert torch.equal(out[0, 4:7], gates[4:7])
    assert out[0, 7].isnan()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden size 65536"):
        rms_norm_gpu.rms_norm(torch.zeros(1, 1 << 16), torch.zeros(1 << 16), 1e-5, torch.zeros(1, 1 << 16))
    with pytest.raises(ValueError, match="weight is"):
        rms_norm_gpu.rms_norm(torch.zeros(2, 48), torch.zeros(32), 1e-5, torch.zeros(2, 48))
    with pytest.raises(ValueError, match="not contiguous"):
        rms_norm_gpu.rms_norm(torch.zeros(2, 96)[:, :48], torch.zeros(48), 1e-5, torch.zeros(2, 48))
    with pytest.raises(ValueError, match="gate_up is"):
        silu_mul_gpu.silu_mul(torch.zeros(1, 48), torch.zeros(1, 32))
    with pytest.raises(ValueError, match=r"float64; expected contiguous \(1, 32\) of"):
        silu_mul_gpu.silu_mul(torch.zeros(1, 64), torch.zeros(1, 32).double())
