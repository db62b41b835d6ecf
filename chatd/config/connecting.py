"""Where a client connects when it is not told, and with which key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from chatd.config.addresses import DEFAULT_PORT, host_of, is_loopback
from chatd.config.folders import read_local_key, state_dir
from chatd.config.key_files import read_key_file
from chatd.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True)
class ClientDefaults:
    """Where a client connects when it is not told, and with which key."""

    url: str
    key: str | None


def client_defaults(url: str | None = None) -> ClientDefaults:
    """Return where a client connects when it is not told, and with which key.

    The address is `CHATD_URL`, else the daemon on this machine. The key is `CHATD_KEY`, else what is in the file that
    `CHATD_KEY_FILE` names, and goes to any daemon; else the local key, which is an operator's and is offered to this
    machine's loopback only.

    Args:
        url: Where it connects, if it was told that.

    Raises:
        ConfigError: There is no key in the file that is named, or others can read it.
    """
    url = url or os.environ.get("CHATD_URL") or f"http://127.0.0.1:{DEFAULT_PORT}"
    key = os.environ.get("CHATD_KEY")
    if not key and (name := os.environ.get("CHATD_KEY_FILE")):
        key = read_key_file(Path(), name)
    return ClientDefaults(url=url, key=key or (read_local_key() if is_loopback(host_of(url)) else None))


def input_history_path() -> Path | None:
    """Return where the terminal client keeps what was typed into it; None where `CHATD_INPUT_HISTORY` is "off".

    Raises:
        ConfigError: It is neither "on" nor "off".
    """
    wanted = os.environ.get("CHATD_INPUT_HISTORY") or "on"
    if wanted not in ("on", "off"):
        raise ConfigError(f"{wanted!r} is neither on nor off (CHATD_INPUT_HISTORY)", param="CHATD_INPUT_HISTORY")
    return state_dir() / "input-history" if wanted == "on" else None


def theme_name() -> str | None:
    """Return the theme that the terminal client begins with where it is not told: `CHATD_THEME`."""
    return os.environ.get("CHATD_THEME") or None


def check_key(key: str | None) -> None:
    """Refuse what no header can carry, before anything that says so quotes the key.

    Raises:
        InvalidRequest: A blank, a line's end or another character that no key has is in it.
    """
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise InvalidRequest(
            "the key has a character that no key has: a blank, the end of a line, or one that is not ASCII",
            code="invalid_key",
            param="key",
            hint="copy it again as `chatd keys create` showed it",
        )


def check_key_transport(url: str, key: str | None) -> None:
    """Refuse to send a key over the network in the clear, or one that is none.

    Raises:
        InvalidRequest: The address is another machine's and is not encrypted; or as `check_key`.
    """
    check_key(key)
    encrypted = url.lower().startswith(("https://", "wss://"))
    if key is not None and not encrypted and not is_loopback(host_of(url)):
        raise InvalidRequest(
            f"{url} is not encrypted, and whoever is on the way could read the key",
            code="key_in_the_clear",
            param="url",
            hint=f"use https, or a tunnel: ssh -L {DEFAULT_PORT}:127.0.0.1:{DEFAULT_PORT} {host_of(url)}",
        )
