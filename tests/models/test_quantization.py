"""Packed linear layers as the decoder uses them."""

from __future__ import annotations

import pytest
import torch

from chatd.errors import ConfigError
from chatd.models.quantization import pack_linear
from chatd_kernels.linear import weight_formats


@pytest.mark.parametrize(("quantization", "error"), [("fp32", 1e-6), ("fp16", 3e-4), ("int8", 1e-2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_computes_what_torch_does(quantization: str, error: float, dtype: torch.dtype) -> None:
    weight, bias = (torch.randn(100, 64) * 0.1).to(dtype), torch.randn(100).to(dtype)
    layer = pack_linear(weight, bias, quantization)
    x = torch.randn(5, 64)
    expected = torch.nn.functional.linear(x, weight.float(), bias.float())
    assert ((layer(x) - expected).norm() / expected.norm()).item() < error
    assert (layer.in_features, layer.out_features, layer.format) == (64, 100, quantization)


def test_the_output_may_be_given() -> None:
    layer = pack_linear(torch.randn(20, 32), None, "int8")
    x, out = torch.randn(3, 32), torch.full((3, 20), float("nan"))
    assert layer(x, out=out) is out
    assert torch.equal(out, layer(x))


def test_int8_takes_a_quarter_and_fp16_half_of_the_memory() -> None:
    sizes = {format: pack_linear(torch.zeros(64, 128), None, format).num_bytes for format in weight_formats("cpu")}
    assert sizes == {"fp32": 32768, "fp16": 16384, "int8": 8192}


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int4' is not one of fp32, fp16, int8"):
        pack_linear(torch.zeros(16, 16), None, "int4")


def test_bfloat16_weights_are_for_gpus() -> None:
    with pytest.raises(ConfigError, match=r"'bf16' is not one of fp32, fp16, int8 \(cpu\)"):
        pack_linear(torch.zeros(16, 16), None, "bf16")
