"""The bodies of the OpenAI door: models, completions, chunks of a stream, and errors. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from chatd.errors import ChatdError
from chatd.protocol import Logprob, Usage

FinishReason = Literal["stop", "length"]
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "stop_string": "stop",
    "cancelled": "stop",
    "max_output_tokens": "length",
    "context": "length",
    "kv_exhausted": "length",
    "draining": "length",
}
DONE = b"data: [DONE]\n\n"


class _Out(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is sent."""


class CompletionUsage(_Out, frozen=True, kw_only=True):
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def of(cls, usage: Usage) -> CompletionUsage:
        """Build from the native form."""
        return cls(
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            total_tokens=usage.input_tokens + usage.output_tokens,
            prompt_tokens_details={"cached_tokens": usage.cached_tokens},
        )


class Delta(_Out, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(_Out, frozen=True, kw_only=True):
    """What a chunk adds to one choice."""

    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: dict[str, Any] | None = None
    index: int = 0


class Chunk(_Out, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChunkChoice]
    object: str = "chat.completion.chunk"


class ChunkWithUsage(Chunk, frozen=True, kw_only=True):
    """An event of a stream whose client asked for usage: null in all but the last."""

    usage: CompletionUsage | None = None


class AnswerMessage(_Out, frozen=True, kw_only=True):
    """A whole answer."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(_Out, frozen=True, kw_only=True):
    """One answer of a completion."""

    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None
    index: int = 0


class ChatCompletion(_Out, frozen=True, kw_only=True):
    """An answer that is not streamed."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[Choice]
    usage: CompletionUsage
    object: str = "chat.completion"


_encoder = msgspec.json.Encoder()


def encode_body(body: Any) -> bytes:
    """Return a body's JSON."""
    return _encoder.encode(body)


def encode_event(body: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


def finish_reason_of(reason: str) -> FinishReason:
    """Return OpenAI's word for a reason of the protocol."""
    return _FINISH_REASONS.get(reason, "stop")


def logprobs_of(entries: Sequence[Logprob] | None) -> dict[str, Any] | None:
    """Return OpenAI's form of log probabilities; None where there are none."""
    if entries is None:
        return None
    return {
        "content": [
            {
                **_token(entry.token, entry.logprob),
                "top_logprobs": [_token(token, logprob) for token, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def error_body(error: ChatdError) -> dict[str, Any]:
    """Return an error in OpenAI's shape; `param` and `code` are always there."""
    body: dict[str, Any] = {
        "message": error.message if error.hint is None else f"{error.message} ({error.hint})",
        "type": error.error_type,
        "param": error.param,
        "code": error.error_code,
    }
    if error.retry_after_ms is not None:
        body["retry_after_ms"] = error.retry_after_ms
    return {"error": body}


def model_body(model_id: str, created: int, context: int) -> dict[str, Any]:
    """Return one entry of `/v1/models`."""
    return {"id": model_id, "object": "model", "created": created, "owned_by": "chatd", "max_model_len": context}
