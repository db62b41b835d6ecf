"""Paged caches of known content, and which kernels there are, for tests and benchmarks of the kernels."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.paged_attention import build_metadata, paged_attention


@dataclass
class Conversation:
    """One sequence: its blocks, and the K and V `[length, Hkv, D]` and Q `[length, Hq, D]` of all its positions."""

    blocks: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor

    @property
    def length(self) -> int:
        """Its positions."""
        return len(self.keys)


@dataclass
class Paged:
    """A cache and the conversations in it, all at one layer."""

    cache: KVCache
    num_q_heads: int
    layer: int
    conversations: list[Conversation]

    def attend(
        self,
        chunks: Sequence[tuple[int, int, int]],
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attention of one step; a chunk is (conversation, first position, end position)."""
        queries = [self.conversations[which].queries[first:end] for which, first, end in chunks]
        q = torch.cat(queries)
        metadata = build_metadata(
            np.cumsum([0] + [len(part) for part in queries]),
            [first for _, first, _ in chunks],
            [self.conversations[which].blocks for which, _, _ in chunks],
            layout=self.cache.layout,
            num_q_heads=self.num_q_heads,
        )
        out = torch.full((len(q), q.shape[1] * q.shape[2]), float("nan"))
        return paged_attention(q, self.cache, self.layer, metadata, out, q.shape[2] ** -0.5, window)

    def owned_slots(self) -> set[int]:
        """Slots that hold a position of some conversation."""
        size = self.cache.layout.block_size
        return {c.blocks[p // size] * size + p % size for c in self.conversations for p in range(c.length)}


def make_paged(
    lengths: Sequence[int],
    *,
    shared: dict[int, tuple[int, int]] | None = None,
    num_q_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Paged:
    """Build a `Paged` of random content at layer 1 of 2, blocks at random places.

    Args:
        lengths: of the conversations.
        shared: `shared[i] = (j, positions)`: conversation i begins with the blocks of the earlier conversation j.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: dimensions of a head.
        block_size: positions of a block.
        dtype: of the cache.
        seed: of the content and of the places.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    cache = allocate_kv_cache(sum(counts) + 3, 2, num_kv_heads, block_size, head_dim, dtype)
    places = torch.Generator().manual_seed(seed)
    free = torch.randperm(cache.num_blocks, generator=places).tolist()
    conversations: list[Conversation] = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        keys, values = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype).unbind(0)
        blocks: list[int] = []
        if shared and index in shared:
            source, positions = shared[index]
            assert positions % block_size == 0
            blocks = conversations[source].blocks[: positions // block_size]
            keys[:positions] = conversations[source].keys[:positions]
            values[:positions] = conversations[source].values[:positions]
        blocks = blocks + [free.pop() for _ in range(count - len(blocks))]
        queries = torch.randn(length, num_q_heads, head_dim, generator=generator)
        for position in range(length):
            slot = blocks[position // block_size] * block_size + position % block_size
            cache.write_slot(slot, 1, keys[position], values[position])
        conversations.append(Conversation(blocks, keys, values, queries))
    return Paged(cache, num_q_heads, 1, conversations)


def started_kernels() -> set[str]:
    """Names of the Triton kernels that a launcher starts, by the package's source."""
    calls = (
        node
        for path in Path(__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Launch"
    )
    return {call.args[0].id for call in calls if call.args and isinstance(call.args[0], ast.Name)}
