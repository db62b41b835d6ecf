"""Settings come from a file, the environment and flags, in that order, and say so."""

from pathlib import Path

import pytest

from chatd.config import Settings, leaves, load_settings, parse_bytes
from chatd.errors import ConfigError

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


@pytest.mark.parametrize("text", ["", "x", "GiB", "2 TB!", "1e", "nan", "-"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_memory"):
        parse_bytes(text, param="engine.kv_memory")


def test_the_docs_name_every_setting_with_its_meaning() -> None:
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    for field in Settings.model_fields.values():
        for name, setting in getattr(field.annotation, "model_fields", {}).items():
            assert f"| `{name}` |" in page
            assert str(setting.description) in page
