"""Who calls: keys in headers, one-use tickets for browsers, and the checks of Host, Origin and URL.

A key is never taken from a URL. What a web page in somebody's browser can send is refused unless its origin is on the
list, and a name that a hostile DNS server points at this machine is refused by the Host check.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import HTTPConnection

from chatd.config import is_loopback
from chatd.errors import AuthenticationError, ConfigError, PermissionDenied, RateLimited
from chatd.protocol import TICKET_SUBPROTOCOL_PREFIX
from chatd.tenants.keys import LOCAL_TENANT, LOCAL_USER, Key, KeyClass, KeyStore, looks_like_key

ANONYMOUS_KEY_ID = "anonymous"
TICKET_TTL_S = 60.0
MAX_TICKETS = 4096
MAX_TICKETS_PER_KEY = 64
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_SECRET_PARAMETERS = frozenset(
    {"key", "api_key", "api-key", "apikey", "token", "access_token", "authorization", "auth", "ticket", "bearer"}
)


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, as its key says; nothing here ever comes from a request's body.

    Attributes:
        key_id: May be logged.
        tenant: Whose blocks and quota it uses.
        user: Whose sessions it sees.
        operator: May read metrics and the whole pool.
        key_class: How its requests are scheduled.
        key: The stored key; None for a caller without one.
    """

    key_id: str
    tenant: str
    user: str
    operator: bool
    key_class: KeyClass
    key: Key | None = None

    @classmethod
    def of(cls, key: Key) -> Principal:
        """Build from a key."""
        return cls(key.id, key.tenant, key.user, key.is_operator, key.key_class, key)


ANONYMOUS = Principal(ANONYMOUS_KEY_ID, LOCAL_TENANT, LOCAL_USER, False, "interactive")


@dataclass(frozen=True, slots=True)
class _Ticket:
    principal: Principal
    expires: float


