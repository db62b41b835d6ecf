"""The first screen says what this is and how to begin; where nobody answers, what to do about it, and it goes on."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from chatd.client import ConnectionPhase, ConnectionState
from chatd.config import Server
from chatd.errors import AuthenticationError, NotFound, Unavailable
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.keymap import DEFAULT
from chatd_tui.obstacles import obstacle
from chatd_tui.widgets.welcome import KEYS, Welcome

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]
SIZE = (90, 30)


def page(app: ChatApp) -> str:
    return str(app.chat.query_one(Welcome).render()) if app.is_running and app.chat.query(Welcome) else ""


async def test_it_says_who_answers_what_this_is_and_the_keys_that_matter(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=SIZE):
            await wait_until(lambda: f"Ask {daemon.model.id} anything." in page(app))
            assert "a turn costs only what is new" in page(app)
            assert len(KEYS) == 5
            assert [key for key, _ in DEFAULT.named(KEYS) if f"{key} " not in page(app)] == []
            assert app.chat.query_one(Welcome).region.bottom <= app.chat.transcript.region.bottom


async def test_no_daemon_says_what_to_run_and_one_that_comes_is_found(tmp_path: Path, wait_until) -> None:
    daemon = ScriptedDaemon()
    async with daemon:
        url = daemon.url
    app = ChatApp(url, copies=tmp_path)
    async with app.run_test(size=SIZE):
        await wait_until(lambda: f"No daemon answers at {url}." in page(app))
        port = urlsplit(url).port
        assert f"chatd serve --port {port}  starts one, in another terminal" in page(app)
        async with daemon:
            await wait_until(lambda: app.link.retry_now() or "anything" in page(app))
            assert "No daemon" not in page(app)


async def test_a_wrong_key_says_how_to_give_one_and_another_one_is_used_at_once(tmp_path: Path, wait_until) -> None:
    keys = ["wrong"]
    async with ScriptedDaemon(key="right") as daemon:
        app = ChatApp([Server("", daemon.url, lambda: keys[-1])], copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: f"The daemon at {daemon.url} wants another key." in page(app))
            assert f"CHATD_KEY=ck_… chatd-tui {daemon.url}" in page(app)
            assert "servers.toml" in page(app)
            keys.append("right")
            await pilot.press("ctrl+r")
            await wait_until(lambda: "anything" in page(app))
            assert app.chat.status.kind == "idle"


async def test_a_daemon_that_loads_is_said_to(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as daemon:
        body = (
            b'{"error": {"type": "server_error", "code": "loading", "message": "the daemon is loading: weights 42%"}}'
        )
        daemon.refuse = (HTTPStatus.SERVICE_UNAVAILABLE, body)
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=SIZE):
            await wait_until(lambda: "loads its model" in page(app))
            assert "the daemon is loading: weights 42%" in page(app)
            daemon.refuse = None
            await wait_until(lambda: app.link.retry_now() or "anything" in page(app))


def test_what_to_do_depends_on_what_is_in_the_way() -> None:
    def said(error: Exception, phase: ConnectionPhase = ConnectionPhase.WAITING) -> str:
        found = obstacle(ConnectionState(phase, error=error), "https://box:1", "F9")
        return str(found)

    assert (
        obstacle(ConnectionState(ConnectionPhase.CONNECTED, error=Unavailable("before")), "https://box:1", "F9") is None
    )
    assert obstacle(ConnectionState(ConnectionPhase.CONNECTING), "https://box:1", "F9") is None
    assert "on that machine" in said(Unavailable("refused", code="unreachable"))
    assert "F9 tries at once" in said(Unavailable("refused", code="unreachable"))
    assert "wants another key" in said(AuthenticationError("no"), ConnectionPhase.CLOSED)
    refused = said(
        NotFound("it is a \x1b[31mprinter", code="not_a_daemon", hint="look \x07there"), ConnectionPhase.CLOSED
    )
    assert "look" in refused
    assert "\x1b" not in refused
    assert "\x07" not in refused
