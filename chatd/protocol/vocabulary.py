"""The words of chatd.v1: names, numbers and limits that both directions share."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

SUBPROTOCOL = "chatd.v1"
TICKET_SUBPROTOCOL_PREFIX = "chatd.ticket."
WEBSOCKET_PATH = "/v1/chat/ws"

CLOSE_RESTART = 1012
CLOSE_OVERLOAD = 1013
CLOSE_PROTOCOL = 4400
CLOSE_UNAUTHENTICATED = 4401
CLOSE_NO_FIRST_FRAME = 4408
CLOSE_RATE = 4429

MIN_FRAME_BYTES = 256 * 1024
MAX_FRAME_BYTES = 4 * 1024 * 1024
CELL_STATES = ("free", "cached", "active", "shared")

# Python's `$` also matches before a line end at the end; JSON Schema's does not, and knows no `\Z`.
_ID_PATTERN = r"^[0-9A-Za-z_-]{1,64}(?!\n)$"
CommandId = Annotated[str, msgspec.Meta(pattern=_ID_PATTERN)]
SessionId = Annotated[str, msgspec.Meta(pattern=_ID_PATTERN)]
ItemId = Annotated[str, msgspec.Meta(pattern=_ID_PATTERN)]
Title = Annotated[str, msgspec.Meta(max_length=200)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
Role = Literal["system", "user", "assistant"]
AttachRole = Literal["writer", "observer"]
HistoryScope = Literal["full", "tail", "none"]
ContextPolicy = Literal["refuse", "drop_oldest"]
ItemStatus = Literal["completed", "in_progress", "incomplete"]
IncompleteReason = Literal["max_output_tokens", "context", "cancelled", "kv_exhausted", "draining"]
CompletedReason = Literal["stop", "stop_string"]


def frame_limit_bytes(context: int) -> int:
    """Return the largest text frame, in bytes, that a daemon with this context accepts."""
    return min(max(MIN_FRAME_BYTES, 8 * context), MAX_FRAME_BYTES)
