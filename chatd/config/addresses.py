"""Addresses of machines, networks and web pages as settings name them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

DEFAULT_PORT = 8790


def is_loopback(host: str) -> bool:
    """Whether this is an address or name of this machine's loopback."""
    if host.lower() == "localhost":
        return True
    if not is_address(host):
        return False
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def proxy_networks(text: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Return the networks in a list such as "10.0.0.5, 10.1.0.0/16".

    Raises:
        ValueError: One of them is none.
    """
    return [ipaddress.ip_network(part.strip()) for part in text.split(",")]


def host_of(url: str) -> str:
    """Return the host in a URL, with or without a scheme; "" where there is none."""
    try:
        return urlsplit(url if "://" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""


def local_url(url: str) -> str:
    """Return where this machine reaches what listens at `url`: the loopback, where that is every address there is."""
    parts = urlsplit(url)
    if not is_address(parts.hostname or "") or not ipaddress.ip_address(parts.hostname or "").is_unspecified:
        return url
    host = "[::1]" if ":" in (parts.hostname or "") else "127.0.0.1"
    return f"{parts.scheme}://{host}:{parts.port}"


def serve_command(url: str) -> str:
    """Return what has a daemon listen where a client looked for one; "…" stands for a file."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    host, is_encrypted = parts.hostname or "", parts.scheme in ("https", "wss")
    port = parts.port or (443 if is_encrypted else 80)
    is_here = is_loopback(host)
    words = ["chatd serve"]
    if not is_here:
        # A name is the other side's own business.
        words.append(f"--host {host if is_address(host) else '0.0.0.0'}")  # noqa: S104
    elif host not in ("localhost", "127.0.0.1"):
        words.append(f"--host {host}")
    if port != DEFAULT_PORT:
        words.append(f"--port {port}")
    if not is_here:
        words.append("--keys-file …")
    if is_encrypted or not is_here:
        words.append("--tls-cert … --tls-key …")
    return " ".join(words)


def start_hint(url: str) -> str:
    """Say how to start the daemon that did not answer."""
    where = "" if is_loopback(host_of(url)) else " on that machine"
    return f"start one{where} with `{serve_command(url)}`"


def is_address(text: str) -> bool:
    """Whether this is an IP address, and not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def origin_of(text: str) -> str:
    """Return an origin as browsers send it.

    Raises:
        ValueError: It is none: a path, a pattern, a name without a scheme.
    """
    parts = urlsplit(text.rstrip("/"))
    if not parts.scheme or not parts.netloc or parts.path or parts.query or "*" in text or "@" in parts.netloc:
        raise ValueError(f"{text!r} is not an origin such as https://chat.example")
    return f"{parts.scheme}://{parts.netloc}".lower()
