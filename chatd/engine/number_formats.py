"""Which number formats the engine computes in and keeps KV and weights in, on the device that was chosen. No torch.

What does not go together is refused here, by the settings' names, before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatd.engine.options import EngineOptions
from chatd.errors import ConfigError

_WEIGHTS_OF = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_DTYPE_OF = {weights: dtype for dtype, weights in _WEIGHTS_OF.items()}
_CPU_KV_DTYPES = ("float16", "float32")
_CPU_WEIGHTS = ("fp16", "int8", "fp32")
_QUANTIZED_KV = ("fp8", "int8")


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """The formats that were chosen.

    Attributes:
        dtype: Of activations and logits: "float16", "bfloat16" or "float32".
        kv_dtype: Of the KV cache: one of these, "fp8" or "int8".
        weights: Of the linear layers: "fp16", "bf16", "fp32" or "int8".
    """

    dtype: str
    kv_dtype: str
    weights: str


def formats_for_cpu(options: EngineOptions) -> NumberFormats:
    """Choose formats for the CPU: activations are float32.

    Raises:
        ConfigError: The CPU's kernels have no such format.
    """
    if options.dtype not in ("auto", "float32"):
        raise ConfigError(
            f"dtype is {options.dtype}, the CPU computes in float32", param="model.dtype", hint="leave dtype out"
        )
    kv_dtype = "float16" if options.kv_dtype == "auto" else options.kv_dtype
    if kv_dtype not in _CPU_KV_DTYPES:
        raise ConfigError(
            f"kv_dtype is {kv_dtype}, on the CPU it is one of {', '.join(_CPU_KV_DTYPES)}", param="model.kv_dtype"
        )
    weights = "fp16" if options.quantization == "auto" else options.quantization
    if weights not in _CPU_WEIGHTS:
        raise ConfigError(
            f"quantization is {weights}, on the CPU it is one of {', '.join(_CPU_WEIGHTS)}",
            param="model.quantization",
        )
    return NumberFormats("float32", kv_dtype, weights)


def formats_for_gpu(options: EngineOptions, stored: str | None, *, has_bfloat16: bool) -> NumberFormats:
    """Choose formats for a GPU: those of the model's makers where the settings say nothing.

    Args:
        options: What was asked for.
        stored: What the model says that its weights are in.
        has_bfloat16: Whether the device computes in bfloat16.

    Raises:
        ConfigError: Formats that were asked for do not go together, or the device lacks one.
    """
    dtype: str = options.dtype
    if dtype == "auto":
        # A format of 16 bits that was asked for by the weights' name; else the makers', and never 32 bits unasked.
        dtype = _DTYPE_OF.get(options.quantization, "float16" if stored == "float16" else "bfloat16")
        if dtype == "bfloat16" and not has_bfloat16 and options.quantization != "bf16":
            dtype = "float16"
    if dtype == "bfloat16" and not has_bfloat16:
        raise ConfigError("dtype is bfloat16, which this GPU does not compute in", param="model.dtype")
    weights = options.quantization if options.quantization == "int8" else _WEIGHTS_OF[dtype]
    if options.quantization not in ("auto", weights):
        raise ConfigError(
            f"quantization is {options.quantization} and dtype {dtype}; on a GPU weights that are not int8 have the"
            " dtype of activations",
            param="model.quantization",
            hint="leave one of the two out",
        )
    kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
    if kv_dtype not in (dtype, *_QUANTIZED_KV):
        raise ConfigError(
            f"kv_dtype is {kv_dtype} and dtype {dtype}; on a GPU the KV cache has the dtype of activations, or is "
            + " or ".join(_QUANTIZED_KV),
            param="model.kv_dtype",
            hint="leave kv_dtype out",
        )
    return NumberFormats(dtype, kv_dtype, weights)
