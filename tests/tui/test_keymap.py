"""The keymap file: what it may say, what is said of a wrong one, and the keys in the client."""

from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.widgets import Static

from chatd.errors import ConfigError
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.command_table import COMMANDS
from chatd_tui.commands import find
from chatd_tui.keymap import DEFAULT
from chatd_tui.keymap_file import canonical, load_keymap, read_keymap
from chatd_tui.screens.help import HelpScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.widgets.key_line import KeyLine
from chatd_tui.widgets.status import StatusView
from chatd_tui.widgets.welcome import Welcome


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("ctrl+o", "ctrl+o"),
        ("Ctrl+O", "ctrl+o"),
        ("shift+ctrl+F5", "ctrl+shift+f5"),
        ("alt+x", "alt+x"),
        ("PageUp", "pageup"),
        ("E", "E"),
        ("?", "?"),
        ("question_mark", "?"),
        ("ctrl+backslash", "ctrl+backslash"),
        ("ctrl+ctrl+a", None),
        ("hyperdrive+a", None),
        ("ctrl+", None),
        ("nokey", None),
        ("", None),
        ("\x1b", None),
        ("ä", "ä"),
    ],
)
def test_keys_are_named_as_textual_names_them(typed: str, key: str | None) -> None:
    assert canonical(typed) == key


def test_what_a_file_names_has_these_keys_and_the_rest_stays() -> None:
    keymap = read_keymap(
        """
        [keys]
        pool = "f6"
        search = ["ctrl+f", "alt+f"]
        copy = []
        help = "f2"          # the pool's, which has another one now
        stop = "ctrl+x"
        [message]
        edit = "E"
        "branch previous" = "h"
        "branch next" = ["l", "space"]
        pin = "p"
        """
    )
    moved = {"pool": ("f6",), "search": ("ctrl+f", "alt+f"), "copy": (), "help": ("f2",), "stop": ("ctrl+x",)}
    assert keymap.keys == {**DEFAULT.keys, **moved}
    assert {key for key, does in keymap.message_keys.items() if does[0] == "branch"} == {"h", "l", "space"}
    assert "e" not in keymap.message_keys
    assert keymap.message_keys["p"] == ("pin", "")
    assert not keymap.stops()
    assert [keymap.way(name) for name in ("stop", "pool", "copy")] == ["Ctrl+X", "F6", "/copy"]
    assert [keymap.names(find(COMMANDS, name)) for name in ("search", "copy", "edit", "branch")] == [
        ["Ctrl+F", "Alt+F"],
        ["y"],
        ["E"],
        ["h", "l", "Space"],
    ]
    assert keymap.bottom()[:3] == (("F2", "help"), ("^P", "commands"), ("F6", "pool"))
    assert "copy" not in {meaning for _, meaning in keymap.bottom()}
    assert keymap.message_bottom()[1] == ("hlSpace", "versions")
    assert read_keymap("") == DEFAULT
    assert DEFAULT.moved() == {}


def test_every_command_can_have_a_key() -> None:
    spare = [f"{modifier}+f{number}" for modifier in ("ctrl", "alt") for number in range(1, 25)]
    text = "[keys]\n" + "".join(f'{command.name} = "{key}"\n' for command, key in zip(COMMANDS, spare, strict=False))
    assert read_keymap(text).keys == {command.name: (key,) for command, key in zip(COMMANDS, spare, strict=False)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[keys]\npooll = "f6"', "my.toml:2: there is no command 'pooll'; did you mean pool?"),
        ('[keys]\n\npool = "f99999+x"', "my.toml:3: 'f99999+x' is no key; keys are such as ctrl+o, alt+x, f6"),
        ("[keys]\npool = 7", 'my.toml:2: keys are a text such as "ctrl+o", or a list of such; [] is none'),
        (
            '[keys]\npool = "x"',
            "my.toml:2: x is needed in the input; take a function key, or Ctrl or Alt with a letter",
        ),
        ('[keys]\npool = "shift+up"', "my.toml:2: Shift+↑ is needed in the input"),
        ('[keys]\npool = "ctrl+m"', "my.toml:2: Ctrl+M cannot be told from Enter, which terminals send for it"),
        ('[keys]\npool = "ctrl+c"', "my.toml:2: Ctrl+C copies, and quits, always"),
        ('[keys]\npool = "alt+enter"', "my.toml:2: Alt+Enter makes a new line, always"),
        ('[keys]\npool = "escape"', "my.toml:2: Esc leaves what is open, always"),
        (
            '[keys]\n# x\npool = "F3"',
            "my.toml:3: F3 is the key of /conversations already; give that another one, or none: "
            "conversations = [] under [keys]",
        ),
        ('[keys]\npool = "f6"\nnew = ["f7", "f6"]', "my.toml:3: F6 is the key of /new already"),
        ('[message]\nfork = "r"', "my.toml:2: r is the key of /regenerate already"),
        ('[message]\nfork = "left"', 'none: "branch previous" = [] under [message]'),
        ('[message]\nfork = "ctrl+y"', "my.toml:2: Ctrl+Y is the key of /copy already"),
        ('[message]\n"edit now" = "E"', "my.toml:2: /edit takes nothing after its name"),
        ('[message]\nedit = "tab"', "my.toml:2: Tab goes back to the input, always"),
        ('[message]\nedit = "/"', "my.toml:2: / begins a command, always"),
        (
            '[shortcuts]\npool = "f6"',
            "my.toml:1: there is no table [shortcuts]; there are [keys], [message] and [pool]",
        ),
        ('\nkeys = "f6"', "my.toml:2: there is no table [keys]"),
        ('keys.pooll = "f6"', "my.toml:1: there is no command 'pooll'"),
        ('keys = { pooll = "f6" }', "my.toml: there is no command 'pooll'"),
        ('[keys]\npool = "f6', "my.toml:2: Unterminated string"),
        ('[keys]\npool = "f6"\npool = "f7"', "my.toml:3: Cannot overwrite a value"),
        ('[keys]\n"\\u001b[2J" = "f6"', "my.toml: there is no command '␛[2J'"),
    ],
)
def test_a_mistake_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keymap(text, "my.toml")
    assert caught.value.message.startswith(said) or said in caught.value.message
    assert caught.value.message.count("\n") == 0


