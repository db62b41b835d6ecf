"""Settings: a TOML file, then CHATD_ environment variables, then flags; the only place that reads the environment.

`load_settings` says of each value where it came from. An unknown key is refused by its path, with the nearest right
name. Everything here is data; whoever uses a setting checks it against the machine.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from chatd.errors import ConfigError, InvalidRequest

ENV_PREFIX = "CHATD_"
ENV_NESTED = "__"
CLIENT_VARIABLES = frozenset({"CHATD_CONFIG", "CHATD_URL", "CHATD_KEY"})
DEFAULT_PORT = 8790
BUILT_IN_MODEL = "smollm2-135m"
MAX_PUBLIC_PROMPTS = 64
_HOST_NAME = re.compile(r"[0-9A-Za-z_-]+(\.[0-9A-Za-z_-]+)*\.?")
_BYTE_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Section):
    """Where the daemon listens and whom it lets in."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on. Anything but loopback needs keys, and TLS or a proxy."
    )
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="Port; 0 takes a free one.")
    keys_file: Path | None = Field(
        None,
        description="Keys of the tenants (`chatd keys`); where absent, `keys.json` in your folder if it exists. Without"
        " keys a random local key is made.",
    )
    allow_anonymous_loopback: bool = Field(
        False,
        description="Serve requests without a key, on loopback only, as the tenant `local`. For benchmarks.",
    )
    tls_cert: Path | None = Field(None, description="Certificate chain, PEM.")
    tls_key: Path | None = Field(None, description="Private key, PEM.")
    behind_proxy: str | None = Field(
        None,
        description="IP address or network of the proxy that ends TLS; several are separated by commas. Only its"
        " headers are believed, and peers that are neither it nor this machine are refused.",
    )
    allowed_origins: tuple[str, ...] = Field(
        (), description="Origins of web pages that may connect, such as `https://chat.example`."
    )
    allowed_hosts: tuple[str, ...] = Field((), description="Host names that requests may name, beside loopback's.")
    max_connections: int = Field(1024, ge=1, description="Open websockets in all.")
    max_connections_per_key: int = Field(64, ge=1, description="Open websockets of one key.")
    max_connections_per_address: int = Field(128, ge=1, description="Open websockets from one address.")
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="Largest HTTP body.")
    first_frame_timeout_s: float = Field(
        30.0, gt=0, description="A websocket that says nothing for so long after its handshake is closed."
    )
    heartbeat_s: int = Field(20, ge=1, description="Between websocket pings.")
    send_buffer_bytes: int = Field(2**20, ge=2**14, description="Unsent bytes of one websocket before its clock runs.")
    send_timeout_s: float = Field(5.0, gt=0, description="Longest a websocket may stay above `send_buffer_bytes`.")
    drain_timeout_s: float = Field(
        10.0, ge=0, description="Longest that a stopping daemon waits for answers in progress."
    )

    @field_validator("behind_proxy")
    @classmethod
    def _check_proxy(cls, value: str | None) -> str | None:
        if value is not None and any(network.prefixlen == 0 for network in proxy_networks(value)):
            raise ValueError("this network is everybody")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not _HOST_NAME.fullmatch(value) and not _is_address(value):
                raise ValueError(f"{value!r} is not a host name such as chat.example, without a port")
        return values

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_origin(value) for value in values)


class ModelSettings(_Section):
    """Which model, and in which form."""

    name: str = Field(BUILT_IN_MODEL, description="A built-in name, a local folder, or a Hugging Face id.")
    quantization: Literal["auto", "fp16", "bf16", "int8", "fp32"] = Field(
        "auto",
        description="Weights of the linear layers; `auto` is fp16 on the CPU and `dtype` on a GPU, where all but int8"
        " are of that format.",
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        "auto",
        description="What a GPU computes in; `auto` is what the model's makers chose, in 16 bits. The CPU computes in"
        " float32.",
    )
    kv_dtype: Literal["auto", "float16", "bfloat16", "float32", "fp8", "int8"] = Field(
        "auto",
        description="Format of the KV cache; `auto` is float16 on the CPU and `dtype` on a GPU. fp8 and int8, which"
        " hold nearly twice as many tokens, are for GPUs.",
    )
    max_model_len: int | None = Field(
        None, ge=16, description="Tokens of a context; the model's own limit where absent."
    )
    thoughts: Literal["auto", "keep", "drop"] = Field(
        "auto",
        description="Whether later prompts have what a model thought before an earlier answer; `auto` is what its chat"
        " template does.",
    )


