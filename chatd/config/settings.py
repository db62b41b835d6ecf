"""All settings, what each is for, and what it may be. Data only: whoever uses a value checks it against the machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from chatd.config.addresses import DEFAULT_PORT, is_address, is_loopback, origin_of, proxy_networks
from chatd.errors import ConfigError

ENV_PREFIX = "CHATD_"
ENV_NESTED = "__"
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
            if not _HOST_NAME.fullmatch(value) and not is_address(value):
                raise ValueError(f"{value!r} is not a host name such as chat.example, without a port")
        return values

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(origin_of(value) for value in values)


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

    max_sessions_per_user: int = Field(
        1024,
        ge=1,
        description="Open sessions of one user; closed ones do not count, nor archived ones that the journal keeps.",
    )
    max_kept_sessions_per_user: int = Field(
        4096, ge=1, description="Sessions of one user in the journal, closed and archived ones too."
    )
    max_kept_bytes_per_user: int = Field(
        4 * 2**30, ge=2**20, description="Messages of all these, what forks share counted in each."
    )
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

    requests_per_minute: int = Field(
        0,
        ge=0,
        description="Turns, completions, messages without an answer, new sessions and changes of one; and for each of"
        " them ten looks, at lists or sessions.",
    )
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
