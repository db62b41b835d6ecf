"""Where a client stands with its daemon, as a screen shows it."""

from __future__ import annotations

import enum

import msgspec

from chatd.errors import ChatdError


class ConnectionPhase(enum.StrEnum):
    """Where a client stands with its daemon."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    WAITING = "waiting"
    CLOSED = "closed"


class ConnectionState(msgspec.Struct, frozen=True):
    """The connection as a screen shows it.

    Attributes:
        phase: Where the client stands.
        attempt: Tries since the last good connection.
        retry_in_s: While waiting, how long.
        error: Why the last connection or try failed.
    """

    phase: ConnectionPhase
    attempt: int = 0
    retry_in_s: float = 0.0
    error: ChatdError | None = None
