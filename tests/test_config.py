"""Settings come from a file, the environment and flags, in that order, and say so."""

import typing
from pathlib import Path

import pytest

from chatd.client import Client
from chatd.config import (
    ClientDefaults,
    Settings,
    check_key_transport,
    client_defaults,
    leaves,
    load_settings,
    parse_bytes,
    private_settings,
    serve_command,
    start_hint,
)
from chatd.errors import ConfigError, InvalidRequest
from chatd.operator_client import OperatorClient
from chatd.server.auth import check_exposure

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "chatd.toml"
    path.write_text(text)
    return path


def test_defaults_need_nothing() -> None:
    loaded = load_settings(environment={})
    assert loaded.settings == Settings()
    assert loaded.sources == {}


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 1\nhost = '127.0.0.2'\n[engine]\nmax_num_seqs = 3\n")
    environment = {"CHATD_SERVER__PORT": "2", "CHATD_ENGINE__MAX_NUM_SEQS": "4"}
    loaded = load_settings(path, {"server.port": 5}, environment)
    assert (loaded.settings.server.port, loaded.settings.engine.max_num_seqs) == (5, 4)
    assert loaded.settings.server.host == "127.0.0.2"
    assert loaded.sources == {
        "server.port": "flag",
        "server.host": str(path),
        "engine.max_num_seqs": "environment",
    }


def test_a_flag_that_was_not_given_changes_nothing() -> None:
    assert load_settings(flags={"server.port": None}, environment={}).sources == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", r"server.prot \(from .*\) is not a setting; did you mean port\?"),
        ("[sever]\nport = 1", r"sever is not a section; did you mean server\?"),
        ("[tenants.acme]\nwieght = 1", r"tenants.acme.wieght .* did you mean weight\?"),
        ("server = 1", "1 is no value for server, which is a table"),
        ("[tenants]\nacme = 1", "1 is no value for tenants.acme, which is a table"),
        ("[server]\nport = 70000", r"70000 is no value for server.port \(from .*\)"),
        ("[server]\nport = ", "is not TOML"),
        ("[public_prompts.a]\ntxt = 'x'", r"public_prompts.a.txt .* did you mean text\?"),
        ("[public_prompts]\na = 'x'", "'x' is no value for public_prompts.a, which is a table"),
        ("[public_prompts.a]\n", r"a public prompt has either text or file"),
        ("[public_prompts.a]\ntext = 'x'\nfile = 'y'", r"a public prompt has either text or file"),
        ("[public_prompts.a]\ntext = ''", r"is no value for public_prompts.a.text"),
        ("[tenants.acme]\nweight = 0", r"0 is no value for tenants.acme.weight"),
    ],
)
def test_a_wrong_file_is_refused_by_path(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(write(tmp_path, text), environment={})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "none.toml", environment={})


def test_an_unknown_variable_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"CHATD_SERVER__PROT is not a setting; did you mean CHATD_SERVER__PORT\?"):
        load_settings(environment={"CHATD_SERVER__PROT": "1"})


def test_a_variable_that_clients_use_is_not_a_setting_of_the_daemon() -> None:
    assert load_settings(environment={"CHATD_URL": "http://h", "CHATD_KEY": "k"}).sources == {}


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = write(tmp_path, "[log]\nlevel = 'debug'")
    assert load_settings(environment={"CHATD_CONFIG": str(path)}).settings.log.level == "debug"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_files_load(path: Path) -> None:
    assert load_settings(path, environment={}).sources


def test_there_are_shipped_files() -> None:
    assert [path.name for path in CONFIGS] == ["cpu.toml", "gpu.toml"]


def test_every_setting_says_what_it_is() -> None:
    for field in Settings.model_fields.values():
        for setting in getattr(field.annotation, "model_fields", {}).values():
            assert setting.description


def test_leaves_are_dotted_paths() -> None:
    assert leaves({"a": {"b": 1, "c": {}}, "d": 2}) == {"a.b": 1, "a.c": {}, "d": 2}


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2**31), ("512mb", 512 * 10**6), ("10", 10), ("1.5 GiB", 3 * 2**29), ("7B", 7)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text, param="engine.kv_memory") == size


