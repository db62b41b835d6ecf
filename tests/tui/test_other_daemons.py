"""The terminal client with a daemon of another version: what that cannot do is grey, and nothing is an error."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from chatd import protocol as p
from chatd.errors import ChatdError
from chatd.server.websocket import CAPS
from chatd.testing.other_versions import newer, older
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.command_table import COMMANDS
from chatd_tui.screens.found import FoundScreen
from chatd_tui.screens.help import HelpScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.widgets.answer import AnswerMessage

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]
SIZE = (120, 36)
ALL_CAPS = CAPS


class WatchedApp(ChatApp):
    """Remembers every error that it showed."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url, copies=folder)
        self.errors: list[str] = []

    def show_error(self, error: ChatdError) -> None:
        self.errors.append(error.message)
        super().show_error(error)


def answers(app: ChatApp) -> list[str]:
    return [answer.text for answer in app.chat.query(AnswerMessage)]


@pytest.mark.parametrize(
    ("rewrite", "caps"),
    [(older, ()), (older, ("fork", "branch")), (newer, ALL_CAPS)],
    ids=["oldest", "older", "newer"],
)
async def test_what_both_know_works_and_the_rest_is_grey(
    tmp_path: Path, wait_until, rewrite: Callable[[str], list[str]], caps: tuple[str, ...]
) -> None:
    scripts = [Script(deltas=["first"]), Script(deltas=["second"])]
    async with ScriptedDaemon(scripts, caps=caps) as daemon:
        daemon.rewrite = rewrite
        app = WatchedApp(daemon.url, tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and app.context.connected)

            async def typed(text: str) -> None:
                app.chat.composer.focus()
                app.chat.composer.load_text(text)
                await pilot.press("enter")

            await typed("hello")
            await wait_until(lambda: answers(app) == ["first"] and not app.conversation.busy)
            await typed("/rename Rivers")
            await wait_until(lambda: app.chat.title_bar.view.session == "Rivers")
            await wait_until(lambda: app.chat.sessions.option_count == 2)

            for command in COMMANDS:
                if command.cap and command.cap not in caps:
                    assert app.unavailable(command) == "this daemon is too old for that"
            await typed("/regenerate")
            if "branch" in caps:
                await wait_until(lambda: answers(app) == ["second"] and not app.conversation.busy)
            else:
                assert app.chat.status.kind == "warning"
                assert app.chat.status.text == "/regenerate: this daemon is too old for that"
                app.chat.composer.clear()

            await pilot.press("f1")
            await wait_until(lambda: isinstance(app.screen, HelpScreen))
            await pilot.press("escape")
            await typed("/pool")
            await wait_until(lambda: isinstance(app.screen, PoolScreen))
            await pilot.pause()
            assert app.screen.has_class("-nomap") == ("pool.map" not in caps)
            await pilot.press("escape")
            await typed("/search first")
            await wait_until(lambda: isinstance(app.screen, FoundScreen))
            await pilot.press("escape")
            await typed("/watch")
            await wait_until(lambda: app.link.role == "observer")
            assert daemon.sessions["ses_1"].items
            assert app.errors == []


@pytest.mark.parametrize("rewrite", [older, newer])
async def test_an_answer_of_one_goes_on_through_a_lost_connection(
    tmp_path: Path, wait_until, rewrite: Callable[[str], list[str]]
) -> None:
    async with ScriptedDaemon([Script(deltas=["a", "b", "c", "d"], manual=True)]) as daemon:
        daemon.rewrite = rewrite
        app = WatchedApp(daemon.url, tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and app.context.connected)
            await pilot.press(*"go", "enter")
            daemon.release(2)
            await wait_until(lambda: answers(app) == ["ab"])
            daemon.abort()
            daemon.release(3)
            await wait_until(lambda: app.link.retry_now() or (answers(app) == ["abcd"] and not app.conversation.busy))
            assert app.errors == []
            assert p.SessionAttach in {type(command) for command in daemon.commands}
