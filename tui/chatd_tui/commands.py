"""What a command of the terminal client is, and how a typed line becomes one. No widgets, no daemon.

`command_table.COMMANDS` has them all; slash commands, completion, the palette, key bindings, help and the docs' table
are made from it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

# A slash alone is the beginning of a command, so that Enter after it says so.
_COMMAND_LINE = re.compile(r"/([A-Za-z][A-Za-z-]*)?(?:[ \t]+(.*)|\n(.*))?\Z", re.DOTALL)
TOO_OLD = "this daemon is too old for that"
_KEY_NAMES = {"escape": "Esc", "left": "←", "right": "→", "up": "↑", "down": "↓"}
_KEY_NAMES |= {"pageup": "PgUp", "pagedown": "PgDn"}


@dataclass(frozen=True)
class Context:
    """What decides whether a command can be carried out now.

    Attributes:
        connected: Whether there is a connection.
        caps: What the daemon offers beyond the basics (`hello.caps`).
        answering: Whether an answer is in progress in the conversation on the screen.
        observer: Whether that conversation is only watched.
        exists: Whether the daemon has that conversation; a new one exists from its first message on.
        servers: The names of the daemons, where there are several.
    """

    connected: bool = False
    caps: frozenset[str] = frozenset()
    answering: bool = False
    observer: bool = False
    exists: bool = False
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """One thing that a person can have done.

    Attributes:
        name: Typed after the slash.
        help: One line.
        section: The heading that it stands under in the help.
        run: Called with the handlers' object and what was typed after the name.
        hint: What may be typed after the name; in brackets where it may be left out.
        keys: Work wherever the conversation is; a keymap may have others.
        message_keys: Likewise, while a message is selected; each with what it stands for after the name.
        short: A word for the bottom line; none keeps the command out of it.
        choices: What completion offers after the name.
        is_of_servers: It offers the names of the daemons.
        cap: The daemon must offer this.
        idle: Not while an answer is in progress.
        writes: Not for those who only watch.
        exists: Not before the conversation's first message.
        offline: Works without a connection.
        anywhere: Works on every page.
    """

    name: str
    help: str
    section: str
    run: Callable[[Any, str], Awaitable[None]]
    hint: str = ""
    keys: tuple[str, ...] = ()
    message_keys: tuple[tuple[str, str], ...] = ()
    short: str = ""
    choices: tuple[str, ...] = ()
    is_of_servers: bool = False
    cap: str = ""
    idle: bool = False
    writes: bool = False
    exists: bool = False
    offline: bool = False
    anywhere: bool = False

    @property
    def usage(self) -> str:
        """The command as it is typed."""
        return f"/{self.name} {self.hint}".rstrip()

    @property
    def needs_argument(self) -> bool:
        """Whether something has to be typed after the name."""
        return bool(self.hint) and not self.hint.startswith("[")

    def unavailable(self, context: Context) -> str:
        """Return why the command cannot be carried out now, "" where it can."""
        if not self.offline and not context.connected:
            return "there is no connection to the daemon yet"
        if self.cap and self.cap not in context.caps:
            return TOO_OLD
        if self.exists and not context.exists:
            return "this conversation has no messages yet"
        if self.writes and context.observer:
            return "you only watch this conversation"
        if self.idle and context.answering:
            return "an answer is in progress"
        return ""


@dataclass(frozen=True)
class Typed:
    """A line that begins with a slash and names something."""

    name: str
    argument: str


def parse(text: str) -> Typed | str:
    """Return the command that a typed text names, else the message that it is.

    A slash and a word is a command, `//` begins a message with one slash; `/etc/hosts` is a message.
    """
    if text.startswith("//"):
        return text[1:]
    line = _COMMAND_LINE.match(text)
    if line is None:
        return text
    return Typed((line.group(1) or "").lower(), (line.group(2) or line.group(3) or "").strip())


def as_typed(message: str) -> str:
    """Return what has to be typed for `parse` to give this message."""
    return f"/{message}" if message.startswith("//") or isinstance(parse(message), Typed) else message


def find(commands: Sequence[Command], name: str) -> Command | None:
    """Return the command of this name."""
    return next((command for command in commands if command.name == name), None)


def similar(commands: Sequence[Command], name: str) -> list[Command]:
    """Return the commands that may be meant by a name that is none, likeliest first."""
    begun = [command for command in commands if command.name.startswith(name)]
    near = difflib.get_close_matches(name, [command.name for command in commands], n=3, cutoff=0.5)
    likely = [command for close in near for command in commands if command.name == close]
    return list(dict.fromkeys([*begun, *likely]))[:3]


@dataclass(frozen=True)
class Suggestion:
    """One line of what completion offers.

    Attributes:
        text: What the input becomes.
        label: What is shown.
        help: Beside it, dim.
        enabled: Whether it can be carried out now.
    """

    text: str
    label: str
    help: str
    enabled: bool = True


def suggestions(commands: Sequence[Command], text: str, context: Context) -> list[Suggestion]:
    """Return what a begun slash command can become; nothing where the text is not one."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return []
    name, blank, argument = text[1:].partition(" ")
    if not blank:
        return [
            Suggestion(
                f"/{command.name}{' ' if command.hint else ''}", command.usage, reason or command.help, not reason
            )
            for command in commands
            if command.name.startswith(name.lower())
            for reason in [command.unavailable(context)]
        ]
    command = find(commands, name.lower())
    if command is None:
        return []
    begun = argument.rpartition(" ")[2]
    head = text[: len(text) - len(begun)]
    choices = context.servers if command.is_of_servers else command.choices
    chosen = [choice for choice in choices if choice.startswith(begun) and choice != begun]
    if begun and chosen:
        return [Suggestion(head + choice, choice, "") for choice in chosen]
    reason = command.unavailable(context)
    usage = Suggestion(text, command.usage, reason or command.help, not reason)
    return [usage, *(Suggestion(head + choice, choice, "") for choice in chosen if not begun)]


def key_name(key: str) -> str:
    """Write a key as people do: "ctrl+y" is Ctrl+Y, and a letter alone is itself."""
    if len(key) == 1:
        return key
    *modifiers, last = key.split("+")
    is_short = len(last) == 1 or last[1:].isdecimal()
    name = _KEY_NAMES.get(last) or (last.upper() if is_short else last.capitalize().replace("_", " "))
    return "+".join([*(modifier.capitalize() for modifier in modifiers), name])
