"""Attention on a GPU: decode as a share of the bandwidth of copies, prefill beside torch's flash attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from chatd.bench.gpu.parts import Bench, NoRoom, Rows
from chatd.bench.gpu.timing import NUM_IN_RUN, seconds_of
from chatd_kernels.kv_cache import allocate_kv_cache
from chatd_kernels.paged_attention import build_metadata, paged_attention

BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 4096, 32_768)
PREFILLS = (512, 2048, 8192)
_ROOM = 0.8
"""Of what is free, what a cache may take."""
_BEYOND_CACHES = 256 << 20
"""Layers that are read one after the other hold so many bytes, so that none is found in the card's own cache."""
_MOST_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a model's attention, as Qwen3-8B's and Llama-3.1-8B's, and how its cache stores them."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None

    def layer_bytes(self, batch: int, length: int) -> int:
        """Bytes of so many sequences' K and V in one layer, scales of 8-bit formats left out."""
        dtype = self.kv_dtype or self.dtype
        return batch * length * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


class DecodeBatch:
    """One decode step's attention of one layer over a cache of random content.

    Args:
        heads: Of the model.
        batch: Sequences.
        length: Tokens of each, the new one included.
        device: Where it runs.
        num_layers: Of the cache; each call reads the next one.
        is_shuffled: Whether a sequence's blocks lie at random places, or one after the other.
    """

    def __init__(
        self,
        heads: Heads,
        batch: int,
        length: int,
        device: torch.device,
        *,
        num_layers: int = 1,
        is_shuffled: bool = True,
    ) -> None:
        blocks = -(-length // heads.block_size)
        self._cache = allocate_kv_cache(
            batch * blocks,
            num_layers,
            heads.num_kv_heads,
            heads.block_size,
            heads.head_dim,
            heads.kv_dtype or heads.dtype,
            device,
        )
        if not self._cache.layout.is_quantized:
            self._cache.data.normal_()
        generator = torch.Generator().manual_seed(0)
        places = torch.randperm(batch * blocks, generator=generator) if is_shuffled else torch.arange(batch * blocks)
        self._metadata = build_metadata(
            list(range(batch + 1)),
            [length - 1] * batch,
            places.view(batch, blocks).numpy(),
            layout=self._cache.layout,
            num_q_heads=heads.num_q_heads,
            device=device,
        )
        self._q = torch.randn(batch, heads.num_q_heads, heads.head_dim, device=device).to(heads.dtype)
        self._out = torch.empty(batch, heads.num_q_heads * heads.head_dim, dtype=heads.dtype, device=device)
        self.num_layers = num_layers
        self._layer = 0
        self._scale = heads.head_dim**-0.5
        layout = self._cache.layout
        self.bytes_read = batch * length * 2 * layout.num_kv_heads * layout.head_stride // layout.block_size
        self.bytes_read *= layout.element_bytes

    def attend(self) -> None:
        """Compute one layer."""
        self._layer = (self._layer + 1) % self.num_layers
        paged_attention(self._q, self._cache, self._layer, self._metadata, self._out, self._scale)


def decode_rows(
    bench: Bench,
    heads: Heads | None = None,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
) -> Rows:
    """Yield decode attention of one layer by batch and context, paged and contiguous."""
    heads = heads or Heads()
    for context in contexts:
        for batch in batches:
            seconds = {}
            num_bytes = 0
            layer_bytes = heads.layer_bytes(batch, context)
            if layer_bytes > _ROOM * bench.stream.memory().free:
                continue
            num_layers = min(_MOST_LAYERS, -(-_BEYOND_CACHES // layer_bytes))
            for is_shuffled in (True, False):
                work = DecodeBatch(heads, batch, context, bench.device, num_layers=num_layers, is_shuffled=is_shuffled)
                seconds[is_shuffled] = seconds_of(
                    work.attend, bench.stream, budget_s=0.1, num_in_run=max(NUM_IN_RUN, num_layers)
                )
                num_bytes = work.bytes_read
                del work
            bandwidth = num_bytes / seconds[True]
            yield {
                "KV": str(heads.kv_dtype or heads.dtype).removeprefix("torch."),
                "batch": batch,
                "context": context,
                "MiB read": num_bytes / (1 << 20),
                "µs": seconds[True] * 1e6,
                "GB/s": bandwidth / 1e9,
                "share of copies": bandwidth / bench.copy_bandwidth if bench.copy_bandwidth else None,
                "µs beyond copies": (seconds[True] - num_bytes / bench.copy_bandwidth) * 1e6
                if bench.copy_bandwidth
                else None,
                "paged / contiguous": seconds[True] / seconds[False],
            }


def prefill_rows(bench: Bench, heads: Heads | None = None, lengths: Sequence[int] = PREFILLS) -> Rows:
    """Yield causal attention of one whole prompt, in TFLOP/s, beside torch's on contiguous K and V."""
    heads = heads or Heads()
    for length in lengths:
        blocks = -(-length // heads.block_size)
        cache = allocate_kv_cache(
            blocks, 1, heads.num_kv_heads, heads.block_size, heads.head_dim, heads.dtype, bench.device
        )
        cache.data.normal_()
        places = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        metadata = build_metadata(
            [0, length],
            [0],
            places[None].numpy(),
            layout=cache.layout,
            num_q_heads=heads.num_q_heads,
            device=bench.device,
        )
        q = torch.randn(length, heads.num_q_heads, heads.head_dim, device=bench.device).to(heads.dtype)
        out = torch.empty(length, heads.num_q_heads * heads.head_dim, dtype=heads.dtype, device=bench.device)
        ours = seconds_of(
            partial(paged_attention, q, cache, 0, metadata, out, heads.head_dim**-0.5), bench.stream, budget_s=0.1
        )
        keys, values = (
            torch.randn(2, 1, heads.num_kv_heads, length, heads.head_dim, device=bench.device).to(heads.dtype).unbind(0)
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            theirs = seconds_of(
                partial(
                    torch.nn.functional.scaled_dot_product_attention,
                    q.transpose(0, 1)[None],
                    keys,
                    values,
                    is_causal=True,
                    enable_gqa=True,
                ),
                bench.stream,
                budget_s=0.1,
            )
        flops = 2 * length * (length + 1) * heads.num_q_heads * heads.head_dim
        yield {
            "tokens": length,
            "ours µs": ours * 1e6,
            "ours TFLOP/s": flops / ours / 1e12,
            "SDPA µs": theirs * 1e6,
            "SDPA TFLOP/s": flops / theirs / 1e12,
            "SDPA / ours": theirs / ours,
        }


def layout_rows(
    bench: Bench, heads: Heads | None = None, batch: int = 64, length: int = 32_768, num_layers: int = 4
) -> Rows:
    """Yield decode attention of one layer, where a block holds several layers and where it holds this one alone.

    Raises:
        NoRoom: The larger one does not fit the card.
    """
    heads = heads or Heads()
    wanted, free = num_layers * heads.layer_bytes(batch, length), bench.stream.memory().free
    if wanted > _ROOM * free:
        raise NoRoom(f"{wanted / 2**30:.1f} GiB are wanted, {free / 2**30:.1f} GiB are free")
    for name, layers in (("block-major", num_layers), ("layer-major", 1)):
        work = DecodeBatch(heads, batch, length, bench.device, num_layers=layers)
        seconds = seconds_of(work.attend, bench.stream, num_in_run=num_layers)
        yield {
            "layout": name,
            "layers in a block": layers,
            "batch": batch,
            "context": length,
            "µs": seconds * 1e6,
            "GB/s read": work.bytes_read / seconds / 1e9,
        }
        del work
