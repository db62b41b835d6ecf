"""Sampling parameters as a person types them: `temperature=0.7 stop=["END"]`."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from chatd.errors import InvalidRequest
from chatd.protocol import Params, invalid_field
from chatd.protocol.ranges import BIAS_RANGE, MAX_LOGIT_BIAS, RANGES, Range, check_range

_STRUCTURED = ("stop", "stop_token_ids", "logit_bias")
# A value goes on up to the next name, so it may hold blanks.
_NAME = re.compile(r"(?:^|\s+)([a-z_]+)=")


def changed(params: Params, typed: str) -> Params:
    """Return the parameters with what was typed; `name=` takes one away.

    Raises:
        InvalidRequest: Names what is not a parameter or has a wrong value.
    """
    for name, value in _pairs(typed):
        params = with_value(params, name, value)
    check(params)
    return params


def with_value(params: Params, name: str, typed: str) -> Params:
    """Return the parameters with one as it was typed; without it where nothing is.

    Raises:
        InvalidRequest: It is no parameter, or its value is wrong by itself.
    """
    if name not in Params.__struct_fields__:
        raise InvalidRequest(f"{name[:40]!r} is not a parameter", param=name, hint=", ".join(Params.__struct_fields__))
    fields: dict[str, Any] = msgspec.to_builtins(params)
    if typed:
        fields[name] = _value_of(name, typed)
    else:
        fields.pop(name, None)
    try:
        return msgspec.convert(fields, Params, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def _value_of(name: str, typed: str) -> Any:
    """Return what a parameter's value is in JSON, as it was typed.

    Raises:
        InvalidRequest: It is no number where the parameter is one, or out of range.
    """
    if name in _STRUCTURED:
        return _structured(typed)
    within = RANGES.get(name)
    if within is None:
        return typed
    try:
        value = int(typed) if isinstance(within.low, int) else float(typed)
    except ValueError:
        kind = "whole number" if isinstance(within.low, int) else "number"
        raise InvalidRequest(f"{name} is {typed[:40]!r}, which is no {kind}", param=name) from None
    check_range(name, value, within)
    return value


def check(params: Params) -> None:
    """Refuse what every daemon refuses: what only the model can tell, such as its token ids, is not looked at.

    Raises:
        InvalidRequest: Names the field.
    """
    for name, within in RANGES.items():
        value = getattr(params, name)
        if value is not None:
            check_range(name, value, within)
    if params.min_tokens is not None and params.max_tokens is not None:
        check_range("min_tokens", params.min_tokens, Range(0, params.max_tokens))
    check_range("logit_bias", len(params.logit_bias or ()), Range(0, MAX_LOGIT_BIAS))
    for bias in (params.logit_bias or {}).values():
        check_range("logit_bias", bias, BIAS_RANGE)


def shown(params: Params) -> str:
    """Write the parameters as they are typed."""
    fields: dict[str, Any] = msgspec.to_builtins(params)
    return " ".join(f"{name}={text_of(name, value)}" for name, value in fields.items() if value is not None)


def text_of(name: str, value: Any) -> str:
    """Write a parameter's value as it is typed."""
    return json.dumps(value) if name in _STRUCTURED or isinstance(value, bool) else str(value)


def _pairs(typed: str) -> list[tuple[str, str]]:
    before, *rest = _NAME.split(typed.strip())
    if before:
        raise InvalidRequest(f"{before[:40]!r} is not NAME=VALUE", hint="such as temperature=0.7")
    return [(name, value.strip()) for name, value in zip(rest[::2], rest[1::2], strict=True)]


def _structured(value: str) -> Any:
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return [read] if isinstance(read, str | int) else read
