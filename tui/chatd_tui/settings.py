"""Sampling parameters as a person types them: `temperature=0.7 stop=["END"]`."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from chatd.errors import InvalidRequest
from chatd.protocol import Params, invalid_field

_STRUCTURED = ("stop", "stop_token_ids", "logit_bias")
# A value goes on up to the next name, so it may hold blanks.
_NAME = re.compile(r"(?:^|\s+)([a-z_]+)=")


def changed(params: Params, typed: str) -> Params:
    """Return the parameters with what was typed; `name=` takes one away.

    Raises:
        InvalidRequest: Names what is not a parameter or has a wrong value.
    """
    fields: dict[str, Any] = msgspec.to_builtins(params)
    for name, value in _pairs(typed):
        if name not in Params.__struct_fields__:
            raise InvalidRequest(
                f"{name[:40]!r} is not a parameter", param=name, hint=", ".join(Params.__struct_fields__)
            )
        if not value:
            fields.pop(name, None)
        else:
            fields[name] = _structured(value) if name in _STRUCTURED else value
    try:
        return msgspec.convert(fields, Params, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def shown(params: Params) -> str:
    """Write the parameters as they are typed."""
    fields: dict[str, Any] = msgspec.to_builtins(params)
    return " ".join(
        f"{name}={json.dumps(value) if name in _STRUCTURED or isinstance(value, bool) else value}"
        for name, value in fields.items()
        if value is not None
    )


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
