"""Settings: a TOML file, then CHATD_ environment variables, then flags; the only place that reads the environment.

`load_settings` says of each value where it came from. An unknown key is refused by its path, with the nearest right
name. Everything here is data; whoever uses a setting checks it against the machine.

All of it can be had from here: what there is to set (`settings`), how it is merged (`loading`), where things are
(`folders`), where a client connects (`connecting`, `servers`), and what an address is (`addresses`).

What the daemon sets is imported when it is first asked for: a client has no need of pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chatd.config.addresses import (
    DEFAULT_PORT,
    is_loopback,
    local_url,
    proxy_networks,
    serve_command,
    start_hint,
)
from chatd.config.connecting import (
    ClientDefaults,
    check_key,
    check_key_transport,
    client_defaults,
    input_history_path,
    theme_name,
)
from chatd.config.folders import (
    cache_dir,
    config_dir,
    disk_tier_directory,
    journal_directory,
    keymap_path,
    local_key_path,
    read_local_key,
    state_dir,
    theme_path,
    usual_keys_path,
)
from chatd.config.servers import Server, chosen_servers, read_servers, servers_path, single_server

if TYPE_CHECKING:
    from chatd.config.loading import CLIENT_VARIABLES, LoadedSettings, child_environment, leaves, load_settings
    from chatd.config.settings import (
        BUILT_IN_MODEL,
        ENV_NESTED,
        ENV_PREFIX,
        MAX_PUBLIC_PROMPTS,
        EngineSettings,
        JournalSettings,
        LogSettings,
        ModelSettings,
        PublicPromptSettings,
        QuotaSettings,
        ServerSettings,
        SessionSettings,
        Settings,
        TenantSettings,
        parse_bytes,
        private_settings,
    )

__all__ = [
    "BUILT_IN_MODEL",
    "CLIENT_VARIABLES",
    "DEFAULT_PORT",
    "ENV_NESTED",
    "ENV_PREFIX",
    "MAX_PUBLIC_PROMPTS",
    "ClientDefaults",
    "EngineSettings",
    "JournalSettings",
    "LoadedSettings",
    "LogSettings",
    "ModelSettings",
    "PublicPromptSettings",
    "QuotaSettings",
    "Server",
    "ServerSettings",
    "SessionSettings",
    "Settings",
    "TenantSettings",
    "cache_dir",
    "check_key",
    "check_key_transport",
    "child_environment",
    "chosen_servers",
    "client_defaults",
    "config_dir",
    "disk_tier_directory",
    "input_history_path",
    "is_loopback",
    "journal_directory",
    "keymap_path",
    "leaves",
    "load_settings",
    "local_key_path",
    "local_url",
    "parse_bytes",
    "private_settings",
    "proxy_networks",
    "read_local_key",
    "read_servers",
    "serve_command",
    "servers_path",
    "single_server",
    "start_hint",
    "state_dir",
    "theme_name",
    "theme_path",
    "usual_keys_path",
]

_DAEMONS = ("loading", "settings")


def __getattr__(name: str) -> Any:
    """Import what only the daemon has use for."""
    if name in __all__:
        for module in _DAEMONS:
            found = import_module(f"chatd.config.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
