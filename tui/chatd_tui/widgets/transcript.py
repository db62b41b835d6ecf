"""The conversation: messages top to bottom, following the end unless the reader scrolled away."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from chatd_tui.highlighting import Highlighter
from chatd_tui.views import ItemView
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.welcome import Welcome, WelcomeView

# A long history is drawn from its end; each message is a document of widgets.
SHOWN_ITEMS = 30
SYSTEM_ID = "system"
"""Of the view that stands for the system prompt."""


class UserMessage(Static):
    """Draws what a person said, as plain text."""

    DEFAULT_CSS = """
    UserMessage {
        height: auto; margin: 0 0 1 0; padding: 0 1; border-left: outer $primary; background: $surface;
    }
    UserMessage.-system { border-left: outer $line; color: $muted; background: transparent; }
    UserMessage.-lost { border-left: outer $error; color: $muted; }
    """

    def __init__(self, view: ItemView) -> None:
        super().__init__(Content(view.text), markup=False)
        self.view = view
        self.item_id = view.id
        self.text = view.text
        self.set_class(view.role == "system", "-system")


class Earlier(Static):
    """Stands for the messages above that are not drawn; a click draws them."""

    DEFAULT_CSS = """
    Earlier { height: 1; margin: 0 0 1 0; text-align: center; color: $muted; }
    Earlier:hover { color: $primary; }
    """

    def on_click(self, event: events.Click) -> None:
        """Ask the transcript for them."""
        event.stop()
        self.screen.query_one(Transcript).show_earlier()


class Transcript(VerticalScroll):
    """Draws `ItemView`s."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 1 1 0 1; scrollbar-size-vertical: 1; }
    Transcript.-empty { align: center middle; }
    """
    can_focus = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._earlier: list[ItemView] = []
        self._answer: AnswerMessage | None = None
        self._highlight = Highlighter()
        self.welcome = WelcomeView()

    def compose(self) -> ComposeResult:
        """Begin with the newcomer's page."""
        yield Welcome(self.welcome)

    def on_mount(self) -> None:
        """Lay out the newcomer's page."""
        self.add_class("-empty")

    async def show(self, items: Sequence[ItemView]) -> None:
        """Draw these messages instead of what is there."""
        if not self.is_attached:
            return
        self._answer = None
        self._earlier = list(items[:-SHOWN_ITEMS])
        widgets = [self._widget(item) for item in items[-SHOWN_ITEMS:]]
        if self._earlier:
            widgets.insert(0, Earlier(self._earlier_text(), markup=False))
        self.set_class(not widgets, "-empty")
        with self.app.batch_update():
            await self.remove_children()
            await self.mount_all(widgets or [Welcome(self.welcome)])
        self.anchor(bool(widgets))

    async def add(self, item: ItemView) -> None:
        """Draw one more message, at the end."""
        if not self.is_attached or any(getattr(child, "item_id", None) == item.id for child in self.children):
            return
        await self.query(Welcome).remove()
        self.remove_class("-empty")
        await self.mount(self._widget(item))
        if item.role == "user":
            self.anchor()

    async def branch(self, parent: str | None, items: Sequence[ItemView]) -> None:
        """Draw these messages instead of what follows `parent`; nothing changes where they only go on from the end."""
        shown = [
            *self._earlier,
            *(child.view for child in self.children if isinstance(child, UserMessage | AnswerMessage)),
        ]
        kept = shown
        if parent is None:
            # The system prompt is no message of the tree.
            kept = [view for view in shown[:1] if view.id == SYSTEM_ID]
        else:
            places = [place for place, view in enumerate(shown) if view.id == parent]
            if places:
                kept = shown[: places[0] + 1]
        if len(kept) < len(shown) or len(items) > 1:
            await self.show([*kept, *items])
        else:
            for item in items:
                await self.add(item)

    def extend(self, item_id: str, text: str) -> None:
        """Add text to the answer in progress."""
        if self._answer is not None and self._answer.item_id == item_id:
            self._answer.extend(text)

    def finish(self, item: ItemView) -> None:
        """Draw an answer as finished."""
        if self._answer is not None and self._answer.item_id == item.id:
            self._answer.finish(item)
            self._answer = None

    def answer_in_progress(self) -> AnswerMessage | None:
        """Return the answer that grows."""
        return self._answer

    def show_earlier(self) -> None:
        """Draw the messages that stand above, a page of them."""
        if not self._earlier:
            return
        page = self._earlier[-SHOWN_ITEMS:]
        del self._earlier[-SHOWN_ITEMS:]
        notes = list(self.query(Earlier))
        anchor: Widget = notes[0]
        self.mount_all([self._widget(item) for item in page], after=anchor)
        if self._earlier:
            notes[0].update(Content(self._earlier_text()))
        else:
            anchor.remove()

    def update_welcome(self, view: WelcomeView) -> None:
        """Change the newcomer's page, whether it is shown or not."""
        self.welcome = view
        for welcome in self.query(Welcome):
            welcome.view = view

    def _widget(self, item: ItemView) -> Widget:
        if item.role != "assistant":
            return UserMessage(item)
        answer = AnswerMessage(item, self._highlight)
        if not item.done:
            self._answer = answer
        return answer

    def _earlier_text(self) -> str:
        count = len(self._earlier)
        return f"▲ {count} earlier message{'' if count == 1 else 's'}"
