"""What daemons of other versions would send in the place of a frame: for `ScriptedDaemon.rewrite`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_LATER_FIELDS = frozenset(
    {
        *("siblings", "context_from", "context_policy", "metadata", "archived", "pinned", "copies_on_write", "tiers"),
        *("shared_tokens", "shared_blocks", "tier", "context_max", "num_items", "heartbeat_s", "user", "connection"),
        *("limits", "hit_rate", "tok_s", "evictions", "preemptions", "prefill_tok_s", "input_tokens_details"),
        "active",
    }
)
"""Fields that an older daemon does not send: those with defaults, and some that only describe."""

_FREE_FORM = ("metadata", "input_tokens_details", "limits", "state")
"""Dictionaries whose keys are no fields."""

_NEW_VALUES = {
    ("context_policy", "refuse"): "summarize",
    ("status", "completed"): "reviewed",
    ("status", "incomplete"): "abandoned",
    ("reason", "stop"): "satisfied",
    ("tier", "device"): "neighbor",
    ("replay", "snapshot"): "digest",
    ("role", "observer"): "editor",
}


def older(frame: str) -> list[str]:
    """Leave out what came later."""

    def without(value: dict[str, Any]) -> dict[str, Any]:
        return {name: item for name, item in value.items() if name not in _LATER_FIELDS}

    return [json.dumps(_changed(json.loads(frame), without))]


def newer(frame: str) -> list[str]:
    """Say more than this version knows: events, fields, parameters and values."""

    def more(value: dict[str, Any]) -> dict[str, Any]:
        changed = {
            name: _NEW_VALUES.get((name, item), item) if isinstance(item, str) else item for name, item in value.items()
        }
        return {**changed, "mood": {"is": ["good"]}}

    whole = _changed(json.loads(frame), more)
    if whole["type"] == "hello":
        whole["caps"] = [*whole["caps"], "time-travel"]
        return [json.dumps(whole)]
    return [json.dumps({"type": "weather.changed", "session": whole.get("session"), "sky": "blue"}), json.dumps(whole)]


def _changed(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    inside = {name: item if name in _FREE_FORM else _changed(item, change) for name, item in value.items()}
    return change(inside)
