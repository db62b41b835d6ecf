"""The HTTP application: its routes with their policies, and the gate that every request and handshake passes."""

from __future__ import annotations

import asyncio
import time

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatd.errors import ChatdError, EngineError
from chatd.protocol import WEBSOCKET_PATH
from chatd.server.auth import TICKET_TTL_S, Principal
from chatd.server.daemon import Daemon
from chatd.server.http_errors import HttpRefusal, error_response
from chatd.server.logging import get_logger, is_request_id
from chatd.server.metrics import CONTENT_TYPE
from chatd.server.openai import ABORT_EXTENSION, chat_completions, get_model, list_models
from chatd.server.openai_frames import encode_body
from chatd.server.operating import (
    IMPORT_PATH,
    REMOVE_PATH,
    SESSION_PATH,
    TENANT_PATH,
    erase_session,
    erase_tenant,
    import_session,
    remove_sessions,
)
from chatd.server.policy import Access, GuardedEndpoint, RoutePolicy, build_routes, check_routes
from chatd.server.usage import USAGE_PATH, get_usage
from chatd.server.websocket import chat_websocket

TICKET_PATH = "/v1/ws/tickets"
REQUEST_ID_HEADER = "x-request-id"
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
HANDSHAKES_PER_TURN = 2
"""Begun in one turn of the loop: a burst of them waits, not those that are connected."""

CLIENT_CLOSED = 499
"""Logged for a client that left before its answer; never sent."""

logger = get_logger("chatd.server")


async def _health(request: Request) -> Response:
    """Serve `GET /health`: the process is alive."""
    return _json({"status": "ok"})


async def _ready(request: Request) -> Response:
    """Serve `GET /ready`: 200 while turns are taken, else 503 with the phase."""
    daemon: Daemon = request.app.state.daemon
    readiness = daemon.readiness
    body = {"status": readiness.status, "phase": readiness.phase, "progress": round(readiness.progress, 4)}
    return _json(body, 200 if readiness.is_ready else 503)


async def _version(request: Request) -> Response:
    """Serve `GET /version`."""
    daemon: Daemon = request.app.state.daemon
    return _json({"name": "chatd", "version": daemon.version, "boot": daemon.boot})


async def _metrics(request: Request) -> Response:
    """Serve `GET /metrics`."""
    daemon: Daemon = request.app.state.daemon
    return Response(daemon.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def _tickets(request: Request) -> Response:
    """Serve `POST /v1/ws/tickets`: a browser's one-use ticket for the websocket."""
    daemon: Daemon = request.app.state.daemon
    principal: Principal = request.state.principal
    daemon.check_accepting()
    ticket = daemon.authenticator.issue_ticket(principal)
    return _json({"ticket": ticket, "expires_in_s": int(TICKET_TTL_S)}, headers={"cache-control": "no-store"})


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_body(body), status, headers, "application/json")


ROUTES = (
    RoutePolicy("GET", "/health", Access.OPEN, _health),
    RoutePolicy("GET", "/ready", Access.OPEN, _ready),
    RoutePolicy("GET", "/version", Access.LOCAL, _version),
    RoutePolicy("GET", "/metrics", Access.OPERATOR, _metrics),
    RoutePolicy("GET", "/v1/models", Access.KEY, list_models),
    RoutePolicy("GET", "/v1/models/{model:path}", Access.KEY, get_model),
    RoutePolicy("POST", "/v1/chat/completions", Access.KEY, chat_completions),
    RoutePolicy("GET", USAGE_PATH, Access.KEY, get_usage),
    RoutePolicy("POST", IMPORT_PATH, Access.OPERATORS_KEY, import_session),
    RoutePolicy("POST", REMOVE_PATH, Access.OPERATORS_KEY, remove_sessions),
    RoutePolicy("DELETE", SESSION_PATH, Access.OPERATORS_KEY, erase_session),
    RoutePolicy("DELETE", TENANT_PATH, Access.OPERATORS_KEY, erase_tenant),
    RoutePolicy("POST", TICKET_PATH, Access.KEY, _tickets),
    RoutePolicy("WEBSOCKET", WEBSOCKET_PATH, Access.KEY, chat_websocket),
)


