"""The conversation: messages top to bottom, following the end unless the reader scrolled away; one may be selected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from chatd_tui.highlighting import Highlighter
from chatd_tui.messages import CommandChosen
from chatd_tui.views import ItemView
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.user_message import UserMessage
from chatd_tui.widgets.welcome import Welcome, WelcomeView

# A long history is drawn from its end; each message is a document of widgets.
SHOWN_ITEMS = 30
SYSTEM_ID = "system"
"""Of the view that stands for the system prompt."""


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


OUT_OF_CONTEXT = "what is above is out of the context"


class Transcript(VerticalScroll, inherit_bindings=False):
    """Draws `ItemView`s.

    Args:
        message_keys: What a key does to the selected message, as a command's name and argument.
        write: Gives the keyboard to the input, with what was typed.
    """

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 1 1 0 1; scrollbar-size-vertical: 1; }
    Transcript.-empty { align: center middle; }
    Transcript .-out { text-style: dim; }
    Transcript .-in-context { border-top: dashed $line; border-title-color: $muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "select(-1)", show=False),
        Binding("down", "select(1)", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("pagedown", "page_down", show=False),
        Binding("home", "scroll_home", show=False),
        Binding("end", "scroll_end", show=False),
        Binding("tab,shift+tab", "write", show=False),
    ]

    def __init__(
        self, message_keys: Mapping[str, tuple[str, str]], write: Callable[[str], None], *, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self._write = write
        self._message_keys = message_keys
        self._selected: str | None = None
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
        self._selected = None
        self._earlier = list(items[:-SHOWN_ITEMS])
        widgets = [self._widget(item) for item in items[-SHOWN_ITEMS:]]
        if self._earlier:
            widgets.insert(0, Earlier(self._earlier_text(), markup=False))
        self.set_class(not widgets, "-empty")
        with self.app.batch_update():
            await self.remove_children()
            await self.mount_all(widgets or [Welcome(self.welcome)])
            self._mark_context()
        self.anchor(bool(widgets))
        if not widgets:
            # What is shorter than the screen was anchored to its end, which is a place above its beginning.
            self.scroll_home(animate=False, immediate=True, force=True)

    async def branch(self, parent: str | None, items: Sequence[ItemView]) -> None:
        """Draw these messages instead of what follows `parent`; what stays is not touched, nor the place one reads."""
        if not self.is_attached:
            return
        shown = [*self._earlier, *(message.view for message in self._messages())]
        # The system prompt is no message of the tree, and stays where nothing else does.
        num_kept = sum(view.id == SYSTEM_ID for view in shown[:1])
        if parent is not None:
            num_kept = next((place + 1 for place, view in enumerate(shown) if view.id == parent), len(shown))
        if num_kept < len(self._earlier):
            await self.show([*shown[:num_kept], *items])
            return
        same = 0
        for old, new in zip(shown[num_kept:], items, strict=False):
            if old != new and not (old.id == new.id and not old.done):
                break
            same += 1
        gone = self._messages()[num_kept + same - len(self._earlier) :]
        added = [self._widget(item) for item in items[same:]]
        if gone or added:
            await self._change(gone, added)

    async def _change(self, gone: Sequence[UserMessage | AnswerMessage], added: Sequence[Widget]) -> None:
        # What is shorter than the screen is at its end wherever it is drawn.
        at_end = self.is_vertical_scroll_end or self.max_scroll_y == 0
        lost_selection = any(message.item_id == self._selected for message in gone)
        said = any(isinstance(widget, UserMessage) for widget in added)
        begun = self._answer in added
        if self._answer in gone:
            self._answer = None
        if gone and not begun:
            # Another version: what one looks at stays where it is, though its end is elsewhere now.
            self.release_anchor()
        with self.app.batch_update():
            await self.query(Welcome).remove()
            self.remove_class("-empty")
            for message in gone:
                await message.remove()
            await self.mount_all(added)
            self._mark_context()
            if lost_selection:
                first = next((widget for widget in added if isinstance(widget, UserMessage | AnswerMessage)), None)
                self.select(first.item_id if first else None)
        if (said and not gone) or (begun and at_end):
            self.anchor()

    def _mark_context(self) -> None:
        """Show from which message on the conversation is in the context of what comes next."""
        views = self.views()
        first = next((view.context_from for view in reversed(views) if view.context_from), None)
        is_out = first is not None and any(view.id == first for view in views)
        for message in self._messages():
            is_first = message.item_id == first
            is_out = is_out and not is_first
            message.set_class(is_out, "-out")
            message.set_class(is_first, "-in-context")
            message.border_title = OUT_OF_CONTEXT if is_first else None

    # The selected message.

    @property
    def selected(self) -> ItemView | None:
        """What is selected."""
        message = self._find(self._selected)
        return message.view if message is not None else None

    def select(self, item_id: str | None) -> None:
        """Select a message that is drawn, or none."""
        before, message = self._find(self._selected), self._find(item_id)
        if before is not None and before is not message:
            before.remove_class("-selected")
        self._selected = message.item_id if message is not None else None
        if message is not None:
            message.add_class("-selected")

    def views(self) -> list[ItemView]:
        """Return all messages, first to last."""
        return [*self._earlier, *(message.view for message in self._messages())]

    def action_select(self, step: int) -> None:
        """Select the message above or below; below the last one is the input."""
        messages = self._messages()
        place = next((n for n, message in enumerate(messages) if message.item_id == self._selected), len(messages))
        if place + step < 0 and self._earlier:
            before = messages[0]
            self.show_earlier()
            messages = self._messages()
            place = messages.index(before)
        place = max(0, place + step)
        if place >= len(messages):
            self._write("")
            return
        self.select(messages[place].item_id)
        self.scroll_to_widget(messages[place], animate=False)

    def action_write(self) -> None:
        """Go to the input; what is selected stays so."""
        self._write("")

    def on_click(self, event: events.Click) -> None:
        """Select what is clicked, unless text is being selected."""
        widget = event.widget
        while widget is not None and widget is not self:
            if isinstance(widget, UserMessage | AnswerMessage):
                if not self.screen.get_selected_text():
                    self.select(widget.item_id)
                return
            widget = widget.parent if isinstance(widget.parent, Widget) else None

    def on_key(self, event: events.Key) -> None:
        """Do what a key does to the selected message; whatever else is typed goes to the input."""
        focused = self.screen.focused
        if focused is not None and focused is not self:
            # Typed before the keyboard went to the input, and meant for that.
            event.stop()
            event.prevent_default()
            focused.post_message(events.Key(event.key, event.character))
            return
        wanted = self._message_keys.get(event.key if len(event.key) > 1 else event.character or "")
        if wanted is not None and self._selected is not None:
            event.stop()
            self.post_message(CommandChosen(*wanted))
        elif event.is_printable and event.character:
            event.stop()
            self._write(event.character)

    def _messages(self) -> list[UserMessage | AnswerMessage]:
        return [child for child in self.children if isinstance(child, UserMessage | AnswerMessage)]

    def _find(self, item_id: str | None) -> UserMessage | AnswerMessage | None:
        return next((message for message in self._messages() if message.item_id == item_id), None)

    # The answer in progress.

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

    def reveal(self, item_id: str) -> bool:
        """Select a message and scroll to it, drawing what stands above where it is there; False where it is not."""
        while any(view.id == item_id for view in self._earlier):
            self.show_earlier()
        message = self._find(item_id)
        if message is None:
            return False
        self.release_anchor()
        self.select(item_id)
        self.call_after_refresh(self.scroll_to_widget, message, animate=False, top=True)
        return True

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