@pytest.mark.parametrize("text", ["", "x", "GiB", "2 TB!", "1e", "nan", "-", "-1GiB", "1e999"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_memory"):
        parse_bytes(text, param="engine.kv_memory")


def test_a_public_prompt_can_come_from_the_environment() -> None:
    loaded = load_settings(environment={"CHATD_PUBLIC_PROMPTS__SHOP__TEXT": "You help."})
    assert loaded.settings.public_prompts["shop"].text == "You help."
    assert loaded.sources == {"public_prompts.shop.text": "environment"}


def test_the_docs_name_every_setting_with_its_meaning() -> None:
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    for section, field in Settings.model_fields.items():
        table = field.annotation
        if not hasattr(table, "model_fields"):
            table = typing.get_args(table)[1]
            assert f"## [{section}.NAME]" in page
        for name, setting in table.model_fields.items():
            assert f"| `{name}` |" in page
            assert str(setting.description) in page


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folders of the test's own, with a local key."""
    for name in ("CHATD_URL", "CHATD_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "chatd"
    folder.mkdir()
    (folder / "local.key").write_text("ck_local\n")
    return folder


@pytest.mark.parametrize(
    "url", [None, "http://localhost:1", "ws://127.0.0.1:1/v1/chat/ws", "127.9.9.9:1", "https://[::1]:1"]
)
def test_the_local_key_is_for_this_machine(home: Path, url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_defaults(url).key == "ck_local"
    monkeypatch.setenv("CHATD_URL", url or "http://127.0.0.1:8790")
    assert client_defaults().key == "ck_local"


@pytest.mark.parametrize(
    "url", ["http://box:8790", "https://box", "10.0.0.1:8790", "http://localhost.evil.example", "http://127.0.0.1@evil"]
)
def test_the_local_key_goes_to_no_other_machine(home: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_defaults(url).key is None
    monkeypatch.setenv("CHATD_URL", url)
    assert client_defaults() == ClientDefaults(url, None)
    monkeypatch.setenv("CHATD_KEY", "ck_mine")
    assert client_defaults().key == "ck_mine"


def test_a_key_may_be_in_a_file_that_its_owner_alone_can_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "box.key"
    file.write_text("ck_of_the_box\n")
    file.chmod(0o600)
    monkeypatch.setenv("CHATD_KEY_FILE", str(file))
    assert client_defaults("https://box").key == "ck_of_the_box"
    assert client_defaults("http://127.0.0.1:8790").key == "ck_of_the_box", "rather than the local key"
    assert load_settings().settings.server is not None, "it is no setting of a daemon, and no mistake in one"
    monkeypatch.setenv("CHATD_KEY", "ck_mine")
    assert client_defaults("https://box").key == "ck_mine"
    monkeypatch.delenv("CHATD_KEY")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others can read the key in .*box.key"):
        client_defaults("https://box")
    monkeypatch.setenv("CHATD_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"the key in .*none cannot be read"):
        client_defaults("http://127.0.0.1:8790")


def test_no_key_is_sent_over_the_network_in_the_clear() -> None:
    for url in ("http://box", "ws://10.0.0.1:8790/v1/chat/ws", "box:8790"):
        with pytest.raises(InvalidRequest, match="not encrypted") as refused:
            check_key_transport(url, "ck_mine")
        assert refused.value.error_code == "key_in_the_clear"
        assert "ck_mine" not in str(refused.value)
        check_key_transport(url, None)
    for url in ("https://box", "wss://box", "http://localhost:8790", "127.0.0.1:8790"):
        check_key_transport(url, "ck_mine")


@pytest.mark.parametrize("end", ["\n", "\r\nX-Other: 1", " x", "\0", "€", "\ud800"])
def test_a_key_that_no_header_can_carry_is_refused_before_anything_quotes_it(end: str) -> None:
    for take in (
        lambda key: check_key_transport("http://localhost:1", key),
        lambda key: OperatorClient("http://localhost:1", key),
        lambda key: Client("http://box:1", key=key, allow_plaintext=True),
    ):
        with pytest.raises(InvalidRequest, match="character that no key has") as refused:
            take(f"ck_mine{end}")
        assert "ck_mine" not in str(refused.value)


def test_keys_in_the_users_folder_are_used_where_no_file_is_named(home: Path) -> None:
    assert load_settings(environment={}).settings.server.keys_file is None
    (home / "keys.json").write_text("{}")
    loaded = load_settings(environment={})
    assert loaded.settings.server.keys_file == home / "keys.json"
    assert loaded.sources == {"server.keys_file": "your folder"}
    named = load_settings(environment={"CHATD_SERVER__KEYS_FILE": "/etc/keys.json"})
    assert named.settings.server.keys_file == Path("/etc/keys.json")


def test_a_daemon_of_ones_own_is_on_loopback_with_the_local_key() -> None:
    server = {
        "host": "0.0.0.0",
        "keys_file": "k",
        "tls_cert": "c",
        "tls_key": "d",
        "behind_proxy": "10.0.0.1",
        "port": 7,
    }
    own = private_settings(Settings(server=server)).server
    assert (own.host, own.port) == ("127.0.0.1", 7)
    assert (own.keys_file, own.tls_cert, own.tls_key, own.behind_proxy) == (None, None, None, None)


@pytest.mark.parametrize("host", ["https://chat.example", "chat.example:443", "*.chat.example/", "a b", ""])
def test_what_is_no_host_name_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is not a host name"):
        Settings(server={"allowed_hosts": (host,)})
    assert Settings(server={"allowed_hosts": ("Chat.example", "::1", "10.0.0.1")})


def test_a_folder_that_may_not_be_read_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read: Permission denied"):
        load_settings(environment={})


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("http://127.0.0.1:8790", "chatd serve"),
        ("localhost:8790", "chatd serve"),
        ("http://127.0.0.1:18931", "chatd serve --port 18931"),
        ("ws://localhost:18931/v1/chat/ws", "chatd serve --port 18931"),
        ("http://localhost", "chatd serve --port 80"),
        ("http://[::1]:18931", "chatd serve --host ::1 --port 18931"),
        ("http://127.0.0.2:8790", "chatd serve --host 127.0.0.2"),
        ("https://127.0.0.1:8790", "chatd serve --tls-cert … --tls-key …"),
        ("https://box.example", "chatd serve --host 0.0.0.0 --port 443 --keys-file … --tls-cert … --tls-key …"),
        ("http://192.0.2.7:8790", "chatd serve --host 192.0.2.7 --keys-file … --tls-cert … --tls-key …"),
    ],
)
def test_what_is_advised_listens_where_nobody_answered(url: str, command: str) -> None:
    assert serve_command(url) == command
    where = " on that machine" if "--keys-file" in command else ""
    assert start_hint(url) == f"start one{where} with `{command}`"
    # Nothing that is missing there would keep it from starting.
    words = command.split()
    check_exposure(
        host=words[words.index("--host") + 1] if "--host" in words else "127.0.0.1",
        has_keys_file="--keys-file" in words,
        has_tls="--tls-cert" in words,
        behind_proxy=False,
        allow_anonymous=False,
    )
