"""Pictures of what is said of daemons: several in one list, what is in the way of one, what a search found there."""

from pathlib import Path

import pytest
from textual.pilot import Pilot

from chatd import protocol as p
from chatd.client import ConnectionPhase, ConnectionState
from chatd.config import Server
from chatd.errors import AuthenticationError, Unavailable
from chatd.testing.protocol_values import make_hello, make_info
from chatd_tui.app import ChatApp
from chatd_tui.messages import ConnectionChanged, SessionsListed
from chatd_tui.screens.found import FoundScreen
from chatd_tui.views import FoundRow, SessionRow

SIZES = [(60, 18), (100, 30), (160, 48)]
NAMES = ("box", "gpu", "lab")


def info(ident: str, title: str, *, busy: bool = False, writers: int = 0) -> p.SessionInfo:
    return make_info(ident, title, num_items=4, busy=busy, writers=writers)


def hello(name: str) -> p.Hello:
    return make_hello(model=p.ModelInfo(id=f"model-of-{name}", context=8192, block_size=16, blocks=512))


class StillServers(ChatApp):
    """The client with several daemons of which nothing is there, and nothing that blinks."""

    def __init__(self, folder: Path) -> None:
        super().__init__([Server(name, "http://127.0.0.1:1") for name in NAMES], copies=folder)

        async def run() -> None:
            return None

        for daemon in self.daemons:
            daemon.link.run = run  # type: ignore[method-assign]
        self.chat.composer.cursor_blink = False

    def hear(self, name: str, news: ConnectionChanged | SessionsListed) -> None:
        news.server = name
        self.post_message(news)


async def servers(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillServers)
    connected = ConnectionState(ConnectionPhase.CONNECTED)
    app.hear("box", ConnectionChanged(connected, hello("box")))
    app.hear("box", SessionsListed([info("s1", "Paged memory", busy=True, writers=1), info("s2", "Dinner")]))
    away = ConnectionState(ConnectionPhase.WAITING, 3, 2.0, Unavailable("away", code="unreachable"))
    app.hear("gpu", ConnectionChanged(connected, hello("gpu")))
    app.hear("gpu", SessionsListed([info("s1", "Kernels")]))
    app.hear("gpu", ConnectionChanged(away, None))
    refused = ConnectionState(ConnectionPhase.CLOSED, 1, error=AuthenticationError("key is not known"))
    app.hear("lab", ConnectionChanged(refused, None))
    await pilot.pause()
    await pilot.press("f3")
    await pilot.pause()


async def nobody(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillServers)
    away = ConnectionState(ConnectionPhase.WAITING, 3, 2.0, Unavailable("away", code="unreachable"))
    app.hear("box", ConnectionChanged(away, None))
    await pilot.pause()


async def another_key(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillServers)
    refused = ConnectionState(ConnectionPhase.CLOSED, 1, error=AuthenticationError("key is not known"))
    app.hear("box", ConnectionChanged(refused, None))
    await pilot.pause()


async def found(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillServers)
    await servers(pilot)
    rows = [
        FoundRow(
            "box", SessionRow.of(info("s1", "Paged memory"), None), "m", "… blocks of a pool, found by their hash"
        ),
        FoundRow("gpu", SessionRow.of(info("s1", "A pool for kernels"), None)),
    ]
    app.show_found("pool hash", rows)
    while not isinstance(app.screen, FoundScreen):
        await pilot.pause()
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES, ids=["60x18", "100x30", "160x48"])
@pytest.mark.parametrize("scene", [servers, nobody, another_key, found])
def test_what_is_said_of_daemons_looks_as_it_did(
    snap_compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], scene
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/ada/.config")
    assert snap_compare(StillServers(tmp_path), terminal_size=size, run_before=scene)
