"""Where things are: the user's folders, and the directories that settings may name instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatd.config.settings import Settings


def config_dir() -> Path:
    """Return the user's folder for chatd's configuration."""
    return _user_dir("XDG_CONFIG_HOME", ".config")


def disk_tier_directory(settings: Settings) -> Path:
    """Return where the disk tier's files are."""
    return (settings.engine.disk_directory or cache_dir() / "kv").expanduser().absolute()


def cache_dir() -> Path:
    """Return the user's folder for what can be made again: models, compiled kernels, KV."""
    return _user_dir("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Return the user's folder for what is to last: the local key, logs, the journal, what was copied and sent."""
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


def usual_keys_path() -> Path:
    """Return the keys file that is used where `server.keys_file` names none."""
    return config_dir() / "keys.json"


def keymap_path() -> Path:
    """Return the file in which the terminal client's keys may be changed."""
    return config_dir() / "keymap.toml"


def theme_path() -> Path:
    """Return the file in which the terminal client keeps the theme that was chosen last."""
    return state_dir() / "theme"


def _user_dir(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / fallback) / "chatd"
