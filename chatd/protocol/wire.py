"""Frames as text and back, what is wrong with a text that is none, and the schema of all of them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from chatd.errors import InvalidRequest, UnknownType
from chatd.protocol.commands import COMMAND_TYPES, Command
from chatd.protocol.events import EVENT_TYPES, Event
from chatd.protocol.other_versions import read_other_version
from chatd.protocol.vocabulary import SUBPROTOCOL

_encoder = msgspec.json.Encoder()
_command_decoder = msgspec.json.Decoder(Command)
_event_decoder = msgspec.json.Decoder(Event)


class _Head(msgspec.Struct):
    """Just enough of a frame to say what is wrong with the rest."""

    type: str
    id: Any = None


_head_decoder = msgspec.json.Decoder(_Head)
_FIELD = re.compile(r"unknown field `([^`]+)`|missing required field `([^`]+)`")
_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`")
_NAME = re.compile(r"`str` matching regex .*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def encode(frame: Command | Event) -> str:
    """Return a frame's text."""
    return _encoder.encode(frame).decode()


def decode_command(text: str | bytes) -> Command:
    """Decode what a client sent.

    Raises:
        UnknownType: The command does not exist.
        InvalidRequest: Names the field that is at fault in `param`.
    """
    head = _decode_head(text)
    if head.type not in COMMAND_TYPES:
        raise UnknownType(f"{head.type[:64]!r} is not a command of {SUBPROTOCOL}", param="type")
    try:
        return _command_decoder.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def command_id(text: str | bytes) -> str | None:
    """Return the `id` of a frame that may be broken otherwise, to answer it as `re`."""
    try:
        head = _head_decoder.decode(text)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeError):
        raw = _with_half_characters(text)
        head = _Head(type="", id=raw.get("id")) if isinstance(raw, dict) else _Head(type="")
    return head.id if isinstance(head.id, str) and len(head.id) <= 64 else None


def decode_event(text: str | bytes) -> Event | None:
    """Decode what a server sent, of another version as well; None for a type that this version does not know.

    Raises:
        InvalidRequest: The frame is broken, or cannot be understood here.
    """
    head = _decode_head(text)
    if head.type not in EVENT_TYPES:
        return None
    try:
        return _event_decoder.decode(text)
    except msgspec.ValidationError as error:
        event = read_other_version(text)
        if event is None:
            raise invalid_field(error) from None
        return event


def _decode_head(text: str | bytes) -> _Head:
    try:
        return _head_decoder.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"the frame is not JSON: {why_not_json(text, error)}", code="invalid_json") from None


def why_not_json(text: str | bytes, error: Exception) -> str:
    """Say what is wrong with a text; msgspec mistakes half a surrogate pair for a text that is cut off."""
    half = _with_half_characters(text) is not None
    return "an escape such as \\ud800 is half a character" if half else str(error)


def _with_half_characters(text: str | bytes) -> Any:
    """Return what a text says that would be JSON but for escapes of half a character; None for any other."""
    if not _SURROGATE.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    """Turn msgspec's complaint into a refusal that names the field in `param`."""
    message = str(error)
    path = _PATH.search(message)
    where = path.group(1).lstrip(".") if path else ""
    named = _FIELD.search(message)
    if named:
        name = named.group(1) or named.group(2)
        where = f"{where}.{name}" if where else name
    # The only pattern in a frame is that of ids.
    text = _NAME.sub("1 to 64 letters, digits, `_` or `-`", _PATH.sub("", message))
    return InvalidRequest(f"{where or 'frame'}: {text[:1].lower()}{text[1:]}", param=where or None)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of all commands and events."""
    (commands, events), definitions = msgspec.json.schema_components((Command, Event), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SUBPROTOCOL,
        "$defs": {**definitions, "Command": commands, "Event": events},
        "anyOf": [{"$ref": "#/$defs/Command"}, {"$ref": "#/$defs/Event"}],
    }
