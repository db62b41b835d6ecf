"""A list over the conversation, to choose one of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ScreenResultType

from chatd_tui.screens.page import Dialog

WIDTH = 68


class ChoiceDialog(Dialog[ScreenResultType]):
    """Lists what can be chosen; Enter gives one, Escape none."""

    DEFAULT_CSS = """
    ChoiceDialog {
        align: center middle;
        & > Vertical {
            width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 1 2;
            border: round $primary; background: $surface;
        }
        & Static { height: auto; }
        & OptionList {
            height: auto; max-height: 16; border: none; background: $surface; padding: 0; margin: 1 0;
            text-wrap: nowrap; text-overflow: ellipsis;
            &:focus { border: none; background-tint: transparent; }
            &:focus > .option-list--option-highlighted {
                background: $primary 25%; color: $foreground; text-style: none;
            }
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", "Back")]

    def action_leave(self) -> None:
        """Give none."""
        self.dismiss(None)


def prompt(lines: Sequence[Content]) -> Content:
    """Return what is drawn of one that can be chosen: its lines, cut to the width of the list."""
    return Content("\n").join([line.truncate(WIDTH, ellipsis=True) for line in lines])
