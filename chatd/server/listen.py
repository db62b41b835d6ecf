"""The socket that the daemon listens on, taken before anything is loaded; and uvicorn around it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from chatd.config import ServerSettings, is_loopback, proxy_networks
from chatd.errors import ConfigError, EnvironmentProblem, PermissionDenied, PortInUse
from chatd.protocol import MIN_FRAME_BYTES
from chatd.server.http_errors import error_response
from chatd.server.http_protocol import BoundedHttpProtocol, BoundedWebSocketProtocol

BACKLOG = 512
ACCEPTS_PER_TURN = 4
"""Connections taken in one turn of the loop: those of a burst wait, not those that are served."""

KEEP_ALIVE_S = 30
MAX_HTTP_CONNECTIONS = 2048
"""Beside the websockets; a request on one more is answered with 503."""

MAX_HEADER_BYTES = 32 * 1024
SHUTDOWN_TIMEOUT_S = 3
TICK_S = 0.1
"""uvicorn counts on ten ticks a second: it renews the Date header at every tenth."""


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        PortInUse: Somebody else listens there.
        EnvironmentProblem: The port is not allowed to this user.
        ConfigError: The address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host!r} is no address: {error.strerror} (--host)", param="server.host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _refused(error, host, port) from None
    return listener


def _refused(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} of {host} is in use (--port)",
            param="server.port",
            hint="another chatd may be running; --port 0 takes a free one",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return EnvironmentProblem(f"port {port} is not allowed to this user (--port)", param="server.port")
    return ConfigError(f"{host} is no address of this machine: {error.strerror} (--host)", param="server.host")


def tls_context_arguments(settings: ServerSettings) -> dict[str, str]:
    """Return uvicorn's arguments for TLS, checked.

    Raises:
        ConfigError: One of the pair is missing, or cannot be read.
    """
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None and key is None:
        return {}
    if cert is None or key is None:
        raise ConfigError("TLS needs --tls-cert and --tls-key", param="server.tls_cert")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{cert} and {key} are no certificate and its key: {error}", param="server.tls_cert"
        ) from None
    return {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}


class BehindProxy:
    """Serves the proxy, whose word on the client's address it takes, and this machine; refuses all others.

    Others would be served in the clear, past the proxy.

    Args:
        app: What is served.
        proxy: Addresses and networks, separated by commas.
    """

    def __init__(self, app: ASGIApp, proxy: str) -> None:
        self._app = app
        self._networks = proxy_networks(proxy)
        self._believing = ProxyHeadersMiddleware(app, trusted_hosts=[str(network) for network in self._networks])  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or handshake."""
        peer = (scope.get("client") or ("",))[0]
        if self._is_proxy(peer):
            await self._believing(scope, receive, send)  # type: ignore[arg-type]
        elif is_loopback(peer):
            await self._app(scope, receive, send)
        else:
            refusal = PermissionDenied(
                "this daemon is reached through its proxy (server.behind_proxy)", code="not_the_proxy"
            )
            await error_response(refusal)(scope, receive, send)

    def _is_proxy(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's configuration: one process, no compression, no logs of its own."""
    proxy = settings.behind_proxy
    return uvicorn.Config(
        app if proxy is None else BehindProxy(app, proxy),
        http=BoundedHttpProtocol,
        ws=BoundedWebSocketProtocol,
        ws_max_size=MIN_FRAME_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=float(settings.heartbeat_s),
        ws_ping_timeout=float(settings.heartbeat_s),
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=ACCEPTS_PER_TURN,
        limit_concurrency=settings.max_connections + MAX_HTTP_CONNECTIONS,
        **tls_context_arguments(settings),  # type: ignore[arg-type]
    )


class Server(uvicorn.Server):
    """uvicorn that drains before it stops.

    The first SIGTERM or SIGINT drains, the second ends at once; neither is raised again afterwards, so that a daemon
    that was asked to stop exits with 0.

    Args:
        config: Of uvicorn.
        drain: Awaited before connections are closed.
        on_started: Called once the socket accepts.
        handle_signals: False where somebody else owns the process's signals.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain: Callable[[], Awaitable[None]],
        on_started: Callable[[], None] | None = None,
        handle_signals: bool = True,
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._forced = asyncio.Event()
        self._on_started = on_started
        self._handle_signals = handle_signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        # asyncio's backlog is two things: how many it accepts in one turn, and how many the system keeps waiting.
        for listener in sockets or ():
            listener.listen(BACKLOG)
        if self.started and self._on_started is not None:
            self._on_started()

    def stop(self) -> None:
        """Ask it to drain and stop."""
        self.should_exit = True
        self._asked.set()

    async def main_loop(self) -> None:
        """Serve until asked to stop, and notice that at once."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._asked.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close every connection."""
        draining = asyncio.ensure_future(self._drain())
        forced = asyncio.ensure_future(self._forced.wait())
        await asyncio.wait((draining, forced), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, forced):
            task.cancel()
        await asyncio.gather(draining, forced, return_exceptions=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at once where it was asked to stop before."""
        if self.should_exit:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._forced.set)
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._asked.set)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals that ask a process to end, for as long as it serves."""
        if not self._handle_signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
