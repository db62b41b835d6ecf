"""The file that moves keys: TOML; `[keys]` work wherever the conversation is, `[message]` on a selected message,
`[pool]` on the pool page.

A command that the file names has these keys and no others; all else stays. All that is wrong is said at once.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from textual.keys import REPLACED_KEYS, Keys, key_to_character

from chatd.clean import clean_line
from chatd.config import keymap_path
from chatd.errors import ConfigError
from chatd_tui.command_table import COMMANDS
from chatd_tui.commands import Command, find, key_name, similar
from chatd_tui.keymap import DEFAULT, LEAVE, ON_POOL_PAGE, Keymap
from chatd_tui.keys import NEWLINE_KEYS

TABLES = ("keys", "message", "pool")
_MODIFIERS = ("alt", "ctrl", "hyper", "meta", "shift", "super")
_NAMED = frozenset(key.value for key in Keys if key.value.isalnum() and len(key.value) > 1) - {"return"}
_FUNCTION_KEY = re.compile(r"f\d+\Z")
_SENT_FOR = {"ctrl+i": "Tab", "ctrl+m": "Enter", "ctrl+h": "Backspace", "ctrl+left_square_bracket": "Esc"}
_FIXED = (
    {"ctrl+c": "copies, and quits"} | dict.fromkeys(NEWLINE_KEYS, "makes a new line") | {LEAVE: "leaves what is open"}
)
_MESSAGE_FIXED = dict.fromkeys(("up", "down", "pageup", "pagedown", "home", "end"), "goes through the messages") | {
    "tab": "goes back to the input",
    "shift+tab": "goes back to the input",
    "/": "begins a command",
}
_HEADER = re.compile(r"\s*\[\s*([\w-]+)\s*\]")
_ENTRY = re.compile(r"""\s*(?:(keys|message|pool)\s*\.\s*)?(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*=""")
_TOML_LINE = re.compile(r"\s*\(at line (\d+), column \d+\)")


def load_keymap(named: Path | None = None) -> Keymap:
    """Return the keys of a file, of the usual one where none is named, and the registry's where that is not there.

    Raises:
        ConfigError: Says of every mistake in which line it is.
    """
    path = named or keymap_path()
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        if named is None:
            return DEFAULT
        raise ConfigError(f"there is no keymap file {named}", param="keymap") from None
    except OSError as error:
        raise ConfigError(f"the keymap file {path} cannot be read: {error.strerror}", param="keymap") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the keymap file {path} is not UTF-8 text (at byte {error.start})", param="keymap") from None
    return read_keymap(text, str(path))


def read_keymap(text: str, name: str = "keymap.toml") -> Keymap:
    """Return the keys that a file's text says.

    Args:
        text: TOML.
        name: Of the file, for what is wrong with it.

    Raises:
        ConfigError: Says of every mistake in which line it is.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = _TOML_LINE.search(str(error))
        line = where.group(1) if where else len(text.splitlines())
        raise ConfigError(f"{name}:{line}: {_TOML_LINE.sub('', str(error))}", param="keymap") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply", param="keymap") from None
    reading = _Reading(text)
    keymap = reading.read(tables)
    if reading.mistakes:
        lines = [f"{name}{f':{line}' if line else ''}: {said}" for line, said in sorted(reading.mistakes)]
        raise ConfigError("\n".join(lines), param="keymap")
    return keymap


class _Reading:
    """One file on its way to a keymap; gathers what is wrong with it as (line, what), line 0 where none is known."""

    def __init__(self, text: str) -> None:
        self.mistakes: list[tuple[int, str]] = []
        self._lines = dict(_lines(text))
        self._given: dict[tuple[str, str], int] = {}

    def read(self, tables: Mapping[str, Any]) -> Keymap:
        """Return the keys, which are only good where there are no mistakes."""
        for table, entries in tables.items():
            if table not in TABLES or not isinstance(entries, dict):
                line = self._lines.get((table, ""), self._lines.get(("", table), 0))
                said = f"there is no table [{clean_line(table, 40)}]; there are [keys], [message] and [pool]"
                self.mistakes.append((line, said))
        keymap = Keymap(self._read_keys(tables), self._read_message_keys(tables), self._read_pool_keys(tables))
        self._check_conflicts(keymap)
        return keymap

    def _read_keys(self, tables: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        keys = dict(DEFAULT.keys)
        for entry, value, line in self._entries(tables, "keys"):
            command = self._command(entry, line)
            given = self._keys(value, line, "keys", stops=command is not None and command.name == "stop")
            if command is not None:
                keys[command.name] = given
                self._given |= {("keys", key): line for key in given}
        return keys

    def _read_message_keys(self, tables: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        message_keys = dict(DEFAULT.message_keys)
        given: list[tuple[str, tuple[str, str], int]] = []
        for entry, value, line in self._entries(tables, "message"):
            name, _, argument = entry.partition(" ")
            command = self._command(name, line)
            keys = self._keys(value, line, "message")
            if command is not None:
                does = (command.name, argument.strip())
                if does[1] and not command.hint:
                    self.mistakes.append((line, f"/{command.name} takes nothing after its name"))
                message_keys = {key: what for key, what in message_keys.items() if what != does}
                given += [(key, does, line) for key in keys]
        for key, does, line in given:
            if key in message_keys:
                self._conflict(line, key, " ".join(message_keys[key]).strip(), "message")
            message_keys[key] = does
            self._given["message", key] = line
        return message_keys

    def _read_pool_keys(self, tables: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        pool_keys = dict(DEFAULT.pool_keys)
        for name, value, line in self._entries(tables, "pool"):
            given = self._keys(value, line, "pool")
            if name not in pool_keys:
                near = difflib.get_close_matches(name, pool_keys, n=2, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(pool_keys)}"
                self.mistakes.append((line, f"nothing on the pool page is called {clean_line(name, 40)!r}; {hint}"))
            else:
                pool_keys[name] = given
                self._given |= {("pool", key): line for key in given}
        return pool_keys

    def _entries(self, tables: Mapping[str, Any], table: str) -> list[tuple[str, Any, int]]:
        entries = tables.get(table)
        if not isinstance(entries, dict):
            return []
        return [(entry, value, self._lines.get((table, entry), 0)) for entry, value in entries.items()]

    def _command(self, name: str, line: int) -> Command | None:
        command = find(COMMANDS, name.removeprefix("/"))
        if command is None:
            near = " or ".join(close.name for close in similar(COMMANDS, name))
            hint = f"; did you mean {near}?" if near and name else ""
            self.mistakes.append((line, f"there is no command {clean_line(name, 40)!r}{hint}"))
        return command

    def _keys(self, value: Any, line: int, table: str, *, stops: bool = False) -> tuple[str, ...]:
        typed = [value] if isinstance(value, str) else value
        if not isinstance(typed, list) or not all(isinstance(key, str) for key in typed):
            self.mistakes.append((line, 'keys are a text such as "ctrl+o", or a list of such; [] is none'))
            return ()
        keys = []
        for text in typed:
            key = canonical(text)
            if key is None:
                self.mistakes.append((line, f"{clean_line(text, 40)!r} is no key; keys are such as ctrl+o, alt+x, f6"))
            elif (reason := _refusal(key, table)) and not (stops and key == LEAVE):
                self.mistakes.append((line, f"{key_name(key)} {reason}"))
            else:
                keys.append(key)
        return tuple(dict.fromkeys(keys))

    def _conflict(self, line: int, key: str, other: str, table: str) -> None:
        entry = f'"{other}"' if " " in other else other
        hint = f"give that another one, or none: {entry} = [] under [{table}]"
        what = f"{other} on the pool page" if table == "pool" else f"/{other}"
        self.mistakes.append((line, f"{key_name(key)} is the key of {what} already; {hint}"))

    def _check_conflicts(self, keymap: Keymap) -> None:
        owners = self._check_one_owner(keymap.keys, DEFAULT.keys, "keys")
        of_pool = self._check_one_owner(keymap.pool_keys, DEFAULT.pool_keys, "pool")
        for key, names in owners.items():
            line = self._given.get(("keys", key), 0)
            if key in keymap.message_keys:
                self._conflict(self._given.get(("message", key), line), key, names[0], "keys")
            if key in of_pool and names[0] in ON_POOL_PAGE:
                if pool_line := self._given.get(("pool", key)):
                    self._conflict(pool_line, key, names[0], "keys")
                else:
                    self._conflict(line, key, of_pool[key][0], "pool")

    def _check_one_owner(
        self, keys: Mapping[str, Sequence[str]], before: Mapping[str, Sequence[str]], table: str
    ) -> dict[str, list[str]]:
        """Return whose each key is in a table, which should be one name each."""
        owners: dict[str, list[str]] = {}
        for name, of_name in keys.items():
            for key in of_name:
                owners.setdefault(key, []).append(name)
        for key, names in owners.items():
            if len(names) > 1:
                # The one that had it before is named.
                had = next((name for name in names if key in before[name]), names[0])
                self._conflict(self._given.get((table, key), 0), key, had, table)
        return owners


def canonical(text: str) -> str | None:
    """Return a key as Textual names it; None where there is no such key.

    Letters alone keep their case: "E" is Shift+E. Modifiers may stand in any order.
    """
    if len(text) == 1:
        return text if text.isprintable() else None
    *modifiers, last = text.strip().lower().split("+")
    if len(set(modifiers)) < len(modifiers) or not set(modifiers) <= set(_MODIFIERS):
        return None
    character = key_to_character(REPLACED_KEYS.get(last, last)) if len(last) > 1 else None
    if not (last in _NAMED or character or (last.isalnum() and len(last) == 1)):
        return None
    if not modifiers and last not in _NAMED:
        return character
    return "+".join([*sorted(modifiers), last])


def _refusal(key: str, table: str) -> str:
    """Say why a key cannot be given to something in a table; "" where it can."""
    if key in _SENT_FOR:
        return f"cannot be told from {_SENT_FOR[key]}, which terminals send for it"
    if key in _FIXED and not (table == "pool" and key in NEWLINE_KEYS):
        return f"{_FIXED[key]}, always"
    if table == "pool":
        return ""
    if table == "message":
        return f"{_MESSAGE_FIXED[key]}, always" if key in _MESSAGE_FIXED else ""
    *modifiers, last = key.split("+") if len(key) > 1 else [key]
    if _FUNCTION_KEY.match(last) or set(modifiers) - {"shift"}:
        return ""
    return "is needed in the input; take a function key, or Ctrl or Alt with a letter"


def _lines(text: str) -> Iterator[tuple[tuple[str, str], int]]:
    """Give where a table's header, and an entry of a table, is: as (table, entry) and the line's number."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header.group(1)
            yield (table, ""), number
        elif entry := _ENTRY.match(line):
            name = next((part for part in entry.groups()[1:] if part is not None), "")
            yield (entry.group(1) or table, name), number
