"""Gated activations against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from chatd_kernels.silu_mul import gelu_tanh_mul, silu_mul


@pytest.mark.parametrize("num_rows", [1, 5, 70])
@pytest.mark.parametrize("size", [16, 1536])
def test_activations_match_torch(num_rows: int, size: int) -> None:
    gate_up = torch.randn(num_rows, 2 * size) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    # An exponential of relative error 3e-7, times numbers of up to 16 * 16.
    torch.testing.assert_close(
        silu_mul(gate_up, torch.full((num_rows, size), float("nan"))), functional.silu(gate) * up, atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(
        gelu_tanh_mul(gate_up, torch.full((num_rows, size), float("nan"))),
        functional.gelu(gate, approximate="tanh") * up,
        # Where torch's 1 + tanh cancels, its own error is an ulp of 1 times the gate.
        atol=1e-5,
        rtol=2e-6,
    )


@pytest.mark.parametrize("activation", [silu_mul, gelu_tanh_mul])
def test_extreme_gates_stay_finite_and_nan_stays_nan(activation: object) -> None:
    gates = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e10, float("nan")] * 2)
    out = activation(torch.cat((gates, torch.ones(16)))[None], torch.empty(1, 16))[0]  # type: ignore[operator]
    assert out[3] == 0
    assert out[:3].abs().max() < 1e-30
    assert torch.equal(out[4:7], gates[4:7])
    assert out[7].isnan()


def test_a_row_does_not_depend_on_other_rows(threads: int) -> None:
    gate_up = torch.randn(100, 3072)
    whole = silu_mul(gate_up, torch.empty(100, 1536))
    for row in (0, 4, 99):
        assert torch.equal(silu_mul(gate_up[row : row + 1], torch.empty(1, 1536)), whole[row : row + 1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="intermediate size 24"):
        silu_mul(torch.zeros(1, 48), torch.zeros(1, 24))
    with pytest.raises(ValueError, match="gate_up is"):
        silu_mul(torch.zeros(1, 48), torch.zeros(1, 32))
