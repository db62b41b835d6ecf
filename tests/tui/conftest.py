import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def wait_until() -> WaitUntil:
    """Wait until a predicate holds, letting the app under test go on in between."""

    async def wait(predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not predicate():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    return wait


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with ScriptedDaemon([Script(deltas=["Hello ", "**there**", "."])]) as running:
        running.cells = [(1, 0, 0, 0)] * 128 + [(0, 1, 0, 0)] * 64 + [(0, 0, 1, 0)] * 48 + [(0, 0, 0, 1)] * 16
        yield running


@pytest.fixture
def make_app(tmp_path) -> Callable[[ScriptedDaemon], ChatApp]:
    def make(daemon: ScriptedDaemon, key: str | None = None) -> ChatApp:
        return ChatApp(daemon.url, key, copies=tmp_path)

    return make


class Terminal:
    """A child on a pseudo-terminal of 100×130, and all that it wrote."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self._command = command
        self._environment = environment
        self.output = b""
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "Terminal":
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 130, 100, 0, 0))
        ours = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "CHATD_INPUT_HISTORY": "off"}
        environment = {**os.environ, **ours, **self._environment}
        self.process = await asyncio.create_subprocess_exec(
            *self._command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)

    def write(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def _read(self) -> None:
        try:
            self.output += os.read(self._master, 65536)
        except OSError:
            asyncio.get_running_loop().remove_reader(self._master)


@pytest.fixture
def make_terminal() -> type[Terminal]:
    return Terminal
