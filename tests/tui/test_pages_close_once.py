"""A page that is told twice to close leaves what is below it where it is, however fast the keys come."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

import pytest

from chatd.config import Server
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.screens.form import FormScreen, LeaveScreen
from chatd_tui.screens.help import HelpScreen
from chatd_tui.screens.pool import PoolScreen

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.mark.parametrize(("key", "page"), [("f1", HelpScreen), ("f2", PoolScreen), ("f4", FormScreen)])
async def test_a_page_that_is_told_to_close_twice_leaves_the_conversation(
    tmp_path: Path, wait_until: WaitUntil, key: str, page: type
) -> None:
    async with ScriptedDaemon() as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(90, 30)) as pilot:
            await wait_until(lambda: app.link.hello is not None)
            await pilot.press(key)
            await wait_until(lambda: isinstance(app.screen, page))
            shown = app.screen
            shown.dismiss()
            shown.dismiss()
            await wait_until(lambda: app.screen is app.chat)
            await pilot.press("h", "i")
            assert app.chat.composer.text == "hi"


async def test_a_question_about_a_form_that_is_closed_twice_leaves_the_form(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    async with ScriptedDaemon() as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(90, 30)) as pilot:
            await wait_until(lambda: app.link.hello is not None)
            await pilot.press("f4")
            await wait_until(lambda: isinstance(app.screen, FormScreen))
            form = app.screen
            await pilot.press("x", "escape")
            await wait_until(lambda: isinstance(app.screen, LeaveScreen))
            question = app.screen
            question.dismiss(None)
            question.dismiss(None)
            await pilot.pause()
            assert app.screen is form
            form.dismiss()
            await wait_until(lambda: app.screen is app.chat)


async def test_the_palette_that_is_closed_twice_leaves_the_conversation(tmp_path: Path, wait_until: WaitUntil) -> None:
    async with ScriptedDaemon() as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(90, 30)) as pilot:
            await wait_until(lambda: app.link.hello is not None)
            await pilot.press("ctrl+p")
            await wait_until(lambda: app.screen is not app.chat)
            palette = app.screen
            palette.dismiss()
            palette.dismiss()
            await pilot.pause()
            assert app.screen is app.chat


async def test_what_was_said_of_a_key_is_gone_when_another_one_is_tried(tmp_path: Path, wait_until: WaitUntil) -> None:
    keys = ["wrong"]
    async with ScriptedDaemon(key="right") as daemon:
        app = ChatApp([Server("", daemon.url, lambda: keys[-1])], copies=tmp_path)
        async with app.run_test(size=(90, 30)) as pilot:
            await wait_until(lambda: app.chat.status.kind == "error")
            body = b'{"error": {"type": "server_error", "code": "loading", "message": "loading: weights 50%"}}'
            daemon.refuse = (HTTPStatus.SERVICE_UNAVAILABLE, body)
            keys.append("right")
            await pilot.press("ctrl+r")
            await wait_until(lambda: "the daemon loads" in app.chat.title_bar.view.connection)
            assert app.chat.status.kind == "idle"
