"""`servers.toml` and the servers that a command line names: which are chosen, and with which key."""

import os
from pathlib import Path

import pytest

from chatd.config import Server, check_key_transport, chosen_servers, read_servers, servers_path
from chatd.errors import ConfigError, InvalidRequest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("CHATD_URL", "CHATD_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "config" / "chatd").mkdir(parents=True)
    (tmp_path / "state" / "chatd").mkdir(parents=True)
    (tmp_path / "state" / "chatd" / "local.key").write_text("ck_local\n")
    return tmp_path / "config" / "chatd"


def named(servers: list[Server]) -> list[tuple[str, str]]:
    return [(server.name, server.url) for server in servers]


def keys(servers: list[Server]) -> list[str | None]:
    return [server.read_key() for server in servers]


TWO = """
[servers.box]
url = "https://box:8790"
key_file = "box.key"
[servers.here]
url = "127.0.0.1:8790"
"""


def private(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def test_without_a_file_there_is_the_daemon_of_this_machine_alone() -> None:
    servers = chosen_servers(None, [])
    assert named(servers) == [("", "http://127.0.0.1:8790")]
    assert keys(servers) == ["ck_local"]


def test_the_file_names_them_in_its_order_and_each_has_its_own_key(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("CHATD_KEY", "ck_for_the_one_that_is_named")
    servers_path().write_text(TWO)
    private(folder / "box.key", "ck_box\n")
    servers = chosen_servers(None, [])
    assert named(servers) == [("box", "https://box:8790"), ("here", "127.0.0.1:8790")]
    assert keys(servers) == ["ck_box", "ck_local"]


def test_an_address_goes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    servers_path().write_text(TWO)
    monkeypatch.setenv("CHATD_KEY", "ck_1")
    assert named(chosen_servers("http://gpu:1", [])) == [("", "http://gpu:1")]
    monkeypatch.setenv("CHATD_URL", "http://other:2")
    servers = chosen_servers(None, [])
    assert named(servers) == [("", "http://other:2")]
    assert keys(servers) == ["ck_1"]


def test_names_choose_from_the_file_and_addresses_come_with_a_name(folder: Path, monkeypatch) -> None:
    servers_path().write_text(TWO)
    private(folder / "box.key", "ck_box")
    monkeypatch.setenv("CHATD_KEY", "ck_for_the_only_one")
    servers = chosen_servers("http://127.0.0.1:7", ["box", "gpu=https://gpu:1"])
    assert named(servers) == [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("box", "https://box:8790"),
        ("gpu", "https://gpu:1"),
    ]
    assert keys(servers) == ["ck_local", "ck_box", None]
    assert keys(chosen_servers(None, ["box"])) == ["ck_box"]
    assert keys(chosen_servers(None, ["gpu=https://gpu:1"])) == ["ck_for_the_only_one"]
    assert keys(chosen_servers(None, ["gpu=https://gpu:1"], "ck_given")) == ["ck_given"]


def test_a_key_comes_from_a_variable_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    servers_path().write_text('[servers.box]\nurl = "https://box"\nkey_env = "BOX_KEY"\n')
    (server,) = chosen_servers(None, [])
    with pytest.raises(ConfigError, match="BOX_KEY has no key"):
        server.read_key()
    monkeypatch.setenv("BOX_KEY", "ck_new")
    assert server.read_key() == "ck_new"
    assert "ck_new" not in repr(server)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o044])
def test_a_key_that_others_can_read_is_not_used_and_not_shown(folder: Path, mode: int) -> None:
    servers_path().write_text(TWO)
    path = folder / "box.key"
    private(path, "ck_secret")
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_servers()[0].read_key()
    assert caught.value.hint == f"chmod 600 {path}"
    assert "ck_secret" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "there is no key"), ("two keys", "there is no key"), ("a\nb", "there is no key"), (None, "cannot be read")],
)
def test_a_file_without_a_key_is_named(folder: Path, text: str | None, message: str) -> None:
    servers_path().write_text(TWO)
    if text is not None:
        private(folder / "box.key", text)
    with pytest.raises(ConfigError, match=message):
        read_servers()[0].read_key()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[servers.box", "is not TOML"),
        ('[box]\nurl = "http://a"', "'box' is not known"),
        ("servers = 1", "servers is no table"),
        ("[servers.box]", "servers.box has no url"),
        ('[servers."a b"]\nurl = "http://a"', "'a b' is no name"),
        ('[servers.box]\nurl = "http://a"\nkey = "ck_1"', "servers.box.key is not known"),
        ('[servers.box]\nurl = "http://a"\nkey_files = "x"', "servers.box.key_files is not known"),
        ('[servers.box]\nurl = "http://a"\nkey_file = 1', "servers.box.key_file is not a text"),
        ('[servers.box]\nurl = "http://a"\nkey_file = "a"\nkey_env = "b"', "has both key_env and key_file"),
    ],
)
def test_a_wrong_file_is_refused_by_path_without_what_may_be_a_key(text: str, message: str) -> None:
    servers_path().write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_servers()
    assert "ck_1" not in caught.value.message


def test_what_a_command_line_cannot_mean_is_refused() -> None:
    servers_path().write_text(TWO)
    for named_servers, message in (
        (["gone"], "'gone' is not a server of"),
        (["=http://a"], "is not NAME=URL"),
        (["a/b=http://a"], "is not NAME=URL"),
        (["box", "box"], "there are several servers with the name 'box'"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            chosen_servers(None, named_servers)
    with pytest.raises(InvalidRequest, match="one key is not for 2 daemons"):
        chosen_servers(None, [], "ck_1")


def test_a_file_that_cannot_be_read_is_said_so() -> None:
    servers_path().mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_servers()


def test_the_key_of_one_server_is_refused_over_plain_http_as_of_any() -> None:
    servers_path().write_text('[servers.box]\nurl = "http://box:1"\nkey_env = "PATH"\n')
    (server,) = read_servers()
    assert server.read_key() == os.environ["PATH"]
    with pytest.raises(InvalidRequest, match="not encrypted"):
        check_key_transport(server.url, server.read_key())


@pytest.mark.parametrize("name", ["a\\u0000b", "~nobody-of-this-name/key", "pipe", "folder", "long", "umlaut"])
def test_what_cannot_be_a_key_is_said_at_once_and_in_one_line(folder: Path, name: str) -> None:
    os.mkfifo(folder / "pipe", 0o600)
    (folder / "folder").mkdir()
    private(folder / "long", "k" * 5000)
    private(folder / "umlaut", "ck_ü")
    servers_path().write_text(f'[servers.box]\nurl = "https://box"\nkey_file = "{name}"\n')
    (server,) = read_servers()
    with pytest.raises(ConfigError, match="key in"):
        server.read_key()


def test_a_file_that_is_nested_too_deeply_is_refused() -> None:
    servers_path().write_text("servers = " + "[" * 20_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_servers()