def test_all_mistakes_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_keymap('[message]\nedit = "r"\n[keys]\nnone = "f6"\npool = "a"', "k")
    assert [line.split(":")[1] for line in caught.value.message.split("\n")] == ["2", "4", "5"]


def test_the_usual_file_may_be_missing_and_a_named_one_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_keymap() is DEFAULT
    with pytest.raises(ConfigError, match="there is no keymap file"):
        load_keymap(tmp_path / "mine.toml")
    (tmp_path / "chatd").mkdir()
    (tmp_path / "chatd" / "keymap.toml").write_text('[keys]\npool = "f6"')
    assert load_keymap().keys["pool"] == ("f6",)
    (tmp_path / "mine.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_keymap(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keymap(tmp_path)


async def test_keys_work_and_are_shown_as_they_are_bound(daemon: ScriptedDaemon, tmp_path: Path, wait_until) -> None:
    keymap = read_keymap(
        '[keys]\npool = "f1"\nhelp = ["f2", "ctrl+e"]\nquit = "f10"\nrename = "ctrl+t"\ncopy = []\n[message]\npin = "."'
    )
    app = ChatApp(daemon.url, copies=tmp_path, keymap=keymap)
    async with app.run_test(size=(110, 50)) as pilot:
        await wait_until(lambda: app.is_running and app.chat.title_bar.view.phase == "connected")
        first = app.chat.query_one(Welcome).render().plain.split("\n")
        assert [line.split()[0] for line in first if "where the memory" in line or "all keys" in line] == ["F1", "F2"]
        await pilot.press("f1")
        await wait_until(lambda: isinstance(app.screen, PoolScreen))
        await pilot.press("f1")
        await wait_until(lambda: app.screen is app.chat)
        # The input would take Ctrl+E for itself.
        await pilot.press("ctrl+e")
        await wait_until(lambda: isinstance(app.screen, HelpScreen))
        shown = str(app.screen.query_one(Static).render())
        assert "keymap.toml" in shown
        assert any(line.split()[:2] == ["/pool", "F1"] for line in shown.split("\n"))
        assert any(line.split()[:3] == ["/help", "F2,", "Ctrl+E"] for line in shown.split("\n"))
        await pilot.press("f2")
        await wait_until(lambda: app.screen is app.chat)
        await pilot.press("ctrl+t")
        assert app.chat.composer.text == "/rename "
        app.chat.composer.clear()
        await pilot.press("ctrl+p")
        await wait_until(lambda: isinstance(app.screen, CommandPalette))
        await pilot.press("f10")
        assert isinstance(app.screen, CommandPalette)
        await pilot.press("escape")
        await wait_until(lambda: app.screen is app.chat)
        assert ("F1", "pool") in app.chat.key_line.keys
        # Neither the old key of a command nor Textual's own does anything.
        await pilot.press("ctrl+q", "ctrl+y", "h", "i", "enter")
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
        assert app.is_running
        await pilot.press("tab", "full_stop")
        await wait_until(lambda: app.chat.status.text == "pinned")
        await pilot.press("f10")
        await wait_until(lambda: not app.is_running)


async def test_esc_leaves_what_is_open_and_stops_nothing_where_another_key_does(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["a", "b"], manual=True)]) as daemon:
        app = ChatApp(daemon.url, copies=tmp_path, keymap=read_keymap('[keys]\nstop = "ctrl+x"'))
        async with app.run_test(size=(100, 30)) as pilot:
            await wait_until(lambda: app.is_running and app.chat.title_bar.view.phase == "connected")
            await pilot.press("h", "enter")
            await wait_until(lambda: app.conversation.busy)
            await wait_until(lambda: app.chat.status == StatusView("busy", "thinking", "Ctrl+X stops it"))
            await pilot.press("escape")
            assert app.chat.status.text != "stopping"
            await pilot.press("ctrl+x")
            await wait_until(lambda: not app.conversation.busy)


