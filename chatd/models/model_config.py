"""What a model folder's JSON files say about the decoder and about sampling; no torch.

Field names and defaults are those of transformers' configurations. What the native decoder cannot compute is refused
here, by name, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chatd.errors import ModelError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
# What each architecture's configuration class falls back to in transformers.
_DEFAULT_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
_DEFAULT_MAX_POSITIONS = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "Qwen2ForCausalLM": 32768,
    "Qwen3ForCausalLM": 32768,
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULT_MAX_POSITIONS)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The flags of one decoder of the Llama family.

    Attributes:
        architecture: The class in transformers.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of a head; even.
        max_position_embeddings: As in config.json; an input to some rotary scalings.
        max_context: Positions that the model can be asked for.
        rms_norm_eps: Of all norms.
        rope_parameters: transformers' `rope_parameters`: `rope_type`, `rope_theta` and what the type needs.
        qkv_bias: The q, k and v projections have a bias.
        o_bias: The output projection has one.
        mlp_bias: The three MLP projections have one.
        qk_norm: Each head of q and k is normed before the rotation (Qwen3).
        tie_word_embeddings: The output layer is the embedding.
        sliding_windows: For each layer, how many positions a row sees, itself included; None sees all.
        dtype: What the makers say that the weights are in, such as "bfloat16"; None where they do not.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    max_context: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str | None = None

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k and v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How a model's makers sample from it.

    Attributes:
        stop_token_ids: Ids that end an answer: generation_config's, config's and the tokenizer's; ascending.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        repetition_penalty: 1 is off.
    """

    stop_token_ids: tuple[int, ...]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_json(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder.

    Raises:
        ModelError: `model_corrupt` where it is too large, not JSON, or not an object.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(f"{path} has {size} bytes, the limit is {max_bytes}", code="model_corrupt")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}", code="model_corrupt") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object", code="model_corrupt")
    return value


def load_decoder_config(folder: Path) -> DecoderConfig:
    """Read config.json of a model folder.

    Raises:
        ModelError: `model_no_config`, `model_corrupt`, `model_custom_code`, or `model_unsupported` where the native
            decoder lacks something that the model needs.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(
            f"{folder} has no {CONFIG_FILE}",
            code="model_no_config",
            hint="a Hugging Face model folder holds config.json, tokenizer.json and model.safetensors",
        )
    return parse_decoder_config(read_json(path), source=str(path))


def parse_decoder_config(raw: Mapping[str, Any], *, source: str = CONFIG_FILE) -> DecoderConfig:
    """Check the content of a config.json and return the decoder's flags.

    Args:
        raw: The parsed file.
        source: Named in messages.

    Raises:
        ModelError: As `load_decoder_config`.
    """
    if "auto_map" in raw:
        raise ModelError(
            f"{source} asks for code of its own (auto_map), which chatd never runs",
            code="model_custom_code",
            hint=f"supported architectures: {', '.join(SUPPORTED_ARCHITECTURES)}",
        )
    architecture = _architecture(raw, source)
    _refuse_what_is_not_built(raw, source)
    fields = _Fields(raw, source)
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads", maximum=1024)
    num_kv_heads = fields.size(
        "num_key_value_heads", default=_DEFAULT_KV_HEADS.get(architecture, num_heads), null=num_heads, maximum=1024
    )
    if num_heads % num_kv_heads:
        raise fields.corrupt(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads")
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else max(hidden_size // num_heads, 1)
    head_dim = fields.size("head_dim", default=default_head_dim, null=hidden_size // num_heads, maximum=1024)
    if head_dim % 2:
        raise fields.corrupt(f"head_dim is {head_dim}, a rotary embedding needs an even one")
    num_layers = fields.size("num_hidden_layers", maximum=1024)
    max_positions = fields.size("max_position_embeddings", default=_DEFAULT_MAX_POSITIONS[architecture])
    rope_parameters = _rope_parameters(raw, fields, max_positions)
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias", False)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        max_context=_max_context(rope_parameters, max_positions),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, minimum=0.0, maximum=1.0),
        rope_parameters=MappingProxyType(rope_parameters),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        sliding_windows=_sliding_windows(architecture, fields, num_layers),
        dtype=_dtype(raw),
    )


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read stop ids and sampling defaults of a model folder; files that are absent say nothing.

    Sampling is on where generation_config says `do_sample`, or gives a temperature and does not say.

    Raises:
        ModelError: `model_corrupt` for values out of range.
    """
    config = read_json(folder / CONFIG_FILE)
    path = folder / GENERATION_FILE
    raw = read_json(path) if path.is_file() else {}
    fields = _Fields(raw, str(path))
    stop_ids = {*_token_ids(config.get("eos_token_id")), *_token_ids(raw.get("eos_token_id")), *_tokenizer_eos(folder)}
    vocab_size = config.get("vocab_size", 0)
    stop_ids = {token_id for token_id in stop_ids if 0 <= token_id < vocab_size}
    if not fields.flag("do_sample", raw.get("temperature") is not None):
        return GenerationDefaults(
            tuple(sorted(stop_ids)), repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 10.0)
        )
    return GenerationDefaults(
        stop_token_ids=tuple(sorted(stop_ids)),
        temperature=fields.number("temperature", 1.0, 0.0, 5.0),
        top_k=int(fields.number("top_k", 0, 0, 2**31)),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 10.0),
    )


