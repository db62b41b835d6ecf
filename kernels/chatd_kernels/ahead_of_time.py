"""The kernels that a model may start on a GPU, compiled without one: what each takes of registers and shared memory.

`choices` asks the launchers themselves, with tensors that have shapes and no memory. Nothing here needs a GPU; a
process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chatd_kernels.copy_blocks import gpu as copy_blocks
from chatd_kernels.gpu_device import SM_80, SM_90, DeviceFacts
from chatd_kernels.kv_cache import allocate_kv_cache
from chatd_kernels.launch import Launch
from chatd_kernels.linear import gpu as linear
from chatd_kernels.linear.gpu_kernels import sum_segments
from chatd_kernels.linear.gpu_pack import GpuWeight
from chatd_kernels.paged_attention import gpu as paged_attention
from chatd_kernels.paged_attention.batch import check_batch
from chatd_kernels.paged_attention.gpu_kernels import merge_splits
from chatd_kernels.paged_attention.gpu_schedule import GpuAttentionMetadata, build_tiles, tile_shapes
from chatd_kernels.rms_norm import gpu as rms_norm
from chatd_kernels.rope_kv_write import gpu as rope_kv_write
from chatd_kernels.sampling import gpu as sampling
from chatd_kernels.sampling.state import allocate_sampling_state
from chatd_kernels.silu_mul import gpu as silu_mul

_META = torch.device("meta")
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU to compile for: its compute capability, what launchers know of it, and its shared memory for a program."""

    capability: int
    facts: DeviceFacts
    shared_bytes: int


ARCHITECTURES = (Architecture(80, SM_80, 163 << 10), Architecture(90, SM_90, 227 << 10))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the choice of a kernel depends on in a model."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_head_norms: bool = False

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """The linear layers: name -> (out_features, in_features)."""
        attended = self.num_heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "attention's output": (self.hidden_size, attended),
            "gate and up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "logits": (self.vocab_size, self.hidden_size),
        }


QWEN3_8B = ModelShape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936, has_head_norms=True)
LLAMA_31_8B = ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
SMOLLM2_135M = ModelShape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152)
SHAPES = (QWEN3_8B, LLAMA_31_8B, SMOLLM2_135M)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, bytes that were spilled, shared memory of a program."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One kernel that a dispatcher may choose: for what, the launch, and the architecture."""

    label: str
    launch: Launch
    architecture: Architecture

    @property
    def key(self) -> str:
        """A digest of the source, and of all that its compilation depends on."""
        parts = (triton.__version__, self.launch.kernel.cache_key, _signature(self.launch), self.launch.options)
        return hashlib.sha256(repr((parts, self.architecture.capability)).encode()).hexdigest()[:32]

    def resources(self, cache_folder: Path) -> Resources:
        """Compile it, or read what an earlier compilation of the same source found."""
        path = cache_folder / f"{self.key}.json"
        if path.exists():
            return Resources(**json.loads(path.read_text()))
        target = GPUTarget("cuda", self.architecture.capability, 32)
        source = ASTSource(self.launch.kernel, *_signature(self.launch))
        compiled = triton.compile(source, target=target, options=self.launch.options)
        registers, spilled_bytes = _usage(compiled.asm["cubin"])
        resources = Resources(registers, spilled_bytes, compiled.metadata.shared)
        cache_folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(resources)))
        partial.replace(path)
        return resources


def choices(
    shape: ModelShape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    architecture: Architecture,
    *,
    block_size: int = 16,
    is_deterministic: bool = False,
) -> Iterator[Choice]:
    """Yield what a model of this shape may start."""
    for label, launch in _launches(shape, dtype, kv_dtype, architecture.facts, block_size, is_deterministic):
        yield Choice(label, launch, architecture)


