"""The conversation: messages top to bottom, following the end unless the reader scrolled away; one may be selected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget

from chatd_tui.highlighting import Highlighter
from chatd_tui.messages import CommandChosen
from chatd_tui.views import ItemView
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.message_window import Message, MessageWindow
from chatd_tui.widgets.user_message import UserMessage
from chatd_tui.widgets.welcome import Welcome, WelcomeView

SYSTEM_ID = "system"
"""Of the view that stands for the system prompt."""
OUT_OF_CONTEXT = "what is above is out of the context"


class Transcript(MessageWindow, inherit_bindings=False):
    """Draws `ItemView`s.

    Args:
        message_keys: What a key does to the selected message, as a command's name and argument.
        write: Gives the keyboard to the input, with what was typed.
        first_keys: The keys that a newcomer's page names, and what they do.
    """

    DEFAULT_CSS = """
    Transcript.-empty { align: center middle; }
    Transcript .-out { text-style: dim; }
    Transcript .-in-context { border-top: dashed $line; border-title-color: $muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "select(-1)", show=False),
        Binding("down", "select(1)", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("pagedown", "page_down", show=False),
        Binding("home", "to_end(-1)", show=False),
        Binding("end", "to_end(1)", show=False),
        Binding("tab,shift+tab", "write", show=False),
    ]

    def __init__(
        self,
        message_keys: Mapping[str, tuple[str, str]],
        write: Callable[[str], None],
        first_keys: Sequence[tuple[str, str]],
        *,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self._write = write
        self._message_keys = message_keys
        self._first_keys = first_keys
        self._selected: str | None = None
        self._lost: set[str] = set()
        self._in_context: int | None = None
        self._highlight = Highlighter()
        self.welcome = WelcomeView()

    def compose(self) -> ComposeResult:
        """Begin with the newcomer's page."""
        yield self._above
        yield Welcome(self.welcome, self._first_keys)
        yield self._below

    def on_mount(self) -> None:
        """Lay out the newcomer's page."""
        self.add_class("-empty")

    async def show(self, items: Sequence[ItemView]) -> None:
        """Draw these messages instead of what is there."""
        if not self.is_attached:
            return
        self._selected = None
        self._lost.clear()
        self.set_class(not items, "-empty")
        self._find_context(items)
        with self.app.batch_update():
            await self.query(Welcome).remove()
            await self._hold(items)
            if not items:
                await self.mount(Welcome(self.welcome, self._first_keys), before=self._below)
        self.anchor(bool(items))
        if not items:
            # What is shorter than the screen was anchored to its end, which is a place above its beginning.
            self.scroll_home(animate=False, immediate=True, force=True)

    async def branch(self, parent: str | None, items: Sequence[ItemView]) -> None:
        """Draw these messages instead of what follows `parent`; what stays is not touched, nor the place one reads."""
        if not self.is_attached:
            return
        shown = self.views()
        # The system prompt is no message of the tree, and stays where nothing else does.
        num_kept = sum(view.id == SYSTEM_ID for view in shown[:1])
        if parent is not None:
            num_kept = next((place + 1 for place, view in enumerate(shown) if view.id == parent), len(shown))
        same = 0
        for old, new in zip(shown[num_kept:], items, strict=False):
            if old != new and not (old.id == new.id and not old.done):
                break
            same += 1
        gone, added = shown[num_kept + same :], items[same:]
        if gone or added:
            await self._change(num_kept + same, gone, added)

    async def _change(self, kept: int, gone: Sequence[ItemView], added: Sequence[ItemView]) -> None:
        said = any(view.role != "assistant" for view in added)
        begun = any(not view.done for view in added)
        # What is shorter than the screen is at its end wherever it is drawn.
        was_short = self.max_scroll_y == 0
        at_end = self.is_vertical_scroll_end or was_short
        follows = (said and not gone) or (begun and at_end)
        if gone and not begun:
            # Another version: what one looks at stays where it is, though its end is elsewhere now.
            self.release_anchor()
        self._find_context([*self.views()[:kept], *added])
        with self.app.batch_update():
            await self.query(Welcome).remove()
            self.remove_class("-empty")
            await self._replace(kept, added, to_end=follows)
            for place, message in enumerate(self._messages, self._first):
                self._mark_context(place, message)
            if self._selected in {view.id for view in gone}:
                self.select(added[0].id if added else None)
        if follows:
            self.anchor()
        elif gone and added and not begun and was_short:
            # The end was not left, since nothing could be scrolled, and a longer version has its own.
            self.call_after_refresh(self._scroll_to_message, added[0].id, False)
        self._slide_soon()

    def _find_context(self, views: Sequence[ItemView]) -> None:
        """Find from which message on the conversation is in the context of what comes next."""
        first = next((view.context_from for view in reversed(views) if view.context_from), None)
        self._in_context = next((place for place, view in enumerate(views) if view.id == first), None)

    def _mark_context(self, place: int, message: Message) -> None:
        is_first = place == self._in_context
        message.set_class(self._in_context is not None and place < self._in_context, "-out")
        message.set_class(is_first, "-in-context")
        message.border_title = OUT_OF_CONTEXT if is_first else None

    def _widget(self, place: int) -> Message:
        view = self._views[place]
        message = AnswerMessage(view, self._highlight) if view.role == "assistant" else UserMessage(view)
        message.set_class(view.id == self._selected, "-selected")
        message.set_class(view.id in self._lost, "-lost")
        self._mark_context(place, message)
        return message

    def lose(self, item_id: str) -> None:
        """Mark a message of the person's that is not in the conversation."""
        self._lost.add(item_id)
        message = self._find(item_id)
        if message is not None:
            message.add_class("-lost")

    # The selected message.

    @property
    def selected(self) -> ItemView | None:
        """What is selected."""
        if self._selected is None:
            return None
        return next((view for view in self.views() if view.id == self._selected), None)

    def select(self, item_id: str | None) -> None:
        """Select a message, or none."""
        before, message = self._find(self._selected), self._find(item_id)
        if before is not None and before is not message:
            before.remove_class("-selected")
        self._selected = item_id
        if message is not None:
            message.add_class("-selected")

    async def action_select(self, step: int) -> None:
        """Select the message above or below; below the last one is the input."""
        views = self.views()
        place = next((n for n, view in enumerate(views) if view.id == self._selected), len(views))
        place = max(0, place + step)
        if place >= len(views):
            self._write("")
            return
        self.select(views[place].id)
        await self._reveal(place)

    def action_to_end(self, direction: int) -> None:
        """Go to the first message, or to the last one."""
        if direction < 0:
            self.scroll_home(animate=False)
        else:
            self.scroll_end(animate=False)

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

    def command_of(self, event: events.Key) -> tuple[str, str] | None:
        """Return what a key does to the selected message, None where it is not bound."""
        # A keymap names a key by its character; Textual calls "." full_stop, and says of Alt+X that it is an "x" too.
        character = event.character if "+" not in event.key else None
        return self._message_keys.get(event.key) or self._message_keys.get(character or "")

    def on_key(self, event: events.Key) -> None:
        """Do what a key does to the selected message; whatever else is typed goes to the input."""
        focused = self.screen.focused
        if focused is not None and focused is not self:
            # Typed before the keyboard went to the input, and meant for that.
            event.stop()
            event.prevent_default()
            focused._forward_event(events.Key(event.key, event.character))
            return
        wanted = self.command_of(event)
        if wanted is not None and self._selected is not None:
            event.stop()
            self.post_message(CommandChosen(*wanted))
        elif event.is_printable and event.character:
            event.stop()
            self._write(event.character)

    def on_paste(self, event: events.Paste) -> None:
        """Have what is pasted go to the input."""
        event.stop()
        self._write("")
        if self.screen.focused is not None:
            self.screen.focused._forward_event(events.Paste(event.text))

    def _find(self, item_id: str | None) -> Message | None:
        return next((message for message in self._messages if message.item_id == item_id), None)

    # The answer in progress.

    def answer_in_progress(self) -> ItemView | None:
        """Return the answer that grows, so far."""
        return next((view for view in reversed(self.views()) if not view.done), None)

    def extend(self, item_id: str, text: str) -> None:
        """Add text to the answer in progress."""
        message = self._find(item_id)
        if isinstance(message, AnswerMessage):
            if not message.view.done:
                message.extend(text)
            return
        for place in range(len(self._views) - 1, -1, -1):
            view = self._views[place]
            if view.id == item_id and not view.done:
                self._views[place] = replace(view, text=view.text + text)
                return

    def finish(self, item: ItemView) -> None:
        """Draw an answer as finished."""
        message = self._find(item.id)
        if isinstance(message, AnswerMessage):
            if not message.view.done:
                message.finish(item)
            return
        for place in range(len(self._views) - 1, -1, -1):
            view = self._views[place]
            if view.id == item.id and not view.done:
                self._views[place] = replace(item, siblings=item.siblings or view.siblings)
                return

    def reveal(self, item_id: str) -> bool:
        """Select a message and have it seen at the top; False where it is not in the conversation."""
        place = next((place for place, view in enumerate(self.views()) if view.id == item_id), None)
        if place is None:
            return False
        self.release_anchor()
        self.select(item_id)
        self.call_next(self._reveal, place, at_top=True)
        return True

    def update_welcome(self, view: WelcomeView) -> None:
        """Change the newcomer's page, whether it is shown or not."""
        self.welcome = view
        for welcome in self.query(Welcome):
            welcome.view = view
