"""Builds a decoder from a model folder: fuses and packs the weights, a layer at a time, on all threads.

For a GPU each tensor goes from the mapped file to its place on the device, so the host holds no second copy of any.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from chatd.errors import ConfigError, ModelError
from chatd.models.attention import Attention
from chatd.models.decoder import Decoder, DecoderLayer, DecoderWeights
from chatd.models.layers import GatedMLP
from chatd.models.model_config import DecoderConfig, load_decoder_config
from chatd.models.quantization import PackedLinear, pack_linear
from chatd.models.weights import EMBEDDING, FINAL_NORM, OUTPUT, WeightReader, layer_prefix
from chatd_kernels.dispatch import backend_of

Progress = Callable[[str, float], None]

# The kernels work on vectors of 16 numbers.
_VECTOR = 16


def load_decoder(
    folder: Path,
    *,
    quantization: str = "fp16",
    max_num_batched_tokens: int = 512,
    max_model_len: int | None = None,
    max_num_logits: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    is_deterministic: bool = False,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> Decoder:
    """Load a model; no KV cache is bound yet.

    Args:
        folder: A checked model folder (`registry.resolve`).
        quantization: Format of the linear layers' weights: "fp16", "int8", "fp32", or on a GPU "bf16".
        max_num_batched_tokens: Most rows of a step.
        max_model_len: Most tokens of a context; the model's own limit where None.
        max_num_logits: Rows of logits that there is room for from the start.
        device: Where it runs.
        dtype: Of activations; float32 on the CPU.
        is_deterministic: Whether a row's bits may depend on that row alone; on the CPU they never depend on more.
        num_threads: That pack weights.
        progress: Called with ("loading weights", 0 to 1).

    Raises:
        ModelError: The folder's tensors do not fit its configuration, or the kernels cannot run its sizes.
        ConfigError: `max_model_len` beyond the model's context.
    """
    config = load_decoder_config(folder)
    _check_sizes(config)
    context = config.max_context if max_model_len is None else max_model_len
    if context > config.max_context:
        raise ConfigError(
            f"max_model_len is {context}, the model's context has {config.max_context} tokens",
            param="model.max_model_len",
            hint=f"--max-model-len {config.max_context} or less",
        )
    with WeightReader(folder, config) as reader:
        return pack_decoder(
            config,
            reader,
            quantization=quantization,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=context,
            max_num_logits=max_num_logits,
            device=torch.device(device),
            dtype=dtype,
            is_deterministic=is_deterministic,
            num_threads=num_threads,
            progress=progress,
        )


class Tensors(Protocol):
    """A model's tensors by transformers' names (`weights.expected_shapes`), for any thread."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, which is copied where it has to stay."""
        ...


def pack_decoder(
    config: DecoderConfig,
    tensors: Tensors,
    *,
    quantization: str,
    max_num_batched_tokens: int,
    max_model_len: int,
    max_num_logits: int = 0,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    is_deterministic: bool = False,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> Decoder:
    """Make a decoder of tensors, wherever they come from; arguments are those of `load_decoder`."""
    packer = _Packer(tensors, config, quantization, device, dtype, is_deterministic=is_deterministic)
    weights = packer.pack(num_threads, progress or (lambda _phase, _fraction: None))
    return Decoder(
        config,
        weights,
        device=device,
        dtype=dtype,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_num_logits=max_num_logits,
    )


def _check_sizes(config: DecoderConfig) -> None:
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
    }
    for name, size in sizes.items():
        if size % _VECTOR:
            raise ModelError(f"{name} is {size}; the kernels need a multiple of {_VECTOR}", code="model_unsupported")


class _Packer:
    """Turns stored tensors into the decoder's weights."""

    def __init__(
        self,
        reader: Tensors,
        config: DecoderConfig,
        quantization: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_deterministic: bool,
    ) -> None:
        self._reader = reader
        self._config = config
        self._quantization = quantization
        self._device = device
        self._dtype = dtype
        self._is_deterministic = is_deterministic

    def pack(self, num_threads: int, report: Progress) -> DecoderWeights:
        """Pack all layers and the output, on `num_threads` threads: packing is single-threaded and leaves the GIL."""
        config = self._config
        total = config.num_layers + 1
        report("loading weights", 0.0)
        # A copy: a view would page in while answers stream, and die with the file if somebody truncates it.
        stored = self._reader.read(EMBEDDING)
        # On the CPU rows are converted as they are looked up.
        embedding = stored.to(self._device, stored.dtype if self._is_on_cpu else self._dtype, copy=True)
        with ThreadPoolExecutor(num_threads) as pool:
            # The output is the largest piece, so it goes first.
            output = pool.submit(
                self._pack, embedding if config.tie_word_embeddings else self._reader.read(OUTPUT), None
            )
            pending = [pool.submit(self._layer, index) for index in range(config.num_layers)]
            layers = []
            for index, future in enumerate(pending):
                layers.append(future.result())
                report("loading weights", (index + 1) / total)
            packed_output = output.result()
        report("loading weights", 1.0)
        return DecoderWeights(
            embedding=embedding,
            layers=layers,
            final_norm=self._vector(FINAL_NORM),
            output=packed_output,
        )

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, layer_prefix(index)
        attention = f"{prefix}self_attn."
        mlp = f"{prefix}mlp."
        return DecoderLayer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            attention=Attention(
                layer=index,
                qkv=self._fused(
                    [f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"], has_bias=config.qkv_bias
                ),
                output=self._fused([f"{attention}o_proj"], has_bias=config.o_bias),
                scale=config.head_dim**-0.5,
                window=config.sliding_windows[index],
                q_norm=self._vector(f"{attention}q_norm.weight") if config.qk_norm else None,
                k_norm=self._vector(f"{attention}k_norm.weight") if config.qk_norm else None,
                eps=config.rms_norm_eps,
            ),
            post_attention_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            mlp=GatedMLP(
                gate_up=self._fused([f"{mlp}gate_proj", f"{mlp}up_proj"], has_bias=config.mlp_bias),
                down=self._fused([f"{mlp}down_proj"], has_bias=config.mlp_bias),
            ),
        )

    @property
    def _is_on_cpu(self) -> bool:
        """Whether the CPU's kernels run the model: on CPU tensors that Triton interprets they do not."""
        return backend_of(self._device.type) == "cpu"

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return pack_linear(
            weight, bias, self._quantization, device=self._device, is_deterministic=self._is_deterministic
        )

    def _fused(self, names: list[str], *, has_bias: bool) -> PackedLinear:
        """Pack projections of the same input as one, their rows in the order of the names."""
        return self._pack(
            self._joined([f"{name}.weight" for name in names]),
            self._joined([f"{name}.bias" for name in names]) if has_bias else None,
        )

    def _joined(self, names: list[str]) -> torch.Tensor:
        """Return tensors one below the other; for a GPU on the device, each copied to its place there."""
        parts = [self._reader.read(name) for name in names]
        if self._is_on_cpu:
            return torch.cat(parts)
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        joined = torch.empty(shape, dtype=self._dtype, device=self._device)
        end = 0
        for part in parts:
            joined[end : end + len(part)].copy_(part)
            end += len(part)
        return joined

    def _vector(self, name: str) -> torch.Tensor:
        return self._reader.read(name).to(self._device, torch.float32, copy=True)