def _launches(
    shape: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype, facts: DeviceFacts, block_size: int, is_fixed: bool
) -> Iterator[tuple[str, Launch]]:
    def rows(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=of, device=_META)

    x, residual, weight = (
        rows(8, shape.hidden_size),
        rows(8, shape.hidden_size),
        rows(shape.hidden_size, of=torch.float32),
    )
    yield "rms_norm", rms_norm.launches(x, weight, 1e-6, x)[0]
    yield "rms_norm, residual", rms_norm.launches(x, weight, 1e-6, x, residual)[0]
    gate_up, activation = rows(8, 2 * shape.intermediate_size), rows(8, shape.intermediate_size)
    yield "silu_mul", silu_mul.launches(gate_up, activation, is_gelu=False)[0]

    for weight_format in ("float", "int8"):
        for name, size in shape.products.items():
            yield from _product_launches(f"product, {weight_format}, {name}", size, dtype, facts, is_fixed)

    yield from _sampling_launches(rows(8, shape.vocab_size))

    cache = allocate_kv_cache(
        64, shape.num_layers, shape.num_kv_heads, block_size, shape.head_dim, kv_dtype, _META, key_group=1
    )
    pairs = torch.empty((1, 2), dtype=torch.int64, device=_META)
    yield "copy_blocks", copy_blocks.part_launch(cache.data, cache.data, pairs, cache.layout.block_bytes)
    qkv = rows(8, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    index, angles = rows(8, of=torch.int64), rows(4096, shape.head_dim // 2, of=torch.float32)
    norm = rows(shape.head_dim, of=torch.float32) if shape.has_head_norms else None
    q = rows(8, shape.num_heads, shape.head_dim)
    yield (
        "rope_kv_write",
        rope_kv_write.launches(qkv, index, index, angles, angles, cache, 1, q, norm, norm, facts=facts)[0],
    )

    shapes = tile_shapes(cache.layout, shape.num_heads, facts, is_deterministic=is_fixed)
    # One long sequence is split, many are not; of one token and of many.
    for label, num_sequences, length in (
        ("decode, split", 1, 1),
        ("decode", 256, 1),
        ("prefill, split", 1, shapes.prefill.tokens),
        ("prefill", 1, 64 * shapes.prefill.tokens),
    ):
        seen = [1 << 15] * num_sequences
        bounds = [length * i for i in range(num_sequences + 1)]
        tables = [[0] * -(-((1 << 15) + length) // block_size)] * num_sequences
        batch = check_batch(bounds, seen, tables, block_size)
        tiles = build_tiles(batch, shapes, shape.num_kv_heads, facts)
        metadata = GpuAttentionMetadata.from_host(tiles, shapes, cache.layout, shape.num_heads, _META)
        q = rows(batch.num_tokens, shape.num_heads, shape.head_dim)
        out = rows(batch.num_tokens, shape.num_heads * shape.head_dim)
        found = paged_attention.launches(q, cache, 1, metadata, out, 1.0, facts=facts)
        for launch in found:
            is_merge = launch.kernel is merge_splits
            yield f"attention, merge of {label}" if is_merge else f"attention, {label}", launch


def _product_launches(
    label: str, size: tuple[int, int], dtype: torch.dtype, facts: DeviceFacts, is_fixed: bool
) -> Iterator[tuple[str, Launch]]:
    """What a linear layer `(out_features, in_features)` may start; float weights are torch's unless bits count."""
    has_codes = "int8" in label
    if not has_codes and not is_fixed:
        return
    packed = GpuWeight(
        "int8" if has_codes else "fp16",
        size[1],
        size[0],
        torch.empty(size, dtype=torch.int8 if has_codes else dtype, device=_META),
        torch.empty(size[0], dtype=torch.float32, device=_META) if has_codes else None,
        None,
        is_fixed,
    )
    for num_rows in (1, *(32 << i for i in range(9))):
        x = torch.empty((num_rows, size[1]), dtype=dtype, device=_META)
        out = torch.empty((num_rows, size[0]), dtype=dtype, device=_META)
        for launch in linear.launches(x, packed, out, facts=facts):
            is_sum = launch.kernel is sum_segments
            yield f"{label}, {'sum of ' if is_sum else ''}{num_rows} rows", launch


def _sampling_launches(logits: torch.Tensor) -> Iterator[tuple[str, Launch]]:
    """What draws tokens may start; the later kinds of a batch start some of the first one's kernels too."""
    state = allocate_sampling_state(logits.shape[1], len(logits), len(logits), _META)
    for kind, launches in (
        ("any", sampling.launches(logits, state, len(logits), num_likeliest=20)),
        ("beams", sampling.launches(logits, state, len(logits), num_likeliest=64, has_draws=False)),
        ("plain", sampling.launches(logits, state, len(logits), is_plain=True)),
    ):
        for launch in launches:
            yield f"sampling, {launch.kernel.fn.__name__}, {kind}", launch


def _signature(launch: Launch) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Types of the arguments, values of those that are constants, and what is known of the others, as at a launch."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[index,] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            # Memory of torch begins at multiples of 512 bytes, and rows of tensors at multiples of 16.
            attributes[index,] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float) or parameter.do_not_specialize, (
                f"{parameter.name} is specialized on its value"
            )
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return signature, constants, attributes


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: spilled registers, since nothing else lies there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert found, f"no resource usage in {report!r}"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
