"""Who may do what: every verb and every route names its access, and one that does not fails start-up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from chatd.errors import PermissionDenied
from chatd.server.auth import Authenticator, Principal

if TYPE_CHECKING:
    from chatd.sessions.conversation import Owner


class Access(Enum):
    """What a caller must show.

    Attributes:
        OPEN: Nothing: liveness and readiness say nothing about anybody.
        LOCAL: Any key, or an address on this machine.
        KEY: Any key.
        OPERATOR: The operator's key; where there is no keys file, an address on this machine will do.
        OPERATORS_KEY: The operator's key, which is the local one where there is no keys file.
    """

    OPEN = "open"
    LOCAL = "local"
    KEY = "key"
    OPERATOR = "operator"
    OPERATORS_KEY = "operator's key"


class PolicyError(AssertionError):
    """A verb or a route was registered without a policy; the daemon does not start."""


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """One route: its method, its path, what a caller must show, and what serves it."""

    method: str
    path: str
    access: Access
    endpoint: Callable[..., Awaitable[Any]]


class GuardedEndpoint:
    """An endpoint that runs only for callers that its policy admits; they are in `state.principal`."""

    def __init__(self, policy: RoutePolicy, authenticator: Authenticator) -> None:
        self.policy = policy
        self._authenticator = authenticator

    async def serve(self, request: Request) -> Response:
        """Check the caller, then run the endpoint."""
        request.state.principal = admit(self._authenticator, request, self.policy.access)
        response: Response = await self.policy.endpoint(request)
        return response

    async def serve_websocket(self, websocket: WebSocket) -> None:
        """Check the caller before the handshake, then run the endpoint."""
        websocket.state.principal = admit(self._authenticator, websocket, self.policy.access)
        await self.policy.endpoint(websocket)


def admit(authenticator: Authenticator, connection: HTTPConnection, access: Access) -> Principal | None:
    """Return who calls, None where that does not matter.

    Raises:
        AuthenticationError: No key, or one that is not known.
        PermissionDenied: A key that may not do this.
    """
    if access is Access.OPEN:
        return None
    local_will_do = access is Access.LOCAL or (access is Access.OPERATOR and not authenticator.has_keys_file)
    if local_will_do and authenticator.is_local(connection) and not authenticator.has_credentials(connection):
        return None
    principal = authenticator.authenticate(connection)
    if access in (Access.OPERATOR, Access.OPERATORS_KEY) and not principal.operator:
        raise PermissionDenied("this needs the operator's key (chatd keys create --operator)")
    return principal


def build_routes(policies: Iterable[RoutePolicy], authenticator: Authenticator) -> list[BaseRoute]:
    """Return starlette's routes for these policies."""
    routes: list[BaseRoute] = []
    for policy in policies:
        guarded = GuardedEndpoint(policy, authenticator)
        if policy.method == "WEBSOCKET":
            routes.append(WebSocketRoute(policy.path, guarded.serve_websocket))
        else:
            routes.append(Route(policy.path, guarded.serve, methods=[policy.method]))
    return routes


def check_routes(routes: Iterable[BaseRoute]) -> None:
    """Refuse to start with a route that no policy guards.

    Raises:
        PolicyError: Names the route.
    """
    for route in routes:
        endpoint = getattr(route, "endpoint", None)
        if not isinstance(getattr(endpoint, "__self__", None), GuardedEndpoint):
            raise PolicyError(f"the route {getattr(route, 'path', route)!r} has no policy")


def check_verbs(commands: Iterable[type], policies: Mapping[type, Any]) -> None:
    """Refuse to start with a command that has no policy, or a policy without a command.

    Raises:
        PolicyError: Names the command.
    """
    wanted = set(commands)
    for command in wanted ^ set(policies):
        raise PolicyError(f"the command {command.__name__} has no policy, or is no command")


def owner_of(principal: Principal) -> Owner:
    """Return whose sessions a caller sees."""
    from chatd.sessions.conversation import Owner

    return Owner(tenant=principal.tenant, user=principal.user)