def build_app(daemon: Daemon) -> Starlette:
    """Return the application of a daemon.

    Raises:
        PolicyError: A route has no policy.
    """
    # From the outside in: a stranger's page gets no answer that it may read, a listed one may read errors too.
    middleware = [Middleware(Gate, daemon=daemon)]
    origins = daemon.settings.server.allowed_origins
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                # Whatever a client likes to send (x-stainless-…, x-conversation-id): only the key grants anything.
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER, "retry-after", "retry-after-ms"],
            )
        )
    middleware.append(Middleware(Refusals, daemon=daemon))
    routes = build_routes(ROUTES, daemon.authenticator)
    check_routes(routes)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.redirect_slashes = False
    app.state.daemon = daemon
    return app


async def _http_exception(request: Request, error: Exception) -> Response:
    """Show starlette's own refusals (unknown path, wrong method) as errors of ours."""
    assert isinstance(error, HTTPException)
    response = error_response(HttpRefusal(error.status_code))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


class Gate:
    """Around everything: names requests, refuses foreign Host and Origin, and logs a line."""

    def __init__(self, app: ASGIApp, daemon: Daemon) -> None:
        self._app = app
        self._daemon = daemon
        self._handshakes = asyncio.Semaphore(HANDSHAKES_PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request or handshake on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            async with self._handshakes:
                await asyncio.sleep(0)
        connection = HTTPConnection(scope)
        given = connection.headers.get(REQUEST_ID_HEADER, "")
        request_id = given if is_request_id(given) else self._daemon.new_request_id()
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        _put_abort(scope, send)
        answer = _Answer(send, request_id)
        started = time.perf_counter()
        try:
            self._daemon.authenticator.check_host(connection)
            self._daemon.authenticator.check_origin(connection)
            await self._app(scope, receive, answer.send)
        except ChatdError as error:
            await answer.refuse(error, scope, receive)
        self._log(scope, answer, time.perf_counter() - started)

    def _log(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        route = _route_of(scope)
        status = answer.status or CLIENT_CLOSED
        self._daemon.metrics.http_answered(route, status)
        principal = scope.get("state", {}).get("principal")
        fields = {
            "route": route,
            "status": status,
            "ms": round(1000 * seconds, 2),
            "key": principal.key_id if principal is not None else None,
            "tenant": principal.tenant if principal is not None else None,
        }
        if route in QUIET_PATHS:
            logger.debug("http.request", **fields)
        else:
            logger.info("http.request" if scope["type"] == "http" else "websocket.request", **fields)


class Refusals:
    """Around the routes: refuses keys in URLs, and shows errors.

    A refused websocket handshake is an HTTP answer with the same body as any other refusal.
    """

    def __init__(self, app: ASGIApp, daemon: Daemon) -> None:
        self._app = app
        self._daemon = daemon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request or handshake on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        raw_path, query = scope.get("raw_path") or b"", scope["query_string"]
        try:
            self._daemon.authenticator.check_url(raw_path.decode("latin-1"), query.decode("latin-1"))
            await self._app(scope, receive, answer.send)
        except ChatdError as error:
            await answer.refuse(error, scope, receive)
        except Exception:
            logger.exception("request.failed", path=_route_of(scope))
            await answer.refuse(
                EngineError("the daemon failed; its log says more", code="internal_error"), scope, receive
            )


class _Answer:
    """The way out of one request: adds the request id where there is one, and knows whether an answer has begun."""

    def __init__(self, send: Send, request_id: str | None = None) -> None:
        self.status: int | None = None
        self._send = send
        self._headers = () if request_id is None else ((REQUEST_ID_HEADER.encode(), request_id.encode()),)

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self.status = message.get("status", 101)
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)

    async def refuse(self, error: ChatdError, scope: Scope, receive: Receive) -> None:
        """Show an error, unless an answer has begun already."""
        if self.status is not None:
            return
        # Both kinds of answer have the same shape in starlette: it sees from the scope which messages to send.
        await error_response(error)(scope, receive, self.send)


def _route_of(scope: Scope) -> str:
    """Return the registered path that a request matched; nothing that a stranger wrote."""
    endpoint = scope.get("endpoint")
    guarded = getattr(endpoint, "__self__", None)
    return guarded.policy.path if isinstance(guarded, GuardedEndpoint) else "unknown"


def _put_abort(scope: Scope, send: Send) -> None:
    """Let an endpoint drop the connection of a client that does not read; uvicorn's `send` knows the transport."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is not None:
        scope[ABORT_EXTENSION] = transport.abort
