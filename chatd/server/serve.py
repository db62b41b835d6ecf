"""`chatd serve`: takes the port, opens the doors, loads behind them, and stops when it is asked to.

```
serve(settings)                    blocks; raises a StartupError that has the command's exit code
await serve_async(settings, …)     the same inside a loop that somebody else owns
```

The order: settings and keys are checked and the port is taken before anything is loaded; `/ready` says 503 with the
phase meanwhile; on SIGTERM or SIGINT everybody is told, answers in progress may end, and connections close with 1012.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from chatd.config import Settings, local_key_path
from chatd.errors import StartupError
from chatd.server.app import build_app
from chatd.server.auth import check_exposure
from chatd.server.backend import Backend, engine_options, startup_reason
from chatd.server.daemon import Daemon
from chatd.server.listen import Server, bind, tls_context_arguments, uvicorn_config
from chatd.server.logging import configure_logging, get_logger
from chatd.server.reload import LoadSettings, TenantReload, on_hangup
from chatd.tenants.keys import KeyStore, local_key

logger = get_logger("chatd.server")


@dataclass(frozen=True, slots=True)
class Serving:
    """What `on_ready` is told.

    Attributes:
        url: Where the daemon answers.
        model: The name that clients use.
        daemon: For tests.
    """

    url: str
    model: str
    daemon: Daemon


OnReady = Callable[[Serving], None]
MakeBackend = Callable[[Daemon, Settings], Backend]


def serve(settings: Settings, *, load_settings: LoadSettings | None = None, on_ready: OnReady | None = None) -> None:
    """Serve until the process is asked to stop.

    Args:
        settings: All of them.
        load_settings: Reads them again, on SIGHUP; without it that is left to end the process.
        on_ready: Called once turns are taken; by default it is logged.

    Raises:
        ConfigError: A setting, the keys file, or an address that would let strangers in.
        PortInUse: Somebody else listens there; nothing was loaded.
        StartupError: The model or the engine cannot be had.
    """
    configure_logging(settings.log.level, settings.log.format)
    asyncio.run(serve_async(settings, load_settings=load_settings, on_ready=on_ready))


async def serve_async(
    settings: Settings,
    *,
    load_settings: LoadSettings | None = None,
    on_ready: OnReady | None = None,
    on_listening: Callable[[str], None] | None = None,
    make_backend: MakeBackend = Backend,
    stop: asyncio.Event | None = None,
    handle_signals: bool = True,
) -> None:
    """Serve until the process is asked to stop, or `stop` is set.

    Args:
        settings: All of them.
        load_settings: See `serve`.
        on_ready: Called once turns are taken.
        on_listening: Called with the URL once the doors are open.
        make_backend: Makes what serves behind them.
        stop: Another way to ask it to stop.
        handle_signals: False where somebody else owns the process's signals.

    Raises:
        StartupError: See `serve`.
    """
    daemon = open_daemon(settings)
    engine_options(settings)
    tls = tls_context_arguments(settings.server)
    config = uvicorn_config(build_app(daemon), settings.server)
    listener = bind(settings.server.host, settings.server.port)
    url = _url_of(listener, has_tls=bool(tls))
    daemon.url, daemon.owns_process = url, handle_signals
    backend = make_backend(daemon, settings)
    failure: list[BaseException] = []

    def set_frame_limit(num_bytes: int) -> None:
        config.ws_max_size = num_bytes

    def listening() -> None:
        logger.info("server.listening", url=url)
        if on_listening is not None:
            on_listening(url)

    daemon.on_frame_limit = set_frame_limit
    server = Server(
        config,
        drain=lambda: daemon.drain(settings.server.drain_timeout_s),
        on_started=listening,
        handle_signals=handle_signals,
    )

    async def load() -> None:
        try:
            await backend.load()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failure.append(error)
            daemon.fail(startup_reason(error))
            server.stop()
            return
        model = daemon.manager.model.id
        logger.info("server.ready", url=url, model=model, version=daemon.version)
        if on_ready is not None:
            on_ready(Serving(url, model, daemon))

    async def stop_when_set(event: asyncio.Event) -> None:
        await event.wait()
        server.stop()

    tasks = [asyncio.create_task(load(), name="load"), asyncio.create_task(daemon.watch_keys(), name="keys")]
    if stop is not None:
        tasks.append(asyncio.create_task(stop_when_set(stop), name="stop"))
    try:
        with contextlib.ExitStack() as stack:
            if load_settings is not None and handle_signals:
                reload = TenantReload(settings.tenants, load_settings, daemon.tell_engine)
                stack.enter_context(on_hangup(lambda: _spawn_reload(daemon, reload), server.stop))
            await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await daemon.shutdown()
        await backend.close()
        listener.close()
    logger.info("server.stopped")
    if failure:
        raise failure[0]


def _spawn_reload(daemon: Daemon, reload: TenantReload) -> None:
    daemon.spawn(reload.run(), "reload")


def _url_of(listener: socket.socket, *, has_tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def open_daemon(settings: Settings) -> Daemon:
    """Return a daemon with its keys, if its address does not let strangers in.

    Raises:
        ConfigError: Names the settings that mend it.
    """
    server = settings.server
    warnings = check_exposure(
        host=server.host,
        has_keys_file=server.keys_file is not None,
        has_tls=server.tls_cert is not None,
        behind_proxy=server.behind_proxy is not None,
        allow_anonymous=server.allow_anonymous_loopback,
    )
    for warning in warnings:
        logger.warning("server.exposed", warning=warning)
    if server.keys_file is not None:
        keys = KeyStore(server.keys_file)
        logger.info("keys.file", path=str(server.keys_file), tenants=len(keys.tenants))
        if not keys.tenants:
            logger.warning("keys.none", warning=f"{server.keys_file} has no keys (chatd keys create)")
        return Daemon(settings, keys)
    path = local_key_path()
    key = local_key(path)
    logger.info("keys.local", path=str(path))
    return Daemon(settings, KeyStore(None, local=key))


__all__ = ["Serving", "StartupError", "open_daemon", "serve", "serve_async"]
