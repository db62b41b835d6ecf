"""The commands: what they print, how they refuse, and with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

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
    for word in ("Serving", "Conversations", "Setting up", "serve", "chat", "pull", "keys", "config", "schema"):
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
