"""Inside GPU kernels: numbers to and from the 8-bit codes of `kv_quantization`.

`FORMAT` is "float" (no codes), "int8", "fp8" (e4m3 by integer operations, on every device) or "fp8_native" (e4m3 by the
device's own conversion).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chatd_kernels.gpu_device import DeviceFacts


def code_format(dtype: torch.dtype, facts: DeviceFacts) -> str:
    """The `FORMAT` of a cache's dtype on a device."""
    if dtype == torch.float8_e4m3fn:
        return "fp8_native" if facts.has_fp8 else "fp8"
    return "int8" if dtype == torch.int8 else "float"


@triton.jit
def decode(b_codes, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Bytes as numbers of `DTYPE` that count `factor_of(FORMAT)`, exactly.

    "fp8" moves e4m3's fields into those of float16, which is the number times 2^-8, subnormal ones too. Its factor is
    left to the scales: they are fewer.
    """
    b_numbers = b_codes.to(tl.int8, bitcast=True)
    if FORMAT == "int8":
        # No device converts to bfloat16 at once.
        return b_numbers.to(tl.float32).to(DTYPE) if tl.bfloat16 == DTYPE else b_numbers.to(DTYPE)
    if FORMAT == "fp8_native":
        return b_numbers.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    # The sign fills the upper half: one of its copies comes to lie where the sign is, another is cleared.
    return ((b_numbers.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def factor_of(FORMAT: tl.constexpr):
    """What a number of `decode` counts."""
    return 256.0 if FORMAT == "fp8" else 1.0


@triton.jit
def encode(b_x, FORMAT: tl.constexpr):
    """Float32 numbers within the largest code as bytes, rounded to nearest, ties to even."""
    if FORMAT == "int8":
        # The sum has a unit in the last place of 1.
        return ((b_x + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    if FORMAT == "fp8_native":
        return b_x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    b_size = tl.abs(b_x)
    b_bits = b_size.to(tl.int32, bitcast=True)
    b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the unit in the last place of this sum.
    b_subnormal = (b_size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    b_code = tl.where(b_size < 0.015625, b_subnormal, b_normal)
    return (b_code | tl.where(b_x < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def scale_of(b_maximum, b_spoilt, FORMAT: tl.constexpr):
    """Return what a code counts, and its inverse, for vectors of a largest size.

    A scale is 0 where all is zero. It is NaN, and its inverse 0, where `b_spoilt`, the sum of all numbers times 0, is
    not 0 (a maximum passes over NaN).
    """
    LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
    b_has_size = b_maximum > 1e-30
    b_scale = tl.where(b_has_size, b_maximum / LARGEST, 0.0) + b_spoilt
    b_inverse = tl.where(b_has_size & (b_spoilt == 0.0), LARGEST / b_maximum, 0.0)
    return b_scale, b_inverse
