"""Reads a model folder's tensors by transformers' names, memory-mapped, and says by name what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from chatd.errors import ModelError
from chatd.models.model_config import DecoderConfig
from chatd.models.model_folder import weight_files
from chatd.models.safetensors_file import DTYPE_BYTES, TensorEntry, read_header

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
_MAX_NAMED = 5


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a model of this configuration has."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        if config.qk_norm:
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                shapes[f"{prefix}{name}.weight"] = (head_dim,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's tensors start with."""
    return f"model.layers.{layer}."


class WeightReader:
    """The tensors of a model folder, checked against a configuration when it opens.

    Tensors are views of the mapped files and keep them mapped; threads may read at the same time.

    Raises:
        ModelError: `model_corrupt` naming tensors that are missing, unexpected, or of the wrong shape;
            `model_unsupported` for a dtype that is not float32, float16 or bfloat16.
    """

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        headers = {path: read_header(path) for path in weight_files(folder)}
        self._path_of = {name: path for path, entries in headers.items() for name in entries}
        _check_tensors(folder, {name: entry for entries in headers.values() for name, entry in entries.items()}, config)
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> WeightReader:
        for path in set(self._path_of.values()):
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored."""
        tensor: torch.Tensor = self._files[self._path_of[name]].get_tensor(name)
        return tensor


def _check_tensors(folder: Path, found: Mapping[str, TensorEntry], config: DecoderConfig) -> None:
    expected = expected_shapes(config)
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        ignored.add(OUTPUT)
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelError(f"{folder} lacks {_list(missing)}, which config.json calls for", code="model_corrupt")
    if unexpected := sorted(found.keys() - expected.keys() - ignored):
        raise ModelError(f"{folder} has {_list(unexpected)}, which {config.architecture} has not", code="model_corrupt")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ModelError(
                f"{name} has the shape {list(found[name].shape)}, config.json calls for {list(shape)}",
                code="model_corrupt",
            )
        if found[name].dtype not in DTYPE_BYTES:
            raise ModelError(
                f"{name} is stored as {found[name].dtype}; chatd reads {', '.join(DTYPE_BYTES)}",
                code="model_unsupported",
            )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
