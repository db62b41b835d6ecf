"""K and V in 8 bits, with one scale per token, KV head and K or V; slow and obvious.

A vector x is stored as codes c and the scale s = max|x| / largest, so that x ≈ c s. The scale depends on this token's
vector alone: nothing that comes later can change what is stored. A vector that holds a NaN or an infinity has the scale
NaN, so that it spoils what reads it, as it would in 16 bits.
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Format -> the largest code."""

SCALE_BYTES = 4
"""Scales are float32."""

SMALLEST_MAXIMUM = 1e-30
"""A vector that is smaller is stored as zeros: its inverse scale would overflow."""


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype holds codes and scales."""
    return dtype in LARGEST


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes as bytes `[..., head_dim]` uint8, and scales `[...]` float32, of vectors `[..., head_dim]`."""
    x, largest = x.float(), LARGEST[dtype]
    maximum = x.abs().amax(-1)
    inverse = torch.where(maximum > SMALLEST_MAXIMUM, largest / maximum, torch.zeros_like(maximum))
    scaled = (x * inverse[..., None]).nan_to_num(0.0).clamp(-largest, largest)
    codes = scaled.to(dtype) if dtype != torch.int8 else scaled.round().to(dtype)
    scales = torch.where(maximum > SMALLEST_MAXIMUM, maximum / largest, torch.zeros_like(maximum))
    return codes.view(torch.uint8), scales + (x * 0).sum(-1)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return vectors `[..., head_dim]` float32 of bytes and scales."""
    return codes.contiguous().view(dtype).float() * scales[..., None]
