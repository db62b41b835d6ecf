"""RMSNorm against transformers' own, and row by row."""

from __future__ import annotations

import pytest
import torch

from chatd_kernels.rms_norm import rms_norm
from chatd_kernels.rms_norm.reference import rms_norm as reference


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("num_rows", [1, 3, 17, 130])
@pytest.mark.parametrize("size", [16, 48, 576, 1040])
def test_norm_matches_transformers(num_rows: int, size: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = torch.randn(num_rows, size) * 3, torch.randn(size)
    module = LlamaRMSNorm(size, eps=1e-5)
    module.weight.data = weight
    # Up to 1040 squares are summed in another order, some 1e-7 relative.
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5, out=poisoned(num_rows, size)), module(x).detach(), atol=0, rtol=2e-6
    )


def test_the_residual_takes_the_sum_before_the_norm() -> None:
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    expected, expected_sum = torch.empty(5, 64), residual.clone()
    reference(x, weight, 1e-6, expected, expected_sum)
    out = rms_norm(x, weight, 1e-6, out=poisoned(5, 64), residual=residual)
    assert torch.equal(residual, expected_sum)
    torch.testing.assert_close(out, expected, atol=0, rtol=2e-6)


def test_the_output_may_be_the_input() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    expected = rms_norm(x, weight, 1e-6, out=poisoned(5, 64))
    assert torch.equal(rms_norm(x, weight, 1e-6, out=x), expected)


def test_a_row_does_not_depend_on_other_rows(threads: int) -> None:
    x, weight = torch.randn(200, 576), torch.randn(576)
    whole = rms_norm(x, weight, 1e-5, out=poisoned(200, 576))
    for row in (0, 15, 16, 199):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5, out=poisoned(1, 576)), whole[row : row + 1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden size 40"):
        rms_norm(torch.zeros(2, 40), torch.zeros(40), 1e-5, out=torch.zeros(2, 40))
    with pytest.raises(ValueError, match="weight is"):
        rms_norm(torch.zeros(2, 48), torch.zeros(32), 1e-5, out=torch.zeros(2, 48))
    with pytest.raises(ValueError, match="not contiguous"):
        rms_norm(torch.zeros(2, 96)[:, :48], torch.zeros(48), 1e-5, out=torch.zeros(2, 48))
