"""Events of a daemon that is older or newer than this version: read as far as they can be understood.

A value that this version does not know becomes the nearest one that it knows, a field that it does not know goes where
a closed struct stands (`Params`), and what only describes and is missing is neutral. What identifies is never made up.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Any, get_args, get_origin

import msgspec

from chatd.protocol.events import Event, Hello, Limits, ModelInfo
from chatd.protocol.pool_values import PoolTotals, SessionBlocks, TenantBlocks, TierBlocks
from chatd.protocol.values import SessionInfo, Timings, Usage
from chatd.protocol.vocabulary import MIN_FRAME_BYTES

MAX_CHANGES = 100
"""A frame that differs in more ways is not worth its reading."""

_NEAREST = {
    "role": "system",
    "status": "completed",
    "context_policy": "refuse",
    "replay": "snapshot",
    "reason": "cancelled",
}
"""What a field is read as whose value is one that this version does not know."""

_DESCRIPTIONS = (
    Hello,
    Limits,
    ModelInfo,
    PoolTotals,
    SessionBlocks,
    SessionInfo,
    TenantBlocks,
    TierBlocks,
    Timings,
    Usage,
)
_IDENTITIES = ("protocol", "boot", "id", "session", "tenant")
_NEUTRAL = {str: "", int: 0, float: 0.0, bool: False, list: [], dict: {}}

_COMPLAINT = re.compile(
    r"(?:Object contains unknown field `(?P<unknown>[^`]+)`"
    r"|Object missing required field `(?P<missing>[^`]+)`"
    r"|Invalid enum value (?P<value>.*?))"
    r"(?: - at `\$(?P<path>[^`]*)`)?\Z",
    re.DOTALL,
)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


def _neutral_fields() -> dict[tuple[str, str], Any]:
    """Return what stands for a missing field of a description, by the field that holds the description and its name."""
    found: dict[tuple[str, str], Any] = {}

    def add(struct: type[msgspec.Struct], holder: str) -> None:
        for field in msgspec.structs.fields(struct):
            inner = _structs_in(field.type)
            for one in inner:
                add(one, field.name)
            value = (
                {} if inner and get_origin(field.type) is None else _NEUTRAL.get(get_origin(field.type) or field.type)
            )
            if struct in _DESCRIPTIONS and field.required and field.name not in _IDENTITIES and value is not None:
                found[holder, field.name] = MIN_FRAME_BYTES if field.name == "frame_bytes" else value

    for event in get_args(Event):
        add(event, "")
    return found


def _structs_in(kind: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a field of a type holds, alone, in a list or as one of several."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in get_args(kind) for struct in _structs_in(part)]


_MISSING = _neutral_fields()


def read_other_version(text: str | bytes) -> Event | None:
    """Return what an event of another version says; None where it cannot be understood."""
    try:
        frame = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return None
    for _ in range(MAX_CHANGES):
        try:
            event: Event = msgspec.convert(frame, Event)
        except msgspec.ValidationError as error:
            if not _mended(frame, str(error)):
                return None
        else:
            return event
    return None


def _mended(frame: Any, complaint: str) -> bool:
    """Change what a complaint of msgspec's is about, in a whole list at once; False where nothing can be done."""
    match = _COMPLAINT.match(complaint)
    if match is None:
        return False
    steps = [name or int(index) for name, index in _STEP.findall(match["path"] or "")]
    try:
        if match["value"] is not None:
            name = str(steps.pop())
            first, *others = _places(frame, steps)
            unknown, first[name] = first[name], _NEAREST[name]
            for place in others:
                if place.get(name) == unknown:
                    place[name] = first[name]
        elif match["unknown"] is not None:
            for place in _places(frame, steps):
                place.pop(match["unknown"], None)
        else:
            holder = next((step for step in reversed(steps) if isinstance(step, str)), "")
            for place in _places(frame, steps):
                place.setdefault(match["missing"], copy(_MISSING[holder, match["missing"]]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False
    return True


def _places(frame: Any, steps: list[str | int]) -> list[Any]:
    """Return what is at a path, and beside it from there on where the path leads into a list."""
    places = [frame]
    for step in steps:
        if isinstance(step, int):
            places = [item for place in places for item in place[step:]]
        else:
            places = [place[step] for place in places if step in place]
    return places
