"""The colors: every theme draws every page, plain ANSI has the terminal's own, and NO_COLOR has none."""

import re
from collections.abc import Callable

import pytest
from textual.color import Color

from chatd.config import theme_path
from chatd.errors import ConfigError
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.screens.form import FormScreen
from chatd_tui.screens.help import HelpScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.theme import THEMES, check_theme
from chatd_tui.theme_memory import ThemeMemory, first_theme, usual_memory
from chatd_tui.top import PoolApp

MakeApp = Callable[..., ChatApp]


def connected(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.is_running and app.chat.title_bar.view.phase == "connected"


async def test_every_theme_draws_every_page(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(connected(app))
        app.chat.composer.load_text("hello")
        await pilot.press("enter")
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
        for key, page in (("f1", HelpScreen), ("f2", PoolScreen), ("f4", FormScreen)):
            await pilot.press(key)
            await wait_until(lambda page=page: isinstance(app.screen, page))
            for name in THEMES:
                app.theme = name
                await pilot.pause()
                assert {"muted", "faint", "line"} <= app.theme_variables.keys()
            await pilot.press("escape")
            await wait_until(lambda: app.screen is app.chat)


async def test_a_theme_is_chosen_by_name_or_from_all(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(connected(app))
        for typed, said in (("nord", "the colors are those of nord"), ("none", "there is no theme 'none'")):
            app.chat.composer.load_text(f"/theme {typed}")
            await pilot.press("enter")
            await wait_until(lambda said=said: app.chat.status.text == said)
            app.chat.composer.clear()
        assert app.theme == "nord"
        app.chat.composer.load_text("/theme")
        await pilot.press("enter")
        await wait_until(lambda: app.screen is not app.chat)
        await pilot.press(*"dracula")
        await wait_until(lambda: "dracula" in str(app.screen.query("CommandList").first().options))
        await pilot.press("escape")


def test_a_theme_that_does_not_exist_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="there is no theme '␛x'"):
        check_theme("\x1bx")


@pytest.mark.parametrize("theme", ["ansi-dark", "ansi-light"])
async def test_plain_ansi_has_no_color_that_is_not_the_terminals(
    daemon: ScriptedDaemon, tmp_path, wait_until, theme: str
) -> None:
    app = ChatApp(daemon.url, copies=tmp_path, theme=theme)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_until(connected(app))
        app.chat.composer.load_text("hello")
        await pilot.press("enter")
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
        await pilot.pause()
        for strip in app.screen._compositor.render_strips():
            for segment in strip:
                for color in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                    assert color is None or color.triplet is None, (segment, color)


async def test_no_color_is_shades_of_grey(
    daemon: ScriptedDaemon, tmp_path, wait_until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = ChatApp(daemon.url, copies=tmp_path)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_until(connected(app))
        await pilot.pause()
        shades = set(re.findall(r"#[0-9a-f]{6}", app.export_screenshot()))
        assert shades
        colored = {shade for shade in shades if len({*Color.parse(shade).rgb}) > 1}
        # What a screenshot draws around the screen is not the app's.
        assert colored <= {"#ff5f57", "#febc2e", "#28c840", "#c5c8c6"}


async def test_the_theme_that_was_chosen_is_there_at_the_next_start(
    daemon: ScriptedDaemon, tmp_path, wait_until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("CHATD_THEME", raising=False)
    assert first_theme() == "chatd"
    app = ChatApp(daemon.url, copies=tmp_path, chosen=usual_memory(), theme=first_theme())
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(connected(app))
        assert not theme_path().exists(), "what nobody chose is not kept"
        app.chat.composer.load_text("/theme nord")
        await pilot.press("enter")
        await wait_until(theme_path().exists)
        assert app.chat.status.hint == "the client begins with them now"
        # By the list as well.
        app.theme = "dracula"
        await wait_until(lambda: first_theme() == "dracula")
    assert [each.name for each in theme_path().parent.iterdir()] == ["theme"]
    assert theme_path().stat().st_mode & 0o777 == 0o600
    # What is asked for now goes before what was chosen once.
    monkeypatch.setenv("CHATD_THEME", "ansi-dark")
    assert first_theme() == "ansi-dark"
    assert first_theme("gruvbox") == "gruvbox"


def test_a_theme_that_is_not_known_any_more_or_a_file_that_is_none_is_passed_over(tmp_path) -> None:
    for content in (b"solarized-of-tomorrow\n", b"\xff\x1b[2J", b"x" * 10_000, b""):
        (tmp_path / "theme").write_bytes(content)
        assert ThemeMemory(tmp_path / "theme").recall() is None
    assert ThemeMemory(tmp_path).recall() is None
    (tmp_path / "theme").unlink()
    ThemeMemory(tmp_path / "theme" / "none").keep("nord")
    (tmp_path / "file").write_text("")
    # Where nothing can be written the client goes on.
    ThemeMemory(tmp_path / "file" / "theme").keep("nord")
    ThemeMemory().keep("nord")
    assert ThemeMemory().recall() is None


async def test_the_pool_alone_has_the_theme_as_well(daemon: ScriptedDaemon, wait_until) -> None:
    app = PoolApp(daemon.url, theme="ansi-light")
    async with app.run_test(size=(80, 24)):
        await wait_until(lambda: isinstance(app.screen, PoolScreen))
        assert {"muted", "faint", "line"} <= app.theme_variables.keys()
