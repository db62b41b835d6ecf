"""What people call the address of a daemon, and where its native socket is."""

from __future__ import annotations

from urllib.parse import urlsplit

from chatd.errors import InvalidRequest
from chatd.protocol import WEBSOCKET_PATH


def websocket_url(url: str) -> str:
    """Return the address of the native socket for "host:port", "http(s)://…" or "ws(s)://…".

    Raises:
        InvalidRequest: Not such an address, or it holds a key.
    """
    wrong = InvalidRequest(f"{url!r} is not the address of a daemon, such as http://127.0.0.1:8790", param="url")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise wrong from None
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not named or not parts.netloc.isprintable() or " " in parts.netloc:
        raise wrong
    if "@" in parts.netloc or parts.query:
        raise InvalidRequest("a key does not belong in an address, give it as `key`", param="url")
    path = parts.path if parts.path.strip("/") else WEBSOCKET_PATH
    return f"{scheme}://{parts.netloc}{path}"
