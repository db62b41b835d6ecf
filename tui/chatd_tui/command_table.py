"""All commands: what slash commands, completion, the palette, key bindings, F1 and the docs' table are made from."""

from __future__ import annotations

from textual.binding import Binding

from chatd.protocol import Params
from chatd_tui.actions import Actions
from chatd_tui.commands import Command, key_name

MESSAGES, CONVERSATIONS, ABOUT = "Messages", "Conversations", "Going about"
SETTINGS = tuple(f"{name}=" for name in Params.__struct_fields__)

COMMANDS: tuple[Command, ...] = (
    Command(
        "edit",
        "write your message anew, beside this version",
        MESSAGES,
        Actions.edit,
        message_keys=(("e", ""),),
        cap="branch",
        idle=True,
        writes=True,
        exists=True,
    ),
    Command(
        "regenerate",
        "have the answer again, beside this version",
        MESSAGES,
        Actions.regenerate,
        hint="[NAME=VALUE …]",
        message_keys=(("r", ""),),
        choices=SETTINGS,
        cap="branch",
        idle=True,
        writes=True,
        exists=True,
    ),
    Command(
        "continue",
        "go on from an answer that was cut short",
        MESSAGES,
        Actions.go_on,
        message_keys=(("c", ""),),
        cap="continue",
        idle=True,
        writes=True,
        exists=True,
    ),
    Command(
        "branch",
        "show another version of a message that has several",
        MESSAGES,
        Actions.branch,
        hint="[previous|next]",
        message_keys=(("left", "previous"), ("right", "next")),
        choices=("previous", "next"),
        cap="branch",
        idle=True,
        writes=True,
        exists=True,
    ),
    Command(
        "fork",
        "go on from here in a new conversation",
        MESSAGES,
        Actions.fork,
        hint="[TITLE]",
        message_keys=(("f", ""),),
        cap="fork",
        writes=True,
        exists=True,
    ),
    Command(
        "copy",
        "copy the answer, its last code block, or that one",
        MESSAGES,
        Actions.copy,
        hint="[code|NUMBER]",
        keys=("ctrl+y",),
        message_keys=(("y", ""),),
        short="copy",
        choices=("code",),
        offline=True,
    ),
    Command(
        "stop",
        "stop the answer; what there is of it stays",
        MESSAGES,
        Actions.stop,
        keys=("escape",),
        short="stop",
        writes=True,
        action="leave",
    ),
    Command(
        "first",
        "go to the first message",
        MESSAGES,
        Actions.first,
        keys=("ctrl+home",),
        offline=True,
    ),
    Command("new", "begin a new conversation", CONVERSATIONS, Actions.new, keys=("ctrl+n",), short="new", offline=True),
    Command(
        "conversations",
        "your conversations: show, hide, choose",
        CONVERSATIONS,
        Actions.conversations,
        keys=("f3", "ctrl+l"),
        short="conversations",
        offline=True,
    ),
    Command(
        "search",
        "find conversations by title or text",
        CONVERSATIONS,
        Actions.search,
        hint="TEXT",
    ),
    Command("rename", "give the conversation a title", CONVERSATIONS, Actions.rename, hint="TITLE", writes=True),
    Command(
        "pin",
        "keep it on top of the list, or no longer",
        CONVERSATIONS,
        Actions.pin,
        writes=True,
        exists=True,
    ),
    Command(
        "archive",
        "take it out of the list, or back into it",
        CONVERSATIONS,
        Actions.archive,
        writes=True,
        exists=True,
    ),
    Command(
        "system",
        "show the system prompt, or set it",
        CONVERSATIONS,
        Actions.system,
        hint="[TEXT]",
        writes=True,
    ),
    Command(
        "set",
        "show the parameters, or set some",
        CONVERSATIONS,
        Actions.set,
        hint="[NAME=VALUE …]",
        choices=SETTINGS,
        writes=True,
    ),
    Command(
        "context",
        "show what a full context does, or set it",
        CONVERSATIONS,
        Actions.context,
        hint="[refuse|drop-oldest]",
        choices=("refuse", "drop-oldest"),
        cap="context",
        writes=True,
    ),
    Command(
        "typeahead",
        "read what you type before you send it, or not",
        CONVERSATIONS,
        Actions.typeahead,
        hint="[on|off]",
        choices=("on", "off"),
        cap="prefill",
        writes=True,
    ),
    Command(
        "watch",
        "only watch the conversation, or take part again",
        CONVERSATIONS,
        Actions.watch,
        exists=True,
    ),
    Command(
        "export",
        "write it to a file: Markdown, or .html, or .json",
        CONVERSATIONS,
        Actions.export,
        hint="FILE",
        exists=True,
    ),
    Command(
        "erase",
        "remove the conversation and all that was kept of it",
        CONVERSATIONS,
        Actions.erase,
        cap="erase",
        writes=True,
        exists=True,
    ),
    Command("pool", "the memory pool", ABOUT, Actions.pool, keys=("f2",), short="pool"),
    Command(
        "palette", "all commands, to search", ABOUT, Actions.palette, keys=("ctrl+p",), short="commands", offline=True
    ),
    Command("help", "this list", ABOUT, Actions.help, keys=("f1",), short="help", offline=True, anywhere=True),
    Command(
        "connect",
        "connect at once",
        ABOUT,
        Actions.connect,
        keys=("ctrl+r",),
        offline=True,
    ),
    Command(
        "quit",
        "quit; answers go on while the daemon runs",
        ABOUT,
        Actions.quit,
        keys=("ctrl+q",),
        short="quit",
        offline=True,
        anywhere=True,
    ),
)
BOTTOM = ("help", "palette", "pool", "conversations", "stop", "new", "copy", "quit")


def bindings() -> list[Binding]:
    """Return what the keys do that work wherever the conversation is."""
    return [
        Binding(
            ",".join(command.keys),
            command.action or f"command('{command.name}')",
            command.help,
            id=command.name,
            show=False,
            # The input would take these for itself.
            priority=any(key.startswith("ctrl+") for key in command.keys),
        )
        for command in COMMANDS
        if command.keys
    ]


def message_keys() -> dict[str, tuple[str, str]]:
    """Return what the keys do to a selected message: a command and its argument."""
    return {key: (command.name, argument) for command in COMMANDS for key, argument in command.message_keys}


def bottom_keys() -> tuple[tuple[str, str], ...]:
    """Return the keys of the bottom line, most wanted first."""
    by_name = {command.name: command for command in COMMANDS}
    return tuple((_short_key(by_name[name].keys[0]), by_name[name].short) for name in BOTTOM)


def message_bottom_keys() -> tuple[tuple[str, str], ...]:
    """Return the keys of the bottom line while a message is selected."""
    own = [("↑↓", "select"), ("←→", "versions")]
    own += [(key, name) for key, (name, _) in message_keys().items() if len(key) == 1]
    return (*own, ("/", "command"), ("Esc", "back"))


def _short_key(key: str) -> str:
    return f"^{key[-1].upper()}" if key.startswith("ctrl+") else key_name(key)