def test_a_file_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_keymap("keys = " + "[" * 20_000)


def test_the_pool_pages_keys_move_and_its_bottom_line_with_them() -> None:
    keymap = read_keymap('[pool]\nlook = ["enter", "l"]\npause = "ctrl+j"\nleft = "h"\nearlier = []\nlater = []\n')
    assert keymap.pool_keys["look"] == ("enter", "l")
    assert keymap.moved() == {
        "pool.look": "enter,l",
        "pool.pause": "ctrl+j",
        "pool.left": "h",
        "pool.earlier": "unbound-pool.earlier",
        "pool.later": "unbound-pool.later",
    }
    assert keymap.pool_bottom("back", frozenset({"pool.inspect"})) == (
        ("Esc", "back", True),
        ("h ↑ ↓ →", "point", True),
        ("Enter", "look inside", False),
        ("Ctrl+J", "pause", True),
        ("PgUp PgDn", "scroll", True),
        ("F1", "help", True),
        ("^Q", "quit", True),
    )
    assert DEFAULT.pool_bottom("quit")[1] == ("←↑↓→", "point", True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[pool]\npaus = "x"', "k:2: nothing on the pool page is called 'paus'; did you mean pause?"),
        ('[pool]\npause = "escape"', "k:2: Esc leaves what is open, always"),
        ('[pool]\npause = "ctrl+c"', "k:2: Ctrl+C copies, and quits, always"),
        (
            '[pool]\npause = "q"',
            "k:2: q is the key of close on the pool page already; give that another one, or none: "
            "close = [] under [pool]",
        ),
        (
            '[pool]\npause = "f1"',
            "k:2: F1 is the key of /help already; give that another one, or none: help = [] under [keys]",
        ),
        ('[pool]\nlook = "f9"\n[keys]\npool = "f9"', "k:2: F9 is the key of /pool already"),
    ],
)
def test_a_mistake_with_the_pool_pages_keys_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keymap(text, "k")
    assert caught.value.message.startswith(said)


def test_a_command_that_does_nothing_on_the_pool_page_may_share_a_key_with_it() -> None:
    keymap = read_keymap('[pool]\npause = "ctrl+n"')
    assert keymap.keys["new"] == keymap.pool_keys["pause"] == ("ctrl+n",)


async def test_moved_keys_work_on_the_pool_page_and_its_help_says_so(
    daemon: ScriptedDaemon, tmp_path: Path, wait_until
) -> None:
    text = '[keys]\npool = "f6"\n[pool]\npause = "ctrl+n"\nlook = ["l", "space"]\nclose = "x"\n'
    app = ChatApp(daemon.url, copies=tmp_path, keymap=read_keymap(text))
    async with app.run_test(size=(110, 60)) as pilot:
        await wait_until(lambda: app.is_running and app.chat.title_bar.view.phase == "connected")
        await pilot.press("f6")
        await wait_until(lambda: isinstance(app.screen, PoolScreen) and app.screen.player.shown is not None)
        page = app.screen
        await pilot.press("ctrl+n")
        assert page.player.is_paused
        assert not page.has_class("-cell")
        await pilot.press("space")
        assert page.has_class("-cell")
        assert ("Ctrl+N", "pause") in page.query_one(KeyLine).keys
        await pilot.press("f1")
        await wait_until(lambda: isinstance(app.screen, HelpScreen))
        shown = str(app.screen.query_one(Static).render()).split("\n")
        assert shown[0] == "On the pool page"
        assert any(line.split()[:3] == ["look", "l,", "Space"] for line in shown)
        await pilot.press("q")
        await wait_until(lambda: app.screen is page)
        await pilot.press("q")
        assert app.screen is page
        await pilot.press("x")
        await wait_until(lambda: app.screen is app.chat)