class Authenticator:
    """Tells callers from strangers.

    Args:
        keys: The keys that are good now.
        host: The address that is listened on.
        allow_anonymous: Loopback callers need no key.
        behind_proxy: A proxy forwards, so that an address on this machine says nothing.
        allowed_hosts: Names that a request may be addressed to, beside loopback's and `host`.
        allowed_origins: Origins of web pages that may call.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        keys: KeyStore,
        *,
        host: str,
        allow_anonymous: bool,
        behind_proxy: bool,
        allowed_hosts: Iterable[str],
        allowed_origins: Iterable[str],
        clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._allow_anonymous = allow_anonymous
        self._behind_proxy = behind_proxy
        self._listens_on_loopback = is_loopback(host)
        self._hosts = frozenset(name.lower() for name in (*LOOPBACK_HOSTS, host, *allowed_hosts))
        self._has_host_list = bool(tuple(allowed_hosts))
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)
        self._clock = clock
        self._tickets: dict[str, _Ticket] = {}

    @property
    def has_keys_file(self) -> bool:
        """True where tenants are configured by a keys file."""
        return self._keys.has_file

    @property
    def is_single_tenant(self) -> bool:
        """True where one tenant has the whole machine."""
        return len(self._keys.tenants) <= 1

    def is_local(self, connection: HTTPConnection) -> bool:
        """True for a caller on this machine that no proxy stands for."""
        return not self._behind_proxy and connection.client is not None and is_loopback(connection.client.host)

    def has_credentials(self, connection: HTTPConnection) -> bool:
        """True where the caller shows a key or a ticket, good or bad."""
        return "authorization" in connection.headers or _ticket_of(connection) is not None

    def authenticate(self, connection: HTTPConnection) -> Principal:
        """Return who calls.

        Raises:
            AuthenticationError: No key, a malformed one, or one that is not known.
        """
        header = connection.headers.get("authorization")
        ticket = _ticket_of(connection)
        if header is not None:
            scheme, _, token = header.partition(" ")
            key = self._keys.authenticate(token.strip()) if scheme.lower() == "bearer" else None
            if key is not None:
                return Principal.of(key)
            # Most OpenAI clients insist on sending something; where no key is needed, that is not mistaken for one.
            if looks_like_key(token) or not self._admits_anonymous(connection):
                raise AuthenticationError("the key is not known (Authorization: Bearer ck_…; chatd keys list)")
            return ANONYMOUS
        if ticket is not None:
            return self._redeem(ticket)
        if self._admits_anonymous(connection):
            return ANONYMOUS
        raise AuthenticationError(
            "no key was sent (Authorization: Bearer ck_…)",
            code="missing_api_key",
            hint=None if self._keys.has_file else "the local key is in the user's state folder; chatd-tui reads it",
        )

    def _admits_anonymous(self, connection: HTTPConnection) -> bool:
        return self._allow_anonymous and self.is_local(connection)

    def is_current(self, principal: Principal) -> bool:
        """True while the key that a caller came with is still good and unchanged."""
        return principal.key is None or self._keys.get(principal.key_id) == principal.key

    def issue_ticket(self, principal: Principal) -> str:
        """Return a ticket that opens one websocket within `TICKET_TTL_S`.

        Raises:
            RateLimited: Too many are out.
        """
        now = self._clock()
        self._tickets = {name: ticket for name, ticket in self._tickets.items() if ticket.expires > now}
        own = sum(ticket.principal.key_id == principal.key_id for ticket in self._tickets.values())
        if own >= MAX_TICKETS_PER_KEY or len(self._tickets) >= MAX_TICKETS:
            raise RateLimited(
                f"{own} tickets are out, the limit is {MAX_TICKETS_PER_KEY}", retry_after_ms=round(TICKET_TTL_S * 1000)
            )
        name = secrets.token_urlsafe(32)
        self._tickets[name] = _Ticket(principal, now + TICKET_TTL_S)
        return name

    def _redeem(self, name: str) -> Principal:
        ticket = self._tickets.pop(name, None)
        if ticket is None or ticket.expires <= self._clock() or not self.is_current(ticket.principal):
            raise AuthenticationError("the ticket is unknown, used or too old (POST /v1/ws/tickets)", code="bad_ticket")
        return ticket.principal

    def check_url(self, path: str, query: str) -> None:
        """Refuse a key in a URL, which proxies and histories would keep.

        Raises:
            AuthenticationError: The message does not repeat it.
        """
        names = {name.lower() for name, _ in parse_qsl(query, keep_blank_values=True)}
        if names & _SECRET_PARAMETERS or looks_like_key(query) or looks_like_key(path):
            raise AuthenticationError(
                "a key in a URL is refused, and should be revoked (Authorization: Bearer ck_…)", code="key_in_url"
            )

    def check_host(self, connection: HTTPConnection) -> None:
        """Refuse a request that was addressed to a name that is not ours (DNS rebinding).

        Raises:
            PermissionDenied: Names the setting.
        """
        names = connection.headers.getlist("host")
        if len(names) == 1:
            name = host_name(names[0])
            if name in self._hosts:
                return
            # A daemon on a public address answers to any name unless a list is given: keys are required there.
            if name is not None and not self._listens_on_loopback and not self._has_host_list:
                return
        raise PermissionDenied("the Host header names another machine (server.allowed_hosts)", code="bad_host")

    def check_origin(self, connection: HTTPConnection) -> None:
        """Refuse what a web page sends whose origin is not on the list.

        Raises:
            PermissionDenied: Names the setting.
        """
        origins = connection.headers.getlist("origin")
        if not origins:
            return
        if len(origins) == 1 and origins[0].lower() in self._origins:
            return
        raise PermissionDenied("this origin may not connect (server.allowed_origins)", code="bad_origin")


def host_name(header: str) -> str | None:
    """Return the name in a Host header, lowercase and without its port; None for a broken one."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname


def check_exposure(
    *, host: str, has_keys_file: bool, has_tls: bool, behind_proxy: bool, allow_anonymous: bool
) -> list[str]:
    """Refuse an address that would let strangers in; return warnings for the person at the terminal.

    Raises:
        ConfigError: Names the settings that mend it.
    """
    warnings: list[str] = []
    local = is_loopback(host)
    if not local and not has_keys_file:
        raise ConfigError(
            f"{host} is not loopback and there are no keys (server.keys_file, chatd keys create)", param="server.host"
        )
    if not local and not has_tls and not behind_proxy:
        raise ConfigError(
            f"{host} is not loopback and there is no TLS (--tls-cert and --tls-key, or --behind-proxy ADDRESS)",
            param="server.host",
        )
    if allow_anonymous:
        if not local or behind_proxy:
            raise ConfigError(
                f"callers without a key are served on loopback only, and not behind a proxy ({host})",
                param="server.allow_anonymous_loopback",
            )
        warnings.append("everybody on this machine may use this daemon without a key (allow_anonymous_loopback)")
    return warnings


def _ticket_of(connection: HTTPConnection) -> str | None:
    if connection.scope["type"] != "websocket":
        return None
    offered = [name for name in connection.scope.get("subprotocols", ()) if name.startswith(TICKET_SUBPROTOCOL_PREFIX)]
    return offered[0].removeprefix(TICKET_SUBPROTOCOL_PREFIX) if len(offered) == 1 else None
