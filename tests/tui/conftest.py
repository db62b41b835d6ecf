import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from chatd.testing.pseudo_terminal import PseudoTerminal
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


class Terminal(PseudoTerminal):
    """A client on a terminal of 100×130."""

    def __init__(self, command: list[str], **environment: str) -> None:
        ours = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "CHATD_INPUT_HISTORY": "off"}
        super().__init__(command, {**os.environ, **ours, **environment}, columns=100, rows=130)


@pytest.fixture
def make_terminal() -> type[Terminal]:
    return Terminal
