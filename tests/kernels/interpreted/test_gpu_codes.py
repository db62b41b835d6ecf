"""8-bit codes of GPUs against torch's own, one by one, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from chatd_kernels.kv_codes import decode, encode, factor_of


@triton.jit
def encode_all(x, out, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    o_x = tl.arange(0, SIZE)
    tl.store(out + o_x, encode(tl.load(x + o_x), FORMAT))


@triton.jit
def decode_all(codes, out, FORMAT: tl.constexpr):
    o_x = tl.arange(0, 256)
    numbers = decode(tl.load(codes + o_x), out.dtype.element_ty, FORMAT)
    tl.store(out + o_x, (numbers.to(tl.float32) * factor_of(FORMAT)).to(out.dtype.element_ty))


def test_every_half_float_within_range_gets_the_code_of_torch() -> None:
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float()
    for code_format, dtype, largest in (("fp8", torch.float8_e4m3fn, 448), ("int8", torch.int8, 127)):
        x = torch.where(halves.abs() <= largest, halves, torch.zeros_like(halves))
        out = torch.empty(len(x), dtype=torch.uint8)
        encode_all[(1,)](x, out, code_format, len(x))
        expected = (x if dtype != torch.int8 else x.round()).to(dtype)
        # A zero that was negative may have lost its sign.
        assert torch.equal(out.view(dtype).float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_code_is_the_number_of_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    for code_format, code_dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
        out = torch.empty(256, dtype=dtype)
        decode_all[(1,)](codes, out, code_format)
        expected = codes.view(code_dtype).float()
        finite = ~expected.isnan()
        assert finite.sum() >= 254
        assert torch.equal(out.float()[finite], expected[finite])
