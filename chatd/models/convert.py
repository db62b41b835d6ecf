"""Turns a GGUF file of the llama family into a Hugging Face folder: safetensors, config, tokenizer and chat template.

Weights are dequantized to float32, which is what the file's blocks mean: rounding them to 16 bits moves SmolLM2's
logits by more than 1e-2. The rows of q and k are put back into the order that rotates halves. The `gguf` package is
imported here only.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatd.errors import EnvironmentProblem, ModelError
from chatd.models.digest import write_atomically
from chatd.models.model_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from chatd.models.model_folder import WEIGHTS_FILE

Progress = Callable[[str, float], None]

# GGUF's token types (tokenizer.ggml.token_type).
_CONTROL, _USER_DEFINED = 3, 4

# What a GGUF file calls the pre-tokenizer, and what the model's own tokenizer.json says there.
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
    "gpt-2": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
}

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_gguf(
    gguf_path: Path, folder: Path, *, generation: dict[str, Any] | None = None, progress: Progress | None = None
) -> None:
    """Write a Hugging Face folder with what a GGUF file holds.

    Args:
        gguf_path: A file of architecture `llama` with a byte-level BPE tokenizer.
        folder: An existing folder; each file in it appears whole or not at all.
        generation: Added to generation_config.json: sampling defaults, and `eos_token_id`, which replaces the file's.
        progress: Called with ("converting", 0 to 1).

    Raises:
        ModelError: `model_unsupported` or `model_corrupt`.
        EnvironmentProblem: The `gguf` package is not installed.
    """
    report = progress or (lambda _phase, _fraction: None)
    report("converting", 0.0)
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EnvironmentProblem(
            "the gguf package is not installed", hint='install the server: pip install "chatd[server]"'
        ) from error
    try:
        reader = GGUFReader(gguf_path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{gguf_path} is not a readable GGUF file: {error}", code="model_corrupt") from error
    report("converting", 0.2)
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{gguf_path} has the architecture {architecture!r}, not 'llama'", code="model_unsupported")
    try:
        config = _config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        documents = {
            CONFIG_FILE: config,
            GENERATION_FILE: _generation_config(config) | (generation or {}),
            TOKENIZER_FILE: _tokenizer(metadata),
            TOKENIZER_CONFIG_FILE: _tokenizer_config(metadata),
        }
        template = metadata["tokenizer.chat_template"]
    except KeyError as error:
        raise ModelError(f"{gguf_path} lacks the field {error}", code="model_corrupt") from error
    for name, document in documents.items():
        write_atomically(folder / name, json.dumps(document, ensure_ascii=False, indent=1).encode())
    write_atomically(folder / TEMPLATE_FILE, str(template).encode())
    _write_weights(
        reader.tensors, folder / WEIGHTS_FILE, config, lambda fraction: report("converting", 0.2 + 0.8 * fraction)
    )


def _config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    num_heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10_000.0)),
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _shortest(value: float) -> float:
    """Return the shortest decimal that is this float32: 1e-05 for 9.999999747378752e-06."""
    stored = struct.pack("<f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(candidate for candidate in candidates if struct.pack("<f", candidate) == stored)


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config[name] is not None}


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE with the file's control and user-defined tokens as added tokens."""
    model, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"the tokenizer {model!r} with pre-tokenizer {pre!r} is not supported", code="model_unsupported"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type == _CONTROL,
        }
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    return config


def _write_weights(tensors: Any, path: Path, config: dict[str, Any], report: Callable[[float], None]) -> None:
    """Write model.safetensors one tensor at a time, so that memory holds one tensor and not the model."""
    from gguf import dequantize

    named = sorted((_hugging_face_name(tensor.name), tensor) for tensor in tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in named:
        shape = [int(size) for size in reversed(tensor.shape)]
        num_bytes = 4 * int(tensor.n_elements)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The data starts at a multiple of 64 bytes, so that mapped tensors are aligned for vector loads.
    encoded += b" " * (-(8 + len(encoded)) % 64)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, tensor in named:
            begin, end = header[name]["data_offsets"]
            values = dequantize(tensor.data, tensor.tensor_type).reshape(header[name]["shape"])
            if name.endswith("q_proj.weight"):
                values = _rotate_halves(values, config["num_attention_heads"])
            elif name.endswith("k_proj.weight"):
                values = _rotate_halves(values, config["num_key_value_heads"])
            file.write(values.astype("<f4", order="C").tobytes())
            assert file.tell() == 8 + len(encoded) + end, f"{name} does not fill bytes {begin} to {end}"
            report(end / offset)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _hugging_face_name(name: str) -> str:
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS and parts[3] == "weight":
        return f"model.layers.{int(parts[1])}.{_LAYER_TENSORS[parts[2]]}.weight"
    raise ModelError(f"the tensor {name!r} has no place in a Llama model", code="model_unsupported")


def _rotate_halves(rows: Any, num_heads: int) -> Any:
    """Return the rows of q or k, `[num_heads * head_dim, in]`, in the order in which rotary embedding pairs i with i +
    head_dim / 2.

    GGUF files of the llama family pair 2i with 2i + 1.
    """
    num_rows, width = rows.shape
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(num_rows, width)
