"""The first screen of a conversation: who answers, and the keys that a newcomer needs."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from chatd_tui.views import short_number

KEYS = (
    ("Enter", "send"),
    ("Shift+Enter", "new line (also Alt+Enter, Ctrl+J, or \\ at the end)"),
    ("Esc", "stop the answer"),
    ("F2", "see the memory of everybody's conversations, live"),
    ("F3", "your conversations"),
    ("/", "commands: edit, regenerate, fork, search, export …"),
    ("F1", "all commands and keys"),
)


@dataclass(frozen=True)
class WelcomeView:
    """The model that answers, once it is known."""

    model: str = ""
    context: int = 0
    blocks: int = 0
    block_size: int = 0


class Welcome(Widget):
    """Draws a `WelcomeView`."""

    DEFAULT_CSS = """
    Welcome { height: auto; width: auto; max-width: 76; padding: 0 2; }
    """

    view: reactive[WelcomeView] = reactive(WelcomeView(), layout=True)

    def __init__(self, view: WelcomeView) -> None:
        super().__init__()
        self.set_reactive(Welcome.view, view)

    def render(self) -> Content:
        """Draw."""
        view = self.view
        lines = [
            Content.assemble(("Ask ", ""), (view.model or "the model", "bold $primary"), (" anything.", "")),
            Content(""),
        ]
        if view.context:
            pool = f"{short_number(view.blocks)} blocks of {view.block_size} tokens"
            facts = f"It reads {short_number(view.context)} tokens at a time; its memory is {pool}, shared by all."
            lines += [Content.styled(facts, "$muted"), Content("")]
        lines += [Content.assemble((key.ljust(13), "bold"), (meaning, "$muted")) for key, meaning in KEYS]
        return Content("\n").join(lines)
