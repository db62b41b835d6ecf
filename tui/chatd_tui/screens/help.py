"""All keys, and the question before a link is opened."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = (
    (
        "Writing",
        (
            ("Enter", "send"),
            ("Shift+Enter, Alt+Enter, Ctrl+J", "new line"),
            ("\\ then Enter", "new line, in any terminal"),
        ),
    ),
    (
        "Reading",
        (
            ("PgUp, PgDn", "scroll"),
            ("Ctrl+Home", "earlier messages"),
            ("Ctrl+Y", "copy the last answer"),
            ("Esc", "stop the answer"),
        ),
    ),
    (
        "Going about",
        (
            ("F2, Ctrl+P", "the memory pool"),
            ("F3, Ctrl+L", "conversations"),
            ("Ctrl+N", "new conversation"),
            ("Ctrl+R", "connect at once"),
            ("Ctrl+Q, or Ctrl+C twice", "quit; answers go on"),
        ),
    ),
)


class HelpScreen(ModalScreen[None]):
    """Lists the keys; any key closes it."""

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;
        & > Static {
            width: 68; max-width: 100%; height: auto; max-height: 100%;
            padding: 1 3; border: round $primary; background: $surface;
        }
    }
    """

    def compose(self) -> ComposeResult:
        """Lay out."""
        lines: list[Content] = []
        for title, keys in KEYS:
            lines += [Content.styled(title, "bold $primary")]
            lines += [Content.assemble((f"  {key.ljust(32)}", "bold"), (meaning, "$muted")) for key, meaning in keys]
            lines += [Content("")]
        lines += [Content.styled("any key closes this", "$faint")]
        yield Static(Content("\n").join(lines), markup=False)

    def on_key(self) -> None:
        """Close."""
        self.dismiss()

    def on_click(self) -> None:
        """Close."""
        self.dismiss()


class LinkScreen(ModalScreen[bool]):
    """Shows where a link leads and asks whether to open it.

    Args:
        href: Cleaned; exactly what would be opened.
    """

    DEFAULT_CSS = """
    LinkScreen {
        align: center middle;
        & > Vertical {
            width: 76; max-width: 100%; height: auto; padding: 1 3; border: round $warning; background: $surface;
        }
        & Static { height: auto; }
        & #href { margin: 1 0; color: $primary; text-style: bold; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Open"),
        Binding("n,escape,enter", "answer(False)", "Leave it"),
    ]

    def __init__(self, href: str) -> None:
        super().__init__()
        self._href = href

    def compose(self) -> ComposeResult:
        """Lay out."""
        with Vertical():
            yield Static("Open this address in the browser?", markup=False)
            yield Static(Content(self._href), id="href", markup=False)
            yield Static(Content.assemble(("y", "bold"), " open   ", ("n", "bold"), " leave it"), markup=False)

    def action_answer(self, yes: bool) -> None:
        """Give the answer."""
        self.dismiss(yes)
