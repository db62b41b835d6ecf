"""`chatd top`: the pool page alone, by Textual's pilot and in a pseudo-terminal."""

import sys

from textual.widgets import Static

from chatd import protocol as p
from chatd.errors import AuthenticationError
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd.testing.scripted_session import ScriptedSession
from chatd_tui.keymap_file import read_keymap
from chatd_tui.screens.help import HelpScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.top import PoolApp


def drawn(app: PoolApp, ident: str) -> str:
    return str(app.screen.query_one(ident, Static).render())


async def test_the_page_opens_by_itself_and_follows_the_pool(daemon: ScriptedDaemon, wait_until) -> None:
    daemon.sessions["ses_a"] = ScriptedSession("ses_a", "Rivers [bold]", None)
    app = PoolApp(daemon.url)
    async with app.run_test(size=(120, 36)):
        await wait_until(lambda: isinstance(app.screen, PoolScreen) and "256 blocks" in drawn(app, "#head"))
        await wait_until(lambda: "Rivers [bold]" in drawn(app, "#sessions"))
        wish = next(command for command in reversed(daemon.commands) if isinstance(command, p.PoolSubscribe))
        assert wish.detail == "map"
        lakes = p.SessionBlocks(session="ses_b", title="Lakes", held=3, shared=1, tokens=40, tier="disk", active=False)
        await daemon.show_pool([(0, 0, 1, 0)] * 256, sessions=[lakes])
        await wait_until(lambda: "Lakes" in drawn(app, "#sessions") and "disk" in drawn(app, "#sessions"))
        assert not any(isinstance(command, p.SessionCreate) for command in daemon.commands)


async def test_each_of_its_keys_ends_it(daemon: ScriptedDaemon, wait_until) -> None:
    for key in ("escape", "q", "ctrl+c", "ctrl+q"):
        app = PoolApp(daemon.url)
        async with app.run_test() as pilot:
            await wait_until(lambda app=app: isinstance(app.screen, PoolScreen))
            await pilot.press(key)
            await wait_until(lambda app=app: not app.is_running)
        assert app.return_value is None, key


async def test_a_lost_connection_is_shown_over_what_is_no_longer_true(daemon: ScriptedDaemon, wait_until) -> None:
    app = PoolApp(daemon.url)
    async with app.run_test(size=(120, 36)):
        await wait_until(lambda: isinstance(app.screen, PoolScreen) and "1 running" in drawn(app, "#head"))
        await daemon.stop()
        await wait_until(lambda: "connect" in drawn(app, "#head"))
        assert "running" not in drawn(app, "#head")
        await daemon.start()
        app.link.retry_now()
        await wait_until(lambda: "1 running" in drawn(app, "#head"))


async def test_a_daemon_without_the_map_shows_the_rest(wait_until) -> None:
    async with ScriptedDaemon(caps=()) as plain:
        app = PoolApp(plain.url)
        async with app.run_test(size=(60, 16)):
            await wait_until(lambda: isinstance(app.screen, PoolScreen) and "256 blocks" in drawn(app, "#head"))
            assert not any(
                isinstance(command, p.PoolSubscribe) and command.detail == "map" for command in plain.commands
            )


async def test_a_key_that_is_refused_ends_it_and_is_told(wait_until) -> None:
    async with ScriptedDaemon(key="right") as guarded:
        app = PoolApp(guarded.url, "wrong")
        async with app.run_test():
            await wait_until(lambda: not app.is_running)
        assert isinstance(app.return_value, AuthenticationError)


async def test_the_command_draws_in_a_terminal_and_quits(make_terminal, wait_until, daemon: ScriptedDaemon) -> None:
    command = [sys.executable, "-m", "chatd.cli", "top", "--url", daemon.url]
    async with make_terminal(command) as terminal:
        await wait_until(lambda: b"256 blocks of 16" in terminal.output)
        terminal.write(b"q")
        await wait_until(lambda: terminal.process.returncode is not None)
        assert terminal.process.returncode == 0


async def test_the_keymap_file_holds_here_too_and_f1_lists_the_keys(daemon: ScriptedDaemon, wait_until) -> None:
    app = PoolApp(daemon.url, keymap=read_keymap('[keys]\nquit = "f10"\n[pool]\npause = "p"\nclose = []'))
    async with app.run_test(size=(120, 36)) as pilot:
        await wait_until(lambda: isinstance(app.screen, PoolScreen) and app.screen.player.shown is not None)
        page = app.screen
        await pilot.press("f1")
        await wait_until(lambda: isinstance(app.screen, HelpScreen))
        shown = str(app.screen.query_one(Static).render()).split("\n")
        assert any(line.split()[:2] == ["pause", "p"] for line in shown)
        assert not any("/fork" in line for line in shown)
        await pilot.press("enter")
        await wait_until(lambda: app.screen is page)
        await pilot.press("p")
        assert page.player.is_paused
        await pilot.press("ctrl+q", "q")
        assert app.is_running
        await pilot.press("f10")
        await wait_until(lambda: not app.is_running)
