"""The daemons that a client may talk to at once: by name, from `servers.toml` in the user's folder or a command line.

A daemon's key is read when it is needed and kept in no object here, so that nothing prints it and a new one is found.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from chatd.config.addresses import host_of, is_loopback
from chatd.config.connecting import client_defaults
from chatd.config.folders import config_dir, read_local_key
from chatd.config.key_files import read_key_file
from chatd.errors import ConfigError, InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_FIELDS = ("url", "key_env", "key_file")


def _no_key() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Server:
    """One daemon that a client may talk to.

    Attributes:
        name: Stands above its conversations; "" where it is the only one and nobody named it.
        url: Where it listens.
        read_key: Returns the key that is sent to it, None where none is. It raises `ConfigError` where one was named
            and is not there, or others can read it.
    """

    name: str
    url: str
    read_key: Callable[[], str | None] = field(default=_no_key, repr=False, compare=False)


def servers_path() -> Path:
    """Return the file that names daemons."""
    return config_dir() / "servers.toml"


def single_server(url: str | None = None, key: str | None = None) -> Server:
    """Return the one daemon that a client talks to, by the rules of `client_defaults`; `key` goes before those."""
    address = client_defaults(url).url
    return Server("", address, lambda: key or client_defaults(address).key)


def read_servers(path: Path | None = None) -> list[Server]:
    """Return the daemons that a file names, in its order; none where there is no file.

    Args:
        path: `servers_path()` where absent.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong; named by its path.
    """
    path = path or servers_path()
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    for name in raw:
        if name != "servers":
            raise ConfigError(f"{path}: {name!r} is not known, a daemon is a table such as [servers.box]", param=name)
    tables = raw.get("servers", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: servers is no table, a daemon is one such as [servers.box]", param="servers")
    return [_from_table(path, name, table) for name, table in tables.items()]


def chosen_servers(url: str | None, named: Sequence[str], key: str | None = None) -> list[Server]:
    """Return the daemons that a command line asks for.

    Args:
        url: One that was named by its address.
        named: More of them: "NAME=URL", or "NAME" of one that `servers.toml` has. Where neither is given it is
            `CHATD_URL`, else all of `servers.toml`, else the daemon on this machine.
        key: For the only one.

    Raises:
        ConfigError: `servers.toml` is wrong.
        InvalidRequest: A name is none, is not known or comes twice, or `key` is for several.
    """
    if not named and (url or os.environ.get("CHATD_URL")):
        return [single_server(url, key)]
    known = read_servers()
    if not named and not known:
        return [single_server(url, key)]
    servers = [_of_command_line(text, known) for text in named] if named else known
    if url:
        servers.insert(0, Server(_name_of(url), url, _local_key_reader(url)))
    names = [server.name for server in servers]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"there are several servers with the name {name!r}", param="server")
    if len(servers) == 1:
        only = servers[0]
        if key or only not in known:
            return [Server(only.name, only.url, single_server(only.url, key).read_key)]
    if key:
        raise InvalidRequest(
            f"one key is not for {len(servers)} daemons",
            param="key",
            hint=f"name each one's in {servers_path()}: key_file or key_env",
        )
    return servers


def _of_command_line(text: str, known: Sequence[Server]) -> Server:
    name, is_new, url = text.partition("=")
    if is_new:
        if not _NAME.fullmatch(name) or not url:
            raise InvalidRequest(f"{text!r} is not NAME=URL, such as box=https://box:8790", param="server")
        return Server(name, url, _local_key_reader(url))
    for server in known:
        if server.name == name:
            return server
    have = ", ".join(server.name for server in known) or "no server"
    raise InvalidRequest(
        f"{name!r} is not a server of {servers_path()}", param="server", hint=f"it has {have}; or give NAME=URL"
    )


def _name_of(url: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", host_of(url)).lstrip("-._")[:32]
    return name or "server"


def _from_table(path: Path, name: str, table: Any) -> Server:
    where = f"servers.{name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: {name!r} is no name: 1 to 32 letters, digits, dots and dashes", param=where)
    if not isinstance(table, dict) or not table.get("url"):
        raise ConfigError(f"{path}: {where} has no url", param=where)
    for key, value in table.items():
        if key not in _FIELDS:
            near = get_close_matches(key, _FIELDS, n=1)
            meant = near[0] if near else ", ".join(_FIELDS)
            hint = "a key itself does not belong there: name its file" if key == "key" else f"did you mean {meant}?"
            raise ConfigError(f"{path}: {where}.{key} is not known", param=f"{where}.{key}", hint=hint)
        if not isinstance(value, str):
            raise ConfigError(f"{path}: {where}.{key} is not a text", param=f"{where}.{key}")
    if "key_env" in table and "key_file" in table:
        raise ConfigError(f"{path}: {where} has both key_env and key_file", param=where)
    return Server(name, table["url"], _key_reader(path, where, table))


def _key_reader(path: Path, where: str, table: Mapping[str, str]) -> Callable[[], str | None]:
    if "key_env" in table:
        return lambda: _key_of_variable(table["key_env"], where)
    if "key_file" in table:
        return lambda: read_key_file(path.parent, table["key_file"])
    return _local_key_reader(table["url"])


def _local_key_reader(url: str) -> Callable[[], str | None]:
    return read_local_key if is_loopback(host_of(url)) else _no_key


def _key_of_variable(variable: str, where: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"the variable {variable} has no key ({where}.key_env)", param=f"{where}.key_env")
    return key