class EngineSettings(_Section):
    """Device, memory and batch of the engine."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; `auto` is a GPU where there is one."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Part of a GPU's memory that may be used, what others use of it included."
    )
    enforce_eager: bool = Field(
        False, description="Start every kernel by itself and capture no graphs of decode steps on a GPU."
    )
    deterministic: bool = Field(
        False,
        description="Have a GPU compute each answer alike whatever is beside it in the batch, for some of its speed."
        " The CPU always does.",
    )
    block_size: Literal[16, 32, 64] = Field(16, description="Tokens of a KV block.")
    kv_memory: str = Field("auto", description='Bytes of the block pool, such as "2GiB", or "auto".')
    host_memory: str = Field(
        "0",
        description='Bytes of host memory that keep KV which the pool has no room for, such as "8GiB"; 0 is off. On'
        " the CPU it is the pool's own kind of memory, so a larger pool is better.",
    )
    disk_space: str = Field(
        "0", description='Bytes of files that keep KV which no memory has room for, such as "50GiB"; 0 is off.'
    )
    disk_directory: Path | None = Field(
        None,
        description="Where those files are: a directory that only this daemon's user can write to; `kv` in your cache"
        " folder where absent. One daemon at a time uses it.",
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Requests in one batch.")
    max_num_batched_tokens: int = Field(512, ge=16, description="Rows of one step.")
    threads: int = Field(
        0, ge=0, description="Threads of the CPU backend; 0 takes what the affinity and the cgroup allow."
    )
    max_queued_requests: int = Field(4096, ge=1, description="Requests that may wait, all tenants together.")
    decision_log: Path | None = Field(
        None,
        description="File for what the engine is asked and what it decides, for `chatd replay`. It holds numbers in the"
        " place of token ids, but their repetitions, lengths, times and tenants' names.",
    )
    decision_log_limit: str = Field("1GiB", description="Size at which the decision log ends.")


class SessionSettings(_Section):
    """Bounds of conversations."""

    max_sessions_per_user: int = Field(1024, ge=1, description="Open sessions of one user.")
    max_content_bytes: int = Field(2**20, ge=1024, description="Largest message.")
    max_text_bytes_per_user: int = Field(
        256 * 2**20,
        ge=2**20,
        description="Memory of one user's messages. Closed sessions are forgotten for it, the longest unused first.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Longest answer that a client can have; the rest of the context where absent."
    )
    context_policy: Literal["refuse", "drop_oldest"] = Field(
        "refuse",
        description="What becomes of a turn that has no room in the context, in sessions that name nothing: `refuse`,"
        " or `drop_oldest`, which leaves the oldest turns out, visibly.",
    )
    idle_release_s: float = Field(
        0,
        ge=0,
        description="Seconds after which the KV of a session that nobody uses is given up, though there is room; 0 is"
        " never.",
    )
    idle_archive_days: float = Field(
        0, ge=0, description="Days after which a session that nobody uses is archived, unless it is pinned; 0 is never."
    )
    replay_events: int = Field(8192, ge=16, description="Events that a session keeps for clients that reconnect.")
    replay_bytes: int = Field(2**20, ge=2**12, description="Bytes of those events.")
    replay_ttl_s: int = Field(300, ge=1, description="How long they are kept.")
    max_known_messages: int = Field(
        65536, ge=16, description="Messages by which stateless requests find their history."
    )


class JournalSettings(_Section):
    """Where conversations are kept."""

    enabled: bool = Field(
        True, description="Keep conversations across restarts; without it they live as long as the daemon."
    )
    directory: Path | None = Field(
        None,
        description="Where the journal is: a directory that only this daemon's user can read; `journal` in your state"
        " folder where absent. One daemon at a time uses it.",
    )
    retention_days: float | None = Field(
        None,
        gt=0,
        description="A session that nobody used for so long is erased, unless it is pinned; kept for ever where"
        " absent.",
    )


class QuotaSettings(_Section):
    """Limits of one key; 0 is none."""

    requests_per_minute: int = Field(0, ge=0, description="Turns and completions.")
    tokens_per_minute: int = Field(0, ge=0, description="Tokens in and out.")
    max_inflight: int = Field(64, ge=1, description="Answers in progress.")


class TenantSettings(_Section):
    """A tenant's share of the machine."""

    weight: float = Field(
        1.0, gt=0, le=1000, description="Share of tokens and blocks beside the other tenants' weights."
    )
    floor: float = Field(0.0, ge=0, le=0.5, description="Part of the pool that no other tenant can take.")
    retention_days: float | None = Field(
        None, gt=0, description="As `journal.retention_days`, which holds where absent."
    )


