"""The commands: what they print, how they refuse, and with which exit code."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import jsonschema
import pytest
from rich.console import Console

from chatd import cli
from chatd.cli import chat
from chatd.errors import ConfigError
from chatd.journal.journal import Journal

PYTHON = [sys.executable, "-m", "chatd.cli"]


def chatd(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CHATD_", "XDG_"))}
    return subprocess.run(
        [*PYTHON, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**clean, "HOME": str(home), "COLUMNS": "200", **environment},
        check=False,
    )


def test_help_groups_the_commands(tmp_path: Path) -> None:
    shown = chatd("--help", home=tmp_path).stdout
    for word in (
        "Serving",
        "Conversations",
        "Setting up",
        "serve",
        "top",
        "chat",
        "ask",
        "pull",
        "keys",
        "config",
        "schema",
    ):
        assert word in shown


def test_version_is_the_package_s(tmp_path: Path) -> None:
    from chatd import __version__

    assert chatd("--version", home=tmp_path).stdout == f"{__version__}\n"


def test_a_wrong_command_is_a_usage_error(tmp_path: Path) -> None:
    done = chatd("serv", home=tmp_path)
    assert done.returncode == 2
    assert "serve" in done.stderr


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    shown = json.loads(chatd("config", "show", "--json", home=tmp_path, CHATD_SERVER__PORT="9").stdout)
    assert shown["server.port"] == {"value": 9, "source": "environment"}
    assert shown["server.host"] == {"value": "127.0.0.1", "source": "default"}


def test_a_wrong_setting_exits_with_2_and_names_it(tmp_path: Path) -> None:
    done = chatd("config", "show", home=tmp_path, CHATD_SERVER__PROT="9")
    assert done.returncode == 2
    assert done.stderr.startswith("chatd: CHATD_SERVER__PROT is not a setting; did you mean CHATD_SERVER__PORT?")
    assert "Traceback" not in done.stderr


def test_nothing_is_cut_for_a_width_that_a_pipe_has_not(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    refused = chatd("sessions", "ls", "--directory", str(folder), home=tmp_path, COLUMNS="40")
    assert refused.stderr == (
        f"chatd: there is no journal in {folder}\n"
        "       a daemon makes one when it starts; name its folder with --directory\n"
    )
    label = "the laptop on the second desk of the third floor"
    create = ("keys", "create", "--tenant", "acme", "--user", "ada", "--label", label)
    assert chatd(*create, home=tmp_path).returncode == 0
    assert label in chatd("keys", "list", home=tmp_path, COLUMNS="40").stdout
    shown = chatd("config", "show", home=tmp_path, COLUMNS="40", CHATD_JOURNAL__DIRECTORY=str(folder)).stdout
    assert str(folder) in shown


@pytest.mark.parametrize("arguments", [("usage", "--from", "2026-13-01"), ("sessions", "ls", "--query", "sea")])
def test_a_wrong_argument_exits_with_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    async def make_journal() -> None:
        await Journal.open(tmp_path / "journal").close()

    asyncio.run(make_journal())
    done = chatd(*arguments, "--directory", str(tmp_path / "journal"), home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [("schema",), ("config", "show"), ("--version",)])
def test_a_full_disk_is_said_in_a_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PYTHON, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": str(tmp_path)},
            check=False,
        )
    assert (done.returncode, done.stderr) == (3, "chatd: there is no room on the disk for what this command writes\n")


def test_output_that_nobody_reads_is_no_traceback(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [*PYTHON, "--version"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_refusal_of_several_lines_stands_below_its_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConfigError("one is wrong\nand two")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "chatd: one is wrong\n       and two\n"


def test_chat_without_a_terminal_says_what_to_do_instead(tmp_path: Path) -> None:
    done = chatd("chat", home=tmp_path)
    assert done.returncode == 3
    assert "chatd serve" in done.stderr


def test_an_unknown_model_exits_with_4(tmp_path: Path) -> None:
    done = chatd("pull", "smollm2-135", home=tmp_path)
    assert done.returncode == 4
    assert "smollm2-135m" in done.stderr


def test_schema_is_a_json_schema_that_accepts_a_command(tmp_path: Path) -> None:
    schema = json.loads(chatd("schema", home=tmp_path).stdout)
    jsonschema.validate({"type": "ping", "t": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"type": "ping", "t": 1, "x": 1}, {**schema, "anyOf": [{"$ref": "#/$defs/Command"}]})


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.json"
    arguments = ("--tenant", "acme", "--user", "ada", "--keys-file", str(keys_file))
    secret = chatd("keys", "create", *arguments, home=tmp_path).stdout.strip()
    assert secret.startswith("ck_")
    assert secret not in keys_file.read_text()
    assert keys_file.stat().st_mode & 0o777 == 0o600
    key_id = secret.split("_")[1]
    listed = chatd("keys", "list", "--keys-file", str(keys_file), home=tmp_path).stdout
    assert key_id in listed
    assert secret not in listed
    assert chatd("keys", "revoke", key_id, "--keys-file", str(keys_file), home=tmp_path).returncode == 0
    assert key_id not in chatd("keys", "list", "--keys-file", str(keys_file), home=tmp_path).stdout


def test_revoking_an_unknown_key_is_refused(tmp_path: Path) -> None:
    done = chatd("keys", "revoke", "nope", "--keys-file", str(tmp_path / "keys.json"), home=tmp_path)
    assert done.returncode != 0
    assert "nope" in done.stderr


def test_a_folder_that_cannot_be_written_exits_with_3(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = {"XDG_CONFIG_HOME": str(tmp_path / "file"), "XDG_STATE_HOME": str(tmp_path / "file")}
    create = ("keys", "create", "--tenant", "acme", "--user", "ada")
    for arguments in (create, ("serve", "--port", "0")):
        done = chatd(*arguments, home=tmp_path, **blocked)
        assert done.returncode == 3, done.stderr
        assert "cannot be written" in done.stderr
        assert "Traceback" not in done.stderr


def test_keys_are_listed_with_their_file_and_class(tmp_path: Path) -> None:
    create = ("keys", "create", "--tenant", "acme", "--user", "ada", "--class", "batch")
    assert chatd("keys", "list", home=tmp_path).stderr.startswith("there are no keys: ")
    assert chatd(*create, home=tmp_path).returncode == 0
    done = chatd("keys", "list", home=tmp_path)
    assert done.stderr == f"keys in {tmp_path}/.config/chatd/keys.json\n"
    assert "batch" in done.stdout


class OwnDaemon:
    """Stands for a daemon that would be started."""

    key = "ck_local"
    started: ClassVar[list[str]] = []

    def __init__(self, url: str, arguments: list[str]) -> None:
        self.url = url
        self.started.append(url)

    def __enter__(self) -> "OwnDaemon":
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_ready(self, on_phase: object) -> None: ...


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """Where `chatd chat` connects and with which key, in a terminal, with a config for a team's daemon."""
    chats: list[tuple[str, str | None]] = []
    (tmp_path / "config.toml").write_text(
        "[server]\nhost = '0.0.0.0'\nport = 0\nkeys_file = 'k'\ntls_cert = 'c'\ntls_key = 'd'\n"
    )
    monkeypatch.setenv("CHATD_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("CHATD_KEY", "ck_of_the_team")
    monkeypatch.setattr("chatd.cli._has_terminal", lambda: True)
    monkeypatch.setattr("chatd_tui.app.run_app", lambda url, key, **_: chats.append((url, key)))
    monkeypatch.setattr("chatd.local_daemon.LocalDaemon", OwnDaemon)
    monkeypatch.setattr("chatd.cli._resolve_with_progress", lambda name: None)
    monkeypatch.setattr(OwnDaemon, "started", [])
    return chats


def test_chat_starts_a_daemon_of_its_own_whatever_the_settings_say(chats: list[tuple[str, str | None]]) -> None:
    chat(None, None, None)
    [(url, key)] = chats
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d+", url)
    assert key == "ck_local"
    assert OwnDaemon.started == [url]


def test_chat_joins_a_daemon_that_runs(chats: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATD_SERVER__PORT", "9")
    monkeypatch.setattr("chatd.local_daemon.readiness", lambda url: {"status": "ready"})
    chat(None, None, None)
    assert chats == [("http://127.0.0.1:9", "ck_of_the_team")]
    assert OwnDaemon.started == []


def test_a_phase_is_over_when_the_next_one_begins() -> None:
    terminal = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "notices", Console(file=terminal, width=80, force_terminal=True))
        with cli._phases_shown() as show:
            show("loading [weights]", 0.4)
            show("compiling kernels", 0.3)
    lines = terminal.getvalue().splitlines()
    loading = [line for line in lines if "loading [weights]" in line]
    compiling = [line for line in lines if "compiling kernels" in line]
    assert "✓" in loading[-1]
    assert "✓" not in compiling[-1]


def test_replay_tells_what_was_decided_and_exits_with_1_where_it_differs(tmp_path: Path) -> None:
    from chatd.engine.core import EngineCore
    from chatd.engine.decision_log import LogReader, LogWriter
    from chatd.engine.recording import RecordingCore
    from chatd.testing import engine as fakes

    path = tmp_path / "log"

    def recording(*arguments: object, **options: object) -> EngineCore:
        return RecordingCore(*arguments, **options, make_writer=lambda header: LogWriter(path, header, 2**20))  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes, "EngineCore", recording)
        harness = fakes.EngineHarness()
    harness.generate(7, [1, 2, 3])
    harness.core.close()
    done = chatd("replay", str(path), home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "acme: 1 request, ended: 1 max_output_tokens" in done.stdout
    explained = chatd("replay", str(path), "--explain", "7", home=tmp_path).stdout
    assert "submitted for acme as interactive: 3 tokens after 0 of lease 7" in explained

    with LogReader(path) as log:
        header, calls = log.header, list(log.calls())
    writer = LogWriter(path, header, 2**20)
    for call in calls[:1] + calls[2:]:
        writer.write(call)
    writer.close()
    done = chatd("replay", str(path), home=tmp_path)
    assert done.returncode == 1
    assert "step 1, request 7: another decision" in done.stdout


def test_a_file_that_is_no_decision_log_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("hello\n")
    done = chatd("replay", str(tmp_path / "log"), home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("log is no decision log")
    assert "Traceback" not in done.stderr
