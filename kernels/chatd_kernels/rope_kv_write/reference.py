"""Rotary embedding and KV write, slow and obvious (Su et al. 2021; halves as in transformers' rotate_half)."""

from __future__ import annotations

import torch

from chatd_kernels.kv_cache import KVCache


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: KVCache,
    layer: int,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """The contract of `chatd_kernels.rope_kv_write.rope_kv_write`."""
    layout = kv_cache.layout
    num_tokens, num_q_heads, head_dim = q_out.shape
    heads = qkv.float().view(num_tokens, num_q_heads + 2 * layout.num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_q_heads, layout.num_kv_heads, layout.num_kv_heads], dim=1)
    q, k = _norm(q, q_norm, eps), _norm(k, k_norm, eps)
    q_out.copy_(_rotate(q, cos[positions], sin[positions]))
    k = _rotate(k, cos[positions], sin[positions])
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue  # Padding, on GPUs.
        kv_cache.write_slot(slot, layer, k[token], v[token])


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    return weight.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
