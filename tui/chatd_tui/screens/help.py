"""All keys and commands, and the questions before a link is opened or something is removed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from chatd.config import keymap_path
from chatd_tui.command_table import COMMANDS
from chatd_tui.commands import Context, key_name
from chatd_tui.keymap import Keymap
from chatd_tui.page_keys import POOL_KEYS
from chatd_tui.screens.page import Dialog
from chatd_tui.views import short_path

KEYS = (
    ("Enter", "send"),
    ("Shift+Enter, Alt+Enter, Ctrl+J", "new line"),
    ("\\ then Enter", "new line, in any terminal"),
    ("/", "a command; Tab completes it, ↑ and ↓ choose"),
    ("//", "a message that begins with /"),
    ("@", "a file whose text goes with the message; Tab completes it"),
    ("Tab", "from the input to the messages and back"),
    ("↑, ↓", "in the input what was sent before; else the message above or below"),
    ("PgUp, PgDn", "scroll"),
    ("Esc", "leave what is open or selected; else stop the answer"),
    ("Ctrl+C", "copy the selected text; twice: quit"),
)
"""Keys that belong to no command."""
USAGE_WIDTH = 28
KEY_WIDTH = 11
LEFT_WIDTH = 2 + USAGE_WIDTH + KEY_WIDTH + 1
SIDE_BY_SIDE = 72
"""Below that many columns, what a command does stands under it."""


def help_lines(context: Context, keymap: Keymap, width: int = 98, *, on_pool_page: bool = False) -> Content:
    """Return all keys and commands in `width` columns; what cannot be done now is faint, and says why.

    Args:
        context: What can be done now.
        keymap: The keys as they are bound.
        width: Columns.
        on_pool_page: The pool page's keys are wanted first.
    """
    of_pool = _pool_keys(keymap, width)
    lines = [*of_pool, Content("")] if on_pool_page else []
    lines += _keys("Keys", KEYS, width)
    for section in dict.fromkeys(command.section for command in COMMANDS):
        lines += [Content(""), Content.styled(section, "bold $primary")]
        for command in COMMANDS:
            if command.section == section:
                reason = command.unavailable(context)
                keys = keymap.names(command)
                lines += _bound_row(command.usage, keys, reason or command.help, width, is_faint=bool(reason))
    if not on_pool_page:
        lines += [Content(""), *of_pool]
    return Content("\n").join([*lines, Content(""), *_last_lines("")])


def pool_help_lines(keymap: Keymap, width: int = 98) -> Content:
    """Return the keys of the pool page in `width` columns."""
    return Content("\n").join([*_pool_keys(keymap, width), Content(""), *_last_lines("[pool] in ")])


def _pool_keys(keymap: Keymap, width: int) -> list[Content]:
    lines = [Content.styled("On the pool page", "bold $primary")]
    for page_key in POOL_KEYS:
        keys = [key_name(key) for key in keymap.pool_keys[page_key.name]]
        lines += _bound_row(page_key.name, keys, page_key.help, width)
    return [*lines, *_bound_row("", ["Esc"], "close the cell, then the page", width)]


def _bound_row(name: str, keys: Sequence[str], meaning: str, width: int, *, is_faint: bool = False) -> list[Content]:
    """Return what a keymap names, its keys, and what that does."""
    padded = name.ljust(USAGE_WIDTH if width >= SIDE_BY_SIDE else len(name) + 1)
    left = Content.assemble((f"  {padded}", "$faint" if is_faint else "bold"), (f" {', '.join(keys)}", "$primary"))
    return _row(left, LEFT_WIDTH, meaning, "$faint" if is_faint else "$muted", width)


def _last_lines(table: str) -> list[Content]:
    return [
        Content.styled(f"Keys of your own: {table}{short_path(keymap_path())}, or --keymap FILE", "$faint"),
        Content.styled("↑ ↓ scroll; any other key closes this", "$faint"),
    ]


def _keys(title: str, keys: Sequence[tuple[str, str]], width: int) -> list[Content]:
    """Return keys that belong to no command, below their title."""
    lines = [Content.styled(title, "bold $primary")]
    for key, meaning in keys:
        lines += _row(Content.styled(f"  {key}", "bold"), 34, meaning, "$muted", width)
    return lines


def _row(left: Content, left_width: int, meaning: str, style: str, width: int) -> list[Content]:
    """Return what is at the left and beside it what that means, or under it where there is no room."""
    if width < SIDE_BY_SIDE:
        wrapped = textwrap.wrap(meaning, max(16, width - 4))
        return [left, *(Content.styled(f"    {line}", style) for line in wrapped)]
    first, *more = textwrap.wrap(meaning, width - left_width)
    row = left.pad_right(max(1, left_width - left.cell_length)).append(Content.styled(first, style))
    return [row, *(Content.styled(" " * left_width + line, style) for line in more)]


class HelpText(Static):
    """Draws all keys and commands, for the width that there is.

    Args:
        lines: Returns the text for a number of columns.
    """

    def __init__(self, lines: Callable[[int], Content]) -> None:
        super().__init__(markup=False)
        self._lines = lines

    def on_resize(self, event: events.Resize) -> None:
        """Draw for another width."""
        self.update(self._lines(event.size.width))


class HelpScreen(Dialog[None]):
    """Lists keys and commands; any key that does not scroll closes it.

    Args:
        lines: Returns them for a number of columns.
    """

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;
        & > VerticalScroll {
            width: 104; max-width: 100%; height: auto; max-height: 100%; scrollbar-size-vertical: 1;
            padding: 1 2; border: round $primary; background: $surface;
        }
        & Static { height: auto; }
    }
    """

    def __init__(self, lines: Callable[[int], Content]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        """Lay out."""
        with VerticalScroll():
            yield HelpText(self._lines)

    def on_key(self, event: events.Key) -> None:
        """Close, unless the key scrolls."""
        if event.key not in ("up", "down", "pageup", "pagedown", "home", "end"):
            self.dismiss()

    def on_click(self) -> None:
        """Close."""
        self.dismiss()


class ConfirmScreen(Dialog[bool]):
    """Asks before something is done; y does it.

    Args:
        question: In a line.
        about: What it is about; cleaned.
        verb: What y does.
    """

    DEFAULT_CSS = """
    ConfirmScreen {
        align: center middle;
        & > Vertical {
            width: 76; max-width: 100%; height: auto; padding: 1 3; border: round $warning; background: $surface;
        }
        & Static { height: auto; }
        & #about { margin: 1 0; color: $primary; text-style: bold; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,enter", "answer(False)", "Leave it"),
    ]

    def __init__(self, question: str, about: str, verb: str) -> None:
        super().__init__()
        self._question = question
        self._about = about
        self._verb = verb

    def compose(self) -> ComposeResult:
        """Lay out."""
        with Vertical():
            yield Static(self._question, markup=False)
            yield Static(Content(self._about), id="about", markup=False)
            yield Static(Content.assemble(("y", "bold"), f" {self._verb}   ", ("n", "bold"), " leave it"), markup=False)

    def action_answer(self, yes: bool) -> None:
        """Give the answer."""
        self.dismiss(yes)


class LinkScreen(ConfirmScreen):
    """Shows where a link leads and asks whether to open it.

    Args:
        href: Cleaned; exactly what would be opened.
    """

    def __init__(self, href: str) -> None:
        super().__init__("Open this address in the browser?", href, "open")
