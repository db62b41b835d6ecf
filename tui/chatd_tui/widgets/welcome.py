"""The first screen of a conversation: what this is, who answers or why nobody does, and the keys that matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from chatd_tui.obstacles import Obstacle
from chatd_tui.views import short_number

WHAT = "Conversations stay in memory here, so a turn costs only what is new."
KEYS = (
    ("Enter", "send; Alt+Enter: a new line"),
    ("stop", "stop the answer"),
    ("conversations", "your conversations"),
    ("pool", "where the memory goes, live"),
    ("help", "all keys; / begins a command"),
)
"""A key, or the command whose key it is, and what it does."""


@dataclass(frozen=True)
class WelcomeView:
    """The model that answers, once it is known, and what is in the way of that."""

    model: str = ""
    context: int = 0
    blocks: int = 0
    block_size: int = 0
    obstacle: Obstacle | None = None


class Welcome(Widget):
    """Draws a `WelcomeView`.

    Args:
        view: What to draw.
        keys: The names of the keys that matter, and what they do.
    """

    DEFAULT_CSS = """
    Welcome { height: auto; width: auto; max-width: 76; padding: 0 2; }
    """

    view: reactive[WelcomeView] = reactive(WelcomeView(), layout=True)

    def __init__(self, view: WelcomeView, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._keys = keys
        self.set_reactive(Welcome.view, view)

    def render(self) -> Content:
        """Draw."""
        view = self.view
        lines = _obstacle_lines(view.obstacle) if view.obstacle is not None else _lines(view)
        lines += [Content.assemble((key.ljust(7), "bold"), (meaning, "$muted")) for key, meaning in self._keys]
        if view.context and view.obstacle is None:
            pool = f"{short_number(view.blocks)} blocks of {view.block_size} tokens"
            facts = f"It reads {short_number(view.context)} tokens at a time; its memory is {pool}, shared by all."
            lines += [Content(""), Content.styled(facts, "$muted")]
        return Content("\n").join(lines)


def _lines(view: WelcomeView) -> list[Content]:
    return [
        Content.assemble(("Ask ", ""), (view.model or "the model", "bold $primary"), (" anything.", "")),
        Content(""),
        Content.styled(WHAT, "$muted"),
        Content(""),
    ]


def _obstacle_lines(obstacle: Obstacle) -> list[Content]:
    lines = [Content.styled(obstacle.title, "bold $warning"), Content("")]
    for typed, what_for in obstacle.remedies:
        lines.append(Content.assemble((f"  {typed}  " if typed else "", "bold"), (what_for, "$muted")))
    if obstacle.remedies:
        lines.append(Content(""))
    return [*lines, Content.styled(obstacle.outlook, "$muted"), Content("")]
