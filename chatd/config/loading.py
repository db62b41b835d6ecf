"""Settings from a TOML file, then CHATD_ environment variables, then flags; of each value, where it came from."""

from __future__ import annotations

import difflib
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource

from chatd.config.folders import config_dir, usual_keys_path
from chatd.config.settings import ENV_NESTED, ENV_PREFIX, Settings
from chatd.errors import ConfigError

CLIENT_VARIABLES = frozenset(
    {"CHATD_CONFIG", "CHATD_URL", "CHATD_KEY", "CHATD_KEY_FILE", "CHATD_INPUT_HISTORY", "CHATD_THEME"}
)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each dotted path that is not a default, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, for a child process."""
    return {**os.environ, **changes}


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
