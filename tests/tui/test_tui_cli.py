"""The `chatd-tui` command: what it refuses and how, and that it starts and stops a daemon where it is asked to."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from chatd import local_daemon
from chatd import protocol as p
from chatd.config import Server
from chatd.errors import EnvironmentProblem, InvalidRequest
from chatd.local_daemon import check_can_start, daemon_url
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui import app as tui_app
from chatd_tui import cli
from chatd_tui.keymap import DEFAULT

COMMAND = [sys.executable, "-m", "chatd_tui.cli"]
NOBODY = "http://127.0.0.1:9"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=60
    )


def test_without_a_terminal_it_says_what_to_do_and_exits_with_3() -> None:
    done = run(NOBODY)
    assert done.returncode == 3
    assert "needs a terminal" in done.stderr
    assert "chatd.client" in done.stderr


def test_a_keymap_file_with_mistakes_ends_the_start_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\npool = "f3"\nzzz = "f6"')
    done = run(NOBODY, "--keymap", str(file))
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"chatd-tui: {file}:2: F3 is the key of /conversations already")
    assert second.strip() == f"{file}:3: there is no command 'zzz'"


def test_an_address_that_is_none_is_a_usage_error() -> None:
    done = run("ftp://box")
    assert done.returncode == 2
    assert "is not the address of a daemon" in done.stderr


def test_help_and_version_need_no_terminal() -> None:
    assert "--key" in run("--help").stdout
    assert run("--version").returncode == 0


async def test_it_connects_draws_and_quits(make_terminal, wait_until, daemon: ScriptedDaemon) -> None:
    async with make_terminal([*COMMAND, daemon.url], CHATD_KEY="k") as terminal:
        await wait_until(lambda: b"connected" in terminal.output)
        terminal.write(b"\x11")
        await wait_until(lambda: terminal.process.returncode is not None)
        assert terminal.process.returncode == 0


async def test_keys_as_real_terminals_send_them_make_lines(make_terminal, wait_until, daemon: ScriptedDaemon) -> None:
    async with make_terminal([*COMMAND, daemon.url]) as terminal:
        await wait_until(lambda: b"connected" in terminal.output)
        # Alt+Enter, Ctrl+J, Shift+Enter of the Kitty protocol, Shift+Enter of xterm's and tmux's extended keys.
        for number, newline in enumerate((b"\x1b\r", b"\n", b"\x1b[13;2u", b"\x1b[27;2;13~"), 1):
            terminal.write(b"%d" % number + newline)
        terminal.write(b"5\r")
        await wait_until(lambda: bool(daemon.sessions) and bool(next(iter(daemon.sessions.values())).items))
        terminal.write(b"\x03\x03")
        await wait_until(lambda: terminal.process.returncode == 0)
    assert next(iter(daemon.sessions.values())).items[0].content == "1\n2\n3\n4\n5"


async def test_versions_are_made_and_shown_by_the_keys_of_a_terminal(make_terminal, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["FIRST"]), Script(deltas=["SECOND"])]) as daemon:
        async with make_terminal([*COMMAND, daemon.url]) as terminal:
            await wait_until(lambda: b"connected" in terminal.output)
            terminal.write(b"one\r")
            await wait_until(lambda: b"FIRST" in terminal.output)
            await wait_until(lambda: next(iter(daemon.sessions.values())).response is None)
            await wait_until(lambda: b"tok/s" in terminal.output)
            terminal.write(b"/edit\r")
            await wait_until(lambda: b"another version" in terminal.output)
            terminal.write(b"!\r")
            await wait_until(lambda: b"SECOND" in terminal.output and b"2/2" in terminal.output)
            await wait_until(lambda: next(iter(daemon.sessions.values())).response is None)
            terminal.write(b"\t")
            await wait_until(lambda: b"versions" in terminal.output)
            terminal.write(b"\x1b[A")
            terminal.write(b"\x1b[D")
            await wait_until(lambda: isinstance(daemon.commands[-1], p.BranchSelect))
            await wait_until(lambda: b"1/2" in terminal.output)
            terminal.write(b"/quit\r")
            await wait_until(lambda: terminal.process.returncode == 0)
        items = next(iter(daemon.sessions.values())).items
        assert [item.content for item in items] == ["one", "FIRST"]


class StartedDaemon:
    log: list[str]
    key = "local"

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> "StartedDaemon":
        self.log.append(f"start {self.url}")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("stop")

    def wait_ready(self, on_phase: Any) -> None:
        on_phase("loading [/weights]", 0.5)
        on_phase("starting", 0.0)


@pytest.mark.parametrize(("option", "takes_it"), [((), True), (("--no-mouse",), False)])
async def test_the_mouse_is_the_terminals_where_that_is_asked_for(
    make_terminal, wait_until, option: tuple[str, ...], takes_it: bool
) -> None:
    async with (
        ScriptedDaemon([Script()]) as daemon,
        make_terminal([*COMMAND, daemon.url, *option], CHATD_KEY="k") as terminal,
    ):
        await wait_until(lambda: b"connected" in terminal.output)
        assert (b"\x1b[?1000h" in terminal.output) == takes_it


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    log: list[str] = []
    StartedDaemon.log = log

    def opened(servers: str | list[Server], key: str | None = None, **options: Any) -> None:
        assert options == {"keymap": DEFAULT, "theme": None, "mouse": True}
        if isinstance(servers, str):
            log.append(f"app {servers} {key}")
        else:
            log.extend(f"app {server.name}: {server.url} {server.read_key()}" for server in servers)

    monkeypatch.setattr(cli, "LocalDaemon", StartedDaemon)
    monkeypatch.setattr(cli, "_has_terminal", lambda: True)
    monkeypatch.setattr(tui_app, "run_app", opened)
    monkeypatch.setenv("CHATD_KEY", "k")
    return log


def test_it_offers_to_start_a_daemon_and_stops_it_at_the_end(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: True)
    cli.connect(NOBODY)
    assert log == [f"start {NOBODY}", f"app {NOBODY} local", "stop"]


def test_a_no_starts_nothing_and_the_client_goes_on_trying(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: False)
    cli.connect(NOBODY)
    assert log == [f"app : {NOBODY} k"]


def test_a_daemon_that_does_not_answer_elsewhere_cannot_be_started_here(log: list[str]) -> None:
    with pytest.raises(EnvironmentProblem):
        check_can_start("http://192.0.2.1:9")
    with pytest.raises(EnvironmentProblem):
        check_can_start("https://127.0.0.1:9")
    assert log == []


def test_without_the_server_nothing_is_offered_and_the_client_goes_on_trying(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_daemon.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as caught:
        check_can_start(NOBODY)
    assert "chatd[server]" in (caught.value.hint or "")
    cli.connect(NOBODY)
    assert log == [f"app : {NOBODY} k"]


def test_several_servers_are_opened_in_one_list_and_nothing_is_started(log: list[str]) -> None:
    cli.connect(None, ["here=127.0.0.1:9", "box=https://192.0.2.1:8790"])
    assert log == ["app here: http://127.0.0.1:9 None", "app box: https://192.0.2.1:8790 None"]


def test_a_wrong_address_of_one_server_is_named(log: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="server box: 'ftp://box' is not the address"):
        cli.connect(None, ["here=127.0.0.1:9", "box=ftp://box"])
    assert log == []


async def test_two_servers_are_drawn_and_talked_to_in_a_terminal(make_terminal, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["FROM-BOX"])]) as box, ScriptedDaemon() as gpu:
        command = [*COMMAND, "--server", f"box={box.url}", "--server", f"gpu={gpu.url}"]
        async with make_terminal(command) as terminal:
            await wait_until(lambda: b"connected" in terminal.output and b"gpu" in terminal.output)
            terminal.write(b"hello\r")
            await wait_until(lambda: b"FROM-BOX" in terminal.output)
            await gpu.stop()
            await wait_until(lambda: b"no connection" in terminal.output)
            terminal.write(b"/quit\r")
            await wait_until(lambda: terminal.process.returncode == 0)
        assert [item.content for item in box.sessions["ses_1"].items] == ["hello", "FROM-BOX"]
        assert gpu.sessions == {}


def test_a_websocket_address_is_asked_over_http() -> None:
    assert daemon_url("wss://box:1/v1/chat/ws") == "https://box:1"
    assert daemon_url("box:8790") == "http://box:8790"
    with pytest.raises(InvalidRequest):
        daemon_url("http://key@box")
