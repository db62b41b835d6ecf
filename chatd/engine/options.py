"""What the engine is started with: one struct, the first frame on the pipe. No torch."""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

from chatd.engine.messages import LENGTH_PREFIX_BYTES

STACKS_SIGNAL = getattr(signal, "SIGUSR2", signal.SIGTERM)
"""The engine writes the stacks of its threads to stderr when it gets this signal."""


EXIT_PROTOCOL = 70
"""Exit code of the engine's process where the front sends what is no message: the two are not of one version."""

EXIT_DEVICE_FAULT = 71
"""Likewise where the device cannot be used any more by the process; another one may."""


class TenantShare(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's part of the machine.

    Attributes:
        weight: Beside the other tenants' weights.
        floor: Part of the pool, 0 to 0.5, that no other tenant can take.
    """

    weight: float = 1.0
    floor: float = 0.0


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the engine's process is told; it reads no settings of its own.

    Attributes:
        model_id: The name that clients use.
        model_path: A checked folder; the engine fetches and converts nothing.
        model_digest: Of weights and config; part of every KV namespace.
        quantization: Format of the linear layers' weights; "auto" is fp16 on the CPU and `dtype` on a GPU.
        dtype: Format of activations; "auto" is float32 on the CPU and on a GPU that of the model's makers.
        kv_dtype: Format of the KV cache; "auto" is float16 on the CPU and `dtype` on a GPU.
        device: Where the model runs; "auto" is a GPU where there is one.
        gpu_memory_utilization: Part of a GPU's memory that may be used, all processes together.
        enforce_eager: Whether a GPU captures no graphs.
        deterministic: Whether a GPU computes each request alike whatever is beside it; the CPU always does.
        max_model_len: Tokens of a context; the model's own limit where None. Lowered to what fits the pool.
        block_size: Tokens of a block.
        kv_memory_bytes: Size of the pool; chosen from free memory where None.
        host_memory_bytes: Size of the host's buffer for blocks that the pool has no room for; 0 is off.
        disk_space_bytes: Size of the files that keep such blocks; 0 is off.
        disk_directory: Where they are.
        max_num_seqs: Requests in one batch.
        max_num_batched_tokens: Rows of one step.
        max_queued_requests: Requests that may wait, all tenants together.
        num_threads: Of the CPU backend; 0 takes what the affinity and the cgroup's quota allow.
        tenants: Shares by tenant; others have the default.
        log_level: Least severe event that is written to stderr.
        decision_log: File of the decision log; None writes none.
        decision_log_limit_bytes: Its largest size.
    """

    model_id: str
    model_path: str
    model_digest: str
    quantization: Literal["auto", "fp16", "bf16", "int8", "fp32"] = "auto"
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    kv_dtype: Literal["auto", "float16", "bfloat16", "float32", "fp8", "int8"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    deterministic: bool = False
    max_model_len: int | None = None
    block_size: int = 16
    kv_memory_bytes: int | None = None
    host_memory_bytes: int = 0
    disk_space_bytes: int = 0
    disk_directory: str = ""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 4096
    num_threads: int = 0
    tenants: dict[str, TenantShare] = {}
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    decision_log: str | None = None
    decision_log_limit_bytes: int = 2**30


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineOptions)


def encode_options(options: EngineOptions) -> bytes:
    """Return the frame of the options."""
    body = _encoder.encode(options)
    return len(body).to_bytes(LENGTH_PREFIX_BYTES, "big") + body


def decode_options(body: bytes | memoryview) -> EngineOptions:
    """Decode the body of the options' frame."""
    return _decoder.decode(body)
