"""What `POST /v1/chat/completions` takes, and what it refuses.

Three kinds of fields. Those that are done are in `ChatRequest`. Those that only inform (`INFORMATIONAL`) are taken and
change nothing. All others would change the answer, and are refused by name unless their value is neutral: null, an
empty list or object, false, or what `NEUTRAL` says of that field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from chatd.engine.sampling import MAX_BEAM_WIDTH, BeamSearch
from chatd.errors import InvalidRequest
from chatd.protocol import Message, Params, Role, invalid_field, why_not_json
from chatd.protocol.ranges import MAX_TOP_LOGPROBS, check_stop_strings

MAX_MESSAGES = 4096
MAX_CHOICES = 8
CONVERSATION_ID_CHARS = 256

INFORMATIONAL = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    }
)
"""Taken, and without effect on the answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "echo": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "top_a": (0, 0.0),
    "typical_p": (1, 1.0),
}
"""For fields that are not done: the values that ask for nothing."""

UNSUPPORTED = frozenset(
    {
        *NEUTRAL,
        "tools",
        "functions",
        "audio",
        "web_search_options",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "bad_words",
        "continue_final_message",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "prefix",
    }
)
"""Known names of other servers and of OpenAI that would change the answer."""

_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_FIELDS = frozenset({"role", "content"})
_INFORMATIONAL_MESSAGE_FIELDS = frozenset({"id", "annotations"})


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are done. A field that is null is as if it were absent.

    `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos` and those of a beam search are
    named as in vLLM.
    """

    model: str
    messages: list[Any]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[Annotated[str, msgspec.Meta(max_length=256)]] | None = None
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=64)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_cache_key: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: bool | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    beam_width: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    @property
    def num_choices(self) -> int:
        """Answers that are wanted."""
        return self.n or 1


_FIELDS = frozenset(ChatRequest.__struct_fields__)


def decode_chat_request(body: bytes) -> tuple[ChatRequest, list[Message], Params]:
    """Return what a body asks for.

    Raises:
        InvalidRequest: Names the field in `param`, as OpenAI does.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {why_not_json(body, error)}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the body is not a JSON object", code="invalid_json")
    fields = {name: value for name, value in raw.items() if name in _FIELDS}
    for name, value in raw.items():
        if name not in _FIELDS and name not in INFORMATIONAL and not _is_neutral(name, value):
            raise _refused(name)
    try:
        request = msgspec.convert(fields, ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    beam_search_of(request)
    return request, _messages(request.messages), _params(request)


def beam_search_of(request: ChatRequest) -> BeamSearch | None:
    """Return the search that a request asks for, if it does.

    Raises:
        InvalidRequest: A field only means something to a search, or nothing to one.
    """
    width = request.beam_width if request.best_of is None else request.best_of
    if not request.use_beam_search:
        # Drawing more answers than are returned is not done; the best of as many is all of them.
        only_for_search = (
            ("best_of", request.best_of, (None, 1, request.num_choices)),
            ("beam_width", request.beam_width, (None, 1)),
            ("length_penalty", request.length_penalty, (None, 1.0)),
            ("early_stopping", request.early_stopping, (None, False)),
        )
        for name, value, neutral in only_for_search:
            if value not in neutral:
                raise InvalidRequest(
                    f"{name} needs use_beam_search to be true", code="unsupported_parameter", param=name
                )
        return None
    for name, given in (("stream", request.stream), ("stop", request.stop), ("logprobs", request.logprobs)):
        if given:
            raise InvalidRequest(
                f"{name} is not supported with use_beam_search", code="unsupported_parameter", param=name
            )
    if request.beam_width not in (None, width):
        raise InvalidRequest(f"beam_width is {request.beam_width}, best_of is {width}", param="beam_width")
    width = request.num_choices if width is None else width
    if request.num_choices > width:
        raise InvalidRequest(f"n is {request.num_choices}, the beam width is {width}", param="n")
    return BeamSearch(
        width=width,
        num_returned=request.num_choices,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=False if request.early_stopping is None else request.early_stopping,
    )


def _is_neutral(name: str, value: Any) -> bool:
    neutral = NEUTRAL.get(name, ())
    if value is False:
        # It asks for nothing, unless the field is a number or on by default.
        return not neutral or any(known is False for known in neutral)
    if value is None or value == [] or value == {}:
        return True
    return any(type(value) is type(known) and value == known for known in neutral)


def _refused(name: str) -> InvalidRequest:
    shown = name[:64]
    if name in UNSUPPORTED:
        neutral = NEUTRAL.get(name)
        hint = f"leave it out, or send {neutral[0]!r}" if neutral else "leave it out"
        return InvalidRequest(f"{shown} is not supported", code="unsupported_parameter", param=shown, hint=hint)
    return InvalidRequest(f"{shown!r} is not a parameter", code="unknown_parameter", param=shown)


def _messages(raw: list[Any]) -> list[Message]:
    if not raw:
        raise InvalidRequest("there are no messages", param="messages")
    if len(raw) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(raw)} messages, the limit is {MAX_MESSAGES}", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(raw)]


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} is not an object", param=where)
    name = raw.get("role")
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}.role is missing", param=f"{where}.role")
    role = _ROLES.get(name)
    if role is None:
        known = name in ("tool", "function")
        what = "not supported" if known else f"none of {', '.join(_ROLES)}"
        raise InvalidRequest(
            f"{where}.role {name[:32]!r} is {what}",
            code="unsupported_parameter" if known else None,
            param=f"{where}.role",
        )
    for field, value in raw.items():
        if field in _MESSAGE_FIELDS or field in _INFORMATIONAL_MESSAGE_FIELDS or _is_neutral(field, value):
            continue
        raise InvalidRequest(
            f"{where}.{field[:64]} is not supported", code="unsupported_parameter", param=f"{where}.{field[:64]}"
        )
    return Message(role=role, content=_content(raw.get("content"), f"{where}.content"))


def _content(raw: Any, where: str) -> str:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise InvalidRequest(f"{where} is neither text nor a list of parts", param=where)
    texts = []
    for i, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            raise InvalidRequest(
                f"{where}[{i}] is {kind[:32]!r}, this model reads text",
                code="unsupported_parameter",
                param=f"{where}[{i}].type",
            )
        else:
            raise InvalidRequest(f"{where}[{i}] is no part with a type and its text", param=f"{where}[{i}]")
    return "".join(texts)


def _params(request: ChatRequest) -> Params:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    check_stop_strings(tuple(stop))
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return Params(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        max_tokens=most,
        min_tokens=request.min_tokens,
        seed=request.seed,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias or None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        ignore_eos=request.ignore_eos,
    )