class PublicPromptSettings(_Section):
    """A system prompt that is computed once for all tenants; see operating.md."""

    text: str | None = Field(None, min_length=1, description="The system prompt, exactly as sessions give it.")
    file: Path | None = Field(
        None, description="A file with it, in UTF-8; one line end at its end does not belong to it."
    )

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.text is None) == (self.file is None):
            raise ValueError("a public prompt has either text or file")
        return self


class LogSettings(_Section):
    """What is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe event that is written."
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto", description="`auto` is readable on a terminal and JSON elsewhere."
    )


class Settings(BaseSettings):
    """All settings of a daemon. Use `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_NESTED, extra="forbid", frozen=True, protected_namespaces=()
    )

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    sessions: SessionSettings = SessionSettings()
    journal: JournalSettings = JournalSettings()
    quotas: QuotaSettings = QuotaSettings()
    tenants: dict[str, TenantSettings] = Field({}, description="Shares by tenant name; others get the defaults.")
    public_prompts: dict[str, PublicPromptSettings] = Field(
        {}, max_length=MAX_PUBLIC_PROMPTS, description="System prompts by name."
    )
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values as given: `load_settings` has merged the sources already, to remember where each came from."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each dotted path that is not a default, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClientDefaults:
    """Where a client connects when it is not told: `CHATD_URL`, `CHATD_KEY`, else the daemon on this machine."""

    url: str
    key: str | None


def config_dir() -> Path:
    """Return the user's folder for chatd's configuration."""
    return _user_dir("XDG_CONFIG_HOME", ".config")


def disk_tier_directory(settings: Settings) -> Path:
    """Return where the disk tier's files are."""
    return (settings.engine.disk_directory or cache_dir() / "kv").expanduser().absolute()


def cache_dir() -> Path:
    """Return the user's folder for what can be made again: models, compiled kernels."""
    return _user_dir("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Return the user's folder for the local key and logs."""
    return _user_dir("XDG_STATE_HOME", ".local/state")


def journal_directory(settings: Settings) -> Path:
    """Return where the journal is."""
    return (settings.journal.directory or state_dir() / "journal").expanduser().absolute()


def local_key_path() -> Path:
    """Return where the random local key is kept when there is no keys file."""
    return state_dir() / "local.key"


def read_local_key() -> str | None:
    """Return this user's local key, None where no daemon has made one."""
    try:
        return local_key_path().read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def client_defaults(url: str | None = None) -> ClientDefaults:
    """Return where a client connects when it is not told, and with which key.

    The local key is an operator's and is offered to this machine's loopback only; `CHATD_KEY` goes to any daemon.

    Args:
        url: Where it connects, if it was told that.
    """
    url = url or os.environ.get("CHATD_URL") or f"http://127.0.0.1:{DEFAULT_PORT}"
    key = os.environ.get("CHATD_KEY") or (read_local_key() if is_loopback(_host_of(url)) else None)
    return ClientDefaults(url=url, key=key)


def check_key_transport(url: str, key: str | None) -> None:
    """Refuse to send a key over the network in the clear.

    Raises:
        InvalidRequest: The address is another machine's and is not encrypted.
    """
    encrypted = url.lower().startswith(("https://", "wss://"))
    if key is not None and not encrypted and not is_loopback(_host_of(url)):
        raise InvalidRequest(
            f"{url} is not encrypted, and whoever is on the way could read the key",
            code="key_in_the_clear",
            param="url",
            hint=f"use https, or a tunnel: ssh -L {DEFAULT_PORT}:127.0.0.1:{DEFAULT_PORT} {_host_of(url)}",
        )


def is_loopback(host: str) -> bool:
    """True for an address or name of this machine's loopback."""
    if host.lower() == "localhost":
        return True
    if not _is_address(host):
        return False
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def proxy_networks(text: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Return the networks in a list such as "10.0.0.5, 10.1.0.0/16".

    Raises:
        ValueError: One of them is none.
    """
    return [ipaddress.ip_network(part.strip()) for part in text.split(",")]


def private_settings(settings: Settings) -> Settings:
    """Return settings for a daemon of one person's own: on loopback, with the local key, without TLS."""
    server = settings.server
    own = {
        "host": server.host if is_loopback(server.host) else "127.0.0.1",
        "keys_file": None,
        "tls_cert": None,
        "tls_key": None,
        "behind_proxy": None,
    }
    return settings.model_copy(update={"server": server.model_copy(update=own)})


def usual_keys_path() -> Path:
    """Return the keys file that is used where `server.keys_file` names none."""
    return config_dir() / "keys.json"


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, for a child process."""
    return {**os.environ, **changes}


def parse_bytes(text: str, *, param: str) -> int:
    """Return a number of bytes from text such as "2GiB", "512MB" or "1073741824".

    Raises:
        ConfigError: Names `param`.
    """
    number = text.strip().upper().rstrip("BIKMG")
    unit = text.strip().upper()[len(number) :]
    try:
        size = int(float(number) * _BYTE_UNITS[unit])
        if size < 0:
            raise ValueError("less than nothing")
        return size
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f'{text!r} is not a size such as "2GiB" ({param})', param=param) from None


def load_settings(
    path: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """Merge the file, the environment and the flags into settings.

    Args:
        path: A TOML file; `CHATD_CONFIG`, else `config.toml` in the user's folder where it exists, where absent.
        flags: Values by dotted path, such as `server.port`; None values are left out.
        environment: The process's own where absent.

    Raises:
        ConfigError: A file that cannot be read, an unknown key, or a value out of range; each named by its path.
    """
    environment = os.environ if environment is None else environment
    sources: dict[str, str] = {}
    merged: dict[str, Any] = {}
    chosen = path or _default_file(environment)
    if chosen is not None:
        _overlay(merged, _read_toml(chosen), str(chosen), sources)
    _overlay(merged, _from_environment(environment), "environment", sources)
    given: dict[str, Any] = {}
    for dotted, value in (flags or {}).items():
        if value is not None:
            section, _, name = dotted.partition(".")
            given.setdefault(section, {})[name] = value
    _overlay(merged, given, "flag", sources)
    _refuse_unknown(merged, sources)
    usual_keys = usual_keys_path()
    if merged.get("server", {}).get("keys_file") is None and _exists(usual_keys):
        _overlay(merged, {"server": {"keys_file": usual_keys}}, "your folder", sources)
    try:
        return LoadedSettings(Settings(**merged), sources)
    except ValidationError as error:
        first = error.errors()[0]
        dotted = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{first['input']!r} is no value for {dotted} (from {sources.get(dotted, 'the settings')}): {first['msg']}",
            param=dotted,
        ) from None


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _exists(path: Path) -> bool:
    """Tell a file that is not there from one that may not be looked at.

    Raises:
        ConfigError: Its folder cannot be read.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="config") from None
    return True


def _host_of(url: str) -> str:
    try:
        return urlsplit(url if "://" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _origin(text: str) -> str:
    """Return an origin as browsers send it.

    Raises:
        ValueError: It is none: a path, a pattern, a name without a scheme.
    """
    parts = urlsplit(text.rstrip("/"))
    if not parts.scheme or not parts.netloc or parts.path or parts.query or "*" in text or "@" in parts.netloc:
        raise ValueError(f"{text!r} is not an origin such as https://chat.example")
    return f"{parts.scheme}://{parts.netloc}".lower()


def _user_dir(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / fallback) / "chatd"


def _default_file(environment: Mapping[str, str]) -> Path | None:
    named = environment.get("CHATD_CONFIG")
    if named:
        return Path(named)
    usual = config_dir() / "config.toml"
    return usual if _exists(usual) else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror} (--config)", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", param="config") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    ours = {name: value for name, value in environment.items() if name.startswith(ENV_PREFIX)}
    known = {
        f"{ENV_PREFIX}{section}{ENV_NESTED}{name}".upper()
        for section, names in _known_names().items()
        for name in names or ()
    }
    for name in ours:
        is_free = name.startswith(tuple(f"{ENV_PREFIX}{section.upper()}" for section in _free_sections()))
        if name not in CLIENT_VARIABLES and name.upper() not in known and not is_free:
            raise ConfigError(f"{name} is not a setting{_nearest(name, known | CLIENT_VARIABLES)}", param=name)
    source = _Environment(Settings, {name: value for name, value in ours.items() if name not in CLIENT_VARIABLES})
    return source()


class _Environment(EnvSettingsSource):
    """pydantic-settings' environment source over a given mapping."""

    def __init__(self, settings_cls: type[BaseSettings], variables: Mapping[str, str]) -> None:
        self._variables = {name.lower(): value for name, value in variables.items()}
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._variables


def _overlay(target: dict[str, Any], values: Mapping[str, Any], source: str, sources: dict[str, str]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(name, {}), dict):
            inner: dict[str, str] = {}
            _overlay(target.setdefault(name, {}), value, source, inner)
            sources.update({f"{name}.{dotted}": origin for dotted, origin in inner.items()})
        else:
            target[name] = value
            sources[name] = source


def _known_names() -> dict[str, list[str] | None]:
    """Return the names in each section; None where it holds tables of free names."""
    return {
        section: list(field.annotation.model_fields) if _is_section(field.annotation) else None
        for section, field in Settings.model_fields.items()
    }


def _free_sections() -> dict[str, list[str]]:
    """Return the names in each table of a section that holds tables of free names, as those of tenants."""
    return {
        section: list(typing.get_args(field.annotation)[1].model_fields)
        for section, field in Settings.model_fields.items()
        if not _is_section(field.annotation)
    }


def _is_section(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _refuse_unknown(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    sections = _known_names()
    for section, inner in values.items():
        if section not in sections:
            raise ConfigError(f"{section} is not a section{_nearest(section, sections)}", param=section)
        names = sections[section]
        tables = {section: inner}
        if names is None:
            tables = {f"{section}.{name}": fields for name, fields in _table(section, inner).items()}
        for where, table in tables.items():
            allowed = names or _free_sections()[section]
            for name in _table(where, table):
                if name not in allowed:
                    dotted = f"{where}.{name}"
                    origin = sources.get(dotted, "the settings")
                    raise ConfigError(
                        f"{dotted} (from {origin}) is not a setting{_nearest(name, allowed)}", param=dotted
                    )


def _table(where: str, values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{values!r} is no value for {where}, which is a table", param=where)
    return values


def _nearest(name: str, allowed: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
