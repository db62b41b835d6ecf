"""Errors rebuilt on the client's side from what a daemon sent: error bodies, refused handshakes, close codes."""

from __future__ import annotations

import msgspec
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

from chatd import protocol
from chatd.config import start_hint
from chatd.errors import (
    AuthenticationError,
    ChatdError,
    EngineError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RateLimited,
    StartupError,
    Unavailable,
)

# Not worth another try: the same handshake or frame would be refused again.
FATAL = (AuthenticationError, PermissionDenied, InvalidRequest, NotFound)

_BY_STATUS: dict[int, type[ChatdError]] = {
    400: InvalidRequest,
    401: AuthenticationError,
    403: PermissionDenied,
    404: NotFound,
    429: RateLimited,
    503: Unavailable,
}

# Of the type `server_error` as failures of the engine are, but worth another try.
_UNAVAILABLE = ("loading", "draining", "engine_unavailable")


class _HttpError(msgspec.Struct):
    error: protocol.ErrorBody


def _classes() -> tuple[dict[str, type[ChatdError]], dict[str, type[ChatdError]]]:
    by_code: dict[str, type[ChatdError]] = {}
    by_type: dict[str, type[ChatdError]] = {}
    found = [ChatdError]
    for error in found:
        found.extend(error.__subclasses__())
        if not issubclass(error, StartupError):
            by_code.setdefault(error.code, error)
            by_type.setdefault(error.error_type, error)
    by_type[EngineError.error_type] = EngineError
    by_code |= dict.fromkeys(_UNAVAILABLE, Unavailable)
    return by_code, by_type


_BY_CODE, _BY_TYPE = _classes()


def error_from(body: protocol.ErrorBody) -> ChatdError:
    """Rebuild the error that a daemon showed; an unknown code keeps its text under the class of its type."""
    kind = _BY_CODE.get(body.code) or _BY_TYPE.get(body.type) or ChatdError
    return kind(body.message, code=body.code, param=body.param, hint=body.hint, retry_after_ms=body.retry_after_ms)


def error_of_connect(error: Exception, url: str) -> ChatdError:
    """Say why no connection came about."""
    if isinstance(error, InvalidStatus):
        response = error.response
        try:
            rebuilt = error_from(msgspec.json.decode(response.body or b"", type=_HttpError).error)
        except (msgspec.DecodeError, UnicodeDecodeError):
            status = response.status_code
            text = f"{url} answered HTTP {status} to the handshake"
            code = "not_a_daemon" if status not in _BY_STATUS and status < 500 else None
            kind = _BY_STATUS.get(status) or (NotFound if code else Unavailable)
            rebuilt = kind(text, code=code)
        return rebuilt
    if isinstance(error, InvalidMessage) and isinstance(error.__cause__, EOFError | OSError):
        # It was killed, or restarted, between taking the connection and answering: another one may come.
        return Unavailable(f"{url} closed the connection in the handshake", code="unreachable")
    if isinstance(error, InvalidHandshake):
        return NotFound(f"{url} does not speak {protocol.SUBPROTOCOL}: {error}", code="not_a_daemon")
    reason = "it took too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return Unavailable(f"no daemon answers at {url}: {reason}", code="unreachable", hint=start_hint(url))


def error_of_close(closed: ConnectionClosed) -> ChatdError:
    """Say why a connection ended, by the close code of the protocol."""
    code = closed.rcvd.code if closed.rcvd else 1006
    reason = closed.rcvd.reason if closed.rcvd else ""
    said = f": {reason}" if reason else ""
    match code:
        case protocol.CLOSE_UNAUTHENTICATED:
            return AuthenticationError(f"the daemon does not know this key{said}")
        case protocol.CLOSE_PROTOCOL:
            return InvalidRequest(f"the daemon refused a frame{said}", code="protocol_error")
        case protocol.CLOSE_RATE:
            return RateLimited(f"too many frames or connections{said}", retry_after_ms=2000)
        case protocol.CLOSE_OVERLOAD:
            return Unavailable(f"this reader was too slow{said}", code="overloaded")
        case protocol.CLOSE_RESTART | 1001:  # a proxy that stops says 1001
            return Unavailable(f"the daemon stops or restarts{said}", code="restarting")
        case _:
            return Unavailable(f"the connection was lost (code {code}){said}", code="connection_lost")
