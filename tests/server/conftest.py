"""A daemon on a free loopback port, over sessions and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from chatd.config import Settings
from chatd.engine.client import EngineState
from chatd.protocol import SUBPROTOCOL, Event, Hello, command_id, decode_event, encode
from chatd.server.daemon import Daemon
from chatd.server.logging import configure_logging
from chatd.server.serve import Serving, serve_async
from chatd.sessions.limits import SessionLimits
from chatd.sessions.manager import SessionManager
from chatd.tenants.keys import create_key
from chatd.testing.sessions import TURN_END, ScriptedEngine, encode_text, make_manager

MODEL = "bytes"


class TickingEngine(ScriptedEngine):
    """A scripted engine that goes on by itself, a step for each turn of the loop, unless it is held."""

    def __init__(self, reply: Callable[[list[int]], Sequence[int]], *, context: int = 4096) -> None:
        super().__init__(reply, context=context)
        self.state = EngineState.READY
        self.phase = ("ready", 1.0)
        self.num_restarts = 0
        self.held = False
        self.tokens_per_step = 1

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.held or not (self.running or self._outbox):
                await asyncio.sleep(0.001)
            if not self.held:
                self.step(self.tokens_per_step) if self.running else self.flush()


def replying(text: str) -> Callable[[list[int]], list[int]]:
    return lambda _log: [*encode_text(text), TURN_END]


class FakeBackend:
    """Opens the daemon over a scripted engine."""

    def __init__(self, daemon: Daemon, engine: Any, limits: SessionLimits | None, **model: Any) -> None:
        self.daemon = daemon
        self.engine = engine
        self.manager: SessionManager = make_manager(engine, limits=limits, **model)
        daemon.boot = self.manager.boot
        self._ticking: asyncio.Task[None] | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self) -> None:
        self.daemon.report("loading weights", 0.5)
        await self.gate.wait()
        self._ticking = asyncio.create_task(self.engine.tick())
        self.daemon.open(self.manager, self.engine)  # type: ignore[arg-type]

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)


class Running:
    """A daemon that serves."""

    def __init__(self, url: str, daemon: Daemon, backend: FakeBackend, stop: asyncio.Event, key: str) -> None:
        self.url = url
        self.daemon = daemon
        self.backend = backend
        self.engine = backend.engine
        self.manager = backend.manager
        self.stop = stop
        self.key = key
        self.keys: dict[str, str] = {}

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def headers(self, key: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self.key}"}

    @contextlib.asynccontextmanager
    async def chat(self, key: str | None = None, **options: Any) -> AsyncIterator[Talk]:
        """Open a websocket and read the hello."""
        options.setdefault("subprotocols", [SUBPROTOCOL])
        headers = {**self.headers(key), **options.pop("headers", {})}
        async with connect(
            f"ws://127.0.0.1:{self.port}/v1/chat/ws",
            additional_headers=headers,
            compression=None,
            proxy=None,
            max_size=2**24,
            **options,
        ) as socket:
            talk = Talk(socket)
            hello = await talk.next()
            assert isinstance(hello, Hello)
            talk.hello = hello
            yield talk


class Talk:
    """A websocket, by events."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.hello: Hello
        self._num_commands = 0

    async def next(self) -> Event:
        async with asyncio.timeout(10):
            event = decode_event(await self.socket.recv())
        assert event is not None
        return event

    async def until(self, kind: type[Event]) -> list[Event]:
        """Return events up to the first of a kind."""
        events = [await self.next()]
        while not isinstance(events[-1], kind):
            events.append(await self.next())
        return events

    async def closed(self) -> int:
        """Read to the end and return the close code."""
        with pytest.raises(ConnectionClosed) as closed:
            await self._read_on()
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code

    async def _read_on(self) -> None:
        while True:
            await self.next()

    async def send(self, command: Any) -> None:
        await self.socket.send(encode(command) if not isinstance(command, str) else command)

    async def ask(self, command: Any) -> Any:
        """Send a command and return the first event that answers it."""
        text = encode(command) if not isinstance(command, str) else command
        re = command_id(text)
        await self.socket.send(text)
        while True:
            event = await self.next()
            if getattr(event, "re", None) == re:
                return event


async def eventually(is_so: Callable[[], bool]) -> None:
    """Return once something is so."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running_daemon(
    tmp_path: Path,
    reply: Callable[[list[int]], Sequence[int]] | None = None,
    *,
    keys_file: Path | None = None,
    limits: SessionLimits | None = None,
    max_tokens: int | None = 64,
    context: int = 4096,
    engine: Any = None,
    is_open: bool = True,
    **sections: dict[str, Any],
) -> AsyncIterator[Running]:
    """Run a daemon with two tenants: acme (ann, the operator; bob) and beta (eve)."""
    path = keys_file or tmp_path / "keys.json"
    keys: dict[str, str] = {}
    if not path.exists():
        for user, tenant in (("ann", "acme"), ("bob", "acme"), ("eve", "beta")):
            keys[user] = create_key(path, tenant=tenant, user=user, operator=user == "ann")
    server = {"port": 0, "keys_file": path, **sections.pop("server", {})}
    settings = Settings(server=server, **sections)
    engine = engine or TickingEngine(reply or replying("hello"), context=context)
    stop = asyncio.Event()
    opened: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    made: list[FakeBackend] = []

    def make_backend(daemon: Daemon, _settings: Settings) -> Any:
        made.append(FakeBackend(daemon, engine, limits, max_tokens=max_tokens, context=context))
        if not is_open:
            made[0].gate.clear()
        return made[0]

    task = asyncio.create_task(
        serve_async(
            settings,
            on_ready=opened.set_result,
            on_listening=url.set_result,
            make_backend=make_backend,
            stop=stop,
            handle_signals=False,
        )
    )
    try:
        done, _ = await asyncio.wait(
            (task, opened if is_open else url), return_when=asyncio.FIRST_COMPLETED, timeout=10
        )
        assert done, "the daemon did not start"
        if task in done:
            task.result()
        running = Running(await url, made[0].daemon, made[0], stop, keys.get("bob", ""))
        running.keys = keys
        yield running
    finally:
        engine.held = False
        stop.set()
        async with asyncio.timeout(15):
            await task


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that the daemon logs, most talkative, as JSON lines."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers, root.level
    configure_logging("debug", "json", stream)
    yield stream
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level
    logging.getLogger("uvicorn.access").disabled = False
    for name in ("chatd", "uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
def local_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "chatd"


Start = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs a daemon: `async with start(reply, server={...}) as running`."""
    return lambda *arguments, **options: running_daemon(tmp_path, *arguments, **options)