class _Fields:
    """Typed reads of a parsed file; null means the default, as in transformers."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw = raw
        self._source = source

    def corrupt(self, message: str) -> ModelError:
        return ModelError(f"{self._source}: {message}", code="model_corrupt")

    def size(self, name: str, *, default: int | None = None, null: int | None = None, maximum: int = 2**31) -> int:
        value = self._raw.get(name, default)
        if value is None:
            value = default if null is None else null
        if value is None:
            raise self.corrupt(f"{name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise self.corrupt(f"{name} is {value!r}, the range is 1 to {maximum}")
        return value

    def number(self, name: str, default: float, minimum: float, maximum: float) -> float:
        value = self._raw.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.corrupt(f"{name} is {value!r}, the range is {minimum} to {maximum}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.corrupt(f"{name} is {value!r}, not true or false")
        return value


def _unsupported(message: str, hint: str | None = None) -> ModelError:
    return ModelError(message, code="model_unsupported", hint=hint)


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(names) or f"none (model_type {raw.get('model_type')!r})"
    raise _unsupported(
        f"{source} names the architecture {found}, which chatd cannot run",
        hint=f"supported architectures: {', '.join(SUPPORTED_ARCHITECTURES)}",
    )


def _refuse_what_is_not_built(raw: Mapping[str, Any], source: str) -> None:
    if raw.get("quantization_config") is not None:
        raise _unsupported(
            f"{source} has quantized weights (quantization_config); chatd reads float32, float16 and bfloat16",
            hint="use the unquantized model and set quantization in chatd's own configuration",
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(f"{source} has hidden_act {activation!r}; the decoder computes silu only")


def _rope_parameters(raw: Mapping[str, Any], fields: _Fields, max_positions: int) -> dict[str, Any]:
    """Return one flat `rope_parameters`, from the present spelling or from `rope_theta` and `rope_scaling`."""
    given = raw.get("rope_parameters")
    if given is None:
        given = raw.get("rope_scaling")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise fields.corrupt(f"rope_parameters is a {type(given).__name__}, not an object")
    parameters = dict(given)
    rope_type = parameters.pop("type", "default")
    rope_type = parameters.setdefault("rope_type", rope_type)
    if any(isinstance(value, dict) for value in parameters.values()) or rope_type not in SUPPORTED_ROPE_TYPES:
        raise _unsupported(
            f"the rotary embedding {rope_type!r} is not supported",
            hint=f"supported rope types: {', '.join(SUPPORTED_ROPE_TYPES)}",
        )
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise _unsupported(f"partial_rotary_factor is {partial!r}; the decoder rotates whole heads")
    parameters.setdefault("rope_theta", fields.number("rope_theta", 10_000.0, 1e-3, 1e12))
    if rope_type in ("yarn", "llama3"):
        original = raw.get("original_max_position_embeddings")
        parameters.setdefault("original_max_position_embeddings", max_positions)
        if original is not None:
            parameters["original_max_position_embeddings"] = original
    numbers = _Fields(parameters, "rope_parameters")
    numbers.number("rope_theta", 10_000.0, 1e-3, 1e12)
    if rope_type != "default":
        numbers.number("factor", 1.0, 1.0, 1e4)
        if "factor" not in parameters:
            raise fields.corrupt(f"rope_parameters of type {rope_type!r} lack factor")
    if rope_type == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= parameters.keys():
        raise fields.corrupt("rope_parameters of type 'llama3' lack low_freq_factor or high_freq_factor")
    return parameters


def _max_context(rope: Mapping[str, Any], max_positions: int) -> int:
    # Dynamic scaling changes every key when the text outgrows this, which no cached block survives; so it ends here.
    if rope["rope_type"] == "yarn":
        return max(max_positions, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return max_positions


def _sliding_windows(architecture: str, fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    raw = fields._raw
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        given = raw.get("sliding_window", 4096)
        window = None if given is None else fields.size("sliding_window", default=4096)
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = fields.size("sliding_window", default=4096)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = int(fields.number("max_window_layers", 28, 0, 1024))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.corrupt(f"layer_types does not name {num_layers} layers")
    if unknown := {str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"}:
        raise _unsupported(f"layers of type {', '.join(sorted(unknown))} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(raw: Mapping[str, Any]) -> str | None:
    # The second is the spelling before transformers 5.
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None


def _token_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _tokenizer_eos(folder: Path) -> list[int]:
    """Return the id of tokenizer_config's `eos_token`, looked up among the added tokens of tokenizer.json."""
    config_path, path = folder / TOKENIZER_CONFIG_FILE, folder / TOKENIZER_FILE
    if not config_path.is_file() or not path.is_file():
        return []
    eos = read_json(config_path).get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    if not isinstance(eos, str):
        return []
    added = read_json(path, max_bytes=MAX_TOKENIZER_BYTES).get("added_tokens")
    if not isinstance(added, list):
        return []
    return [
        token["id"]
        for token in added
        if isinstance(token, dict) and token.get("content") == eos and isinstance(token.get("id"), int)
    ]
