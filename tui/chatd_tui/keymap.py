"""Which keys do what: what bindings, the bottom line, the palette and the help are made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from textual.binding import Binding

from chatd_tui.command_table import BOTTOM, COMMANDS
from chatd_tui.commands import Command, key_name
from chatd_tui.page_keys import POOL_KEYS, PageKey

LEAVE = "escape"
"""Leaves what is open, always; where nothing is, it stops the answer unless /stop has other keys."""

ON_POOL_PAGE = ("pool", *(command.name for command in COMMANDS if command.anywhere))
"""The commands whose keys work on the pool page too; the pool's own closes it."""


@dataclass(frozen=True)
class Keymap:
    """The keys of all commands.

    Attributes:
        keys: Of each command's name: those that work wherever the conversation is.
        message_keys: What a key does to a selected message: a command's name and what stands after it.
        pool_keys: Of each name in `POOL_KEYS`: those that work on the pool page.
    """

    keys: Mapping[str, tuple[str, ...]]
    message_keys: Mapping[str, tuple[str, str]]
    pool_keys: Mapping[str, tuple[str, ...]]

    def names(self, command: Command) -> list[str]:
        """Return the names of a command's keys; those of a selected message last."""
        alone = [key_name(key) for key, (name, _) in self.message_keys.items() if name == command.name]
        return [*self.keys_of(command.name), *alone]

    def keys_of(self, name: str) -> list[str]:
        """Return the names of a command's keys that work wherever the conversation is."""
        return [key_name(key) for key in self.keys[name]]

    def way(self, name: str) -> str:
        """Return how to have a command carried out: its first key, or what to type where it has none."""
        return next(iter(self.keys_of(name)), f"/{name}")

    def named(self, rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return rows of keys or commands and what they do as keys; a command without one is left out."""
        keys = [(self.keys.get(first, (first,)), meaning) for first, meaning in rows]
        return [(key_name(names[0]), meaning) for names, meaning in keys if names]

    def bottom(self) -> tuple[tuple[str, str], ...]:
        """Return the keys of the bottom line, most wanted first."""
        by_name = {command.name: command for command in COMMANDS}
        return tuple((_short(self.keys[name][0]), by_name[name].short) for name in BOTTOM if self.keys[name])

    def message_bottom(self) -> tuple[tuple[str, str], ...]:
        """Return the keys of the bottom line while a message is selected."""
        versions = "".join(
            key_name(key) for key, (name, argument) in self.message_keys.items() if name == "branch" and argument
        )
        own = [(key_name(key), name) for key, (name, _) in self.message_keys.items() if name != "branch"]
        shown = [("↑↓", "select"), (versions, "versions"), *own, ("/", "command"), ("Esc", "back")]
        return tuple((keys, meaning) for keys, meaning in shown if keys)

    def pool_bottom(self, leave: str, missing: frozenset[str] = frozenset()) -> tuple[tuple[str, str, bool], ...]:
        """Return the keys of the pool page's bottom line, what they do, and whether they do that here.

        Args:
            leave: What Esc does.
            missing: What the daemon does not offer, of its `hello.caps`.
        """
        together: dict[str, list[PageKey]] = {}
        for page_key in POOL_KEYS:
            if page_key.short and self.pool_keys[page_key.name]:
                together.setdefault(page_key.short, []).append(page_key)
        rows = [("Esc", leave, True)]
        for short, of_one_word in together.items():
            names = [key_name(self.pool_keys[page_key.name][0]) for page_key in of_one_word]
            between = "" if all(name in "←↑↓→" for name in names) else " "
            rows.append((between.join(names), short, of_one_word[0].cap not in missing))
        rows += [(_short(self.keys[name][0]), name, True) for name in ("help", "quit") if self.keys[name]]
        return tuple(rows)

    def stops(self) -> bool:
        """Whether Esc stops the answer where there is nothing to leave."""
        return LEAVE in self.keys["stop"]

    def moved(self) -> dict[str, str]:
        """Return the keys that are not the registry's, as Textual takes them."""
        return {
            ident: ",".join(_bound(ident, now))
            for ident, keys, now in [
                *((command.name, command.keys, self.keys[command.name]) for command in COMMANDS),
                *((page_key.binding, page_key.keys, self.pool_keys[page_key.name]) for page_key in POOL_KEYS),
            ]
            if now != keys
        }


def bindings() -> list[Binding]:
    """Return what the registry's keys do; `App.set_keymap` moves them by the commands' names."""
    return [
        # Before whatever has the keyboard, which may take such a key for itself.
        Binding(
            ",".join(_bound(command.name, command.keys)),
            f"command('{command.name}')",
            command.help,
            id=command.name,
            show=False,
            priority=True,
        )
        for command in COMMANDS
    ]


def pool_bindings() -> Iterator[Binding]:
    """Give what the keys of the pool page do; `App.set_keymap` moves them as well."""
    for page_key in POOL_KEYS:
        keys = ",".join(_bindable(key) for key in page_key.keys)
        yield Binding(keys, page_key.action, page_key.help, id=page_key.binding, show=False)


def _bound(ident: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys to bind: one that no terminal has where there is none, so that the command can get one."""
    return tuple(_bindable(key) for key in keys if key != LEAVE) or (f"unbound-{ident}",)


def _bindable(key: str) -> str:
    """Return a key by the name that it has in bindings: a comma stands between two of them there."""
    return "comma" if key == "," else key


DEFAULT = Keymap(
    keys={command.name: command.keys for command in COMMANDS},
    message_keys={key: (command.name, argument) for command in COMMANDS for key, argument in command.message_keys},
    pool_keys={page_key.name: page_key.keys for page_key in POOL_KEYS},
)


def _short(key: str) -> str:
    return f"^{key[-1].upper()}" if re.fullmatch(r"ctrl\+.", key) else key_name(key)
