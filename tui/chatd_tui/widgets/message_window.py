"""A conversation of any length that scrolls, and takes, like a short one: only messages near what is seen have widgets.

A gap above them and one below are as high as the other messages are thought to be. Where a message turns out higher or
lower than was thought, the gap takes that up, so that what is seen stays where it is.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Awaitable, Sequence
from itertools import accumulate

from textual.containers import VerticalScroll
from textual.widget import Widget

from chatd_tui.views import ItemView
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.transcript_window import covering, estimated_height, message_at
from chatd_tui.widgets.user_message import UserMessage

Message = UserMessage | AnswerMessage

MESSAGE_GUTTER = 3
"""Columns at the sides of a message."""
FAR_PAGES = 3
"""Messages that are so many screens away have no widgets; within one screen all have."""


class Gap(Widget):
    """Stands for the messages that have no widgets."""

    DEFAULT_CSS = """
    Gap { height: 0; display: none; }
    """
    BLANK = True

    lines = 0

    def show(self, lines: int) -> None:
        """Be so many lines high."""
        if lines != self.lines:
            self.lines = lines
            self.styles.height = lines
            self.display = lines > 0


class MessageWindow(VerticalScroll, inherit_bindings=False):
    """Holds all messages, and has widgets for those near what is seen."""

    # The gutter keeps the width when a conversation becomes longer than the screen, so that nothing is laid out twice.
    DEFAULT_CSS = """
    MessageWindow { height: 1fr; padding: 1 0 0 1; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._views: list[ItemView] = []
        self._messages: list[Message] = []
        self._first = 0
        self._heights: dict[str, int] = {}
        self._width = 1
        self._above, self._below = Gap(), Gap()
        self._place: tuple[str, int] | None = None
        self._slides = False

    @abstractmethod
    def _widget(self, place: int) -> Message:
        """Make the widget of a message."""

    def views(self) -> list[ItemView]:
        """Return all messages, first to last."""
        shown = [message.view for message in self._messages]
        return [*self._views[: self._first], *shown, *self._views[self._end :]]

    @property
    def messages(self) -> list[Message]:
        """The messages that have widgets, first to last."""
        return self._messages

    @property
    def _end(self) -> int:
        """The place after the last message that has a widget."""
        return self._first + len(self._messages)

    # Heights, in lines; the place of a line is counted from the first line of the first message.

    @property
    def _page(self) -> int:
        return max(1, self.size.height)

    @property
    def _top(self) -> int:
        """The first line that is seen."""
        return round(self.scroll_y)

    def _height(self, message: Message) -> int:
        return message.height_at(self._width) + 1 + message.has_class("-in-context")

    def _thought(self, first: int, end: int) -> list[int]:
        """Return how high messages without widgets are, or may be."""
        views = self._views[first:end]
        return [self._heights.get(view.id) or estimated_height(view.text, self._width) for view in views]

    def _begins(self) -> list[int]:
        """Return the line at which each message with a widget begins, and the one where the last of them ends."""
        return list(accumulate((self._height(message) for message in self._messages), initial=self._above.lines))

    def _take_width(self) -> None:
        self._width = max(1, self.scrollable_content_region.width - MESSAGE_GUTTER)
        self._heights.clear()

    # What is held.

    async def _hold(self, views: Sequence[ItemView]) -> None:
        """Hold these messages and no others, shown from their end."""
        self._views = list(views)
        await self._show_end()

    async def _replace(self, kept: int, added: Sequence[ItemView], *, to_end: bool) -> None:
        """Hold others after the first `kept` messages; `to_end` where they are to be seen."""
        self._views = self.views()
        for view in self._views[kept:]:
            self._heights.pop(view.id, None)
        was_seen = self._end >= min(kept, len(self._views))
        self._views[kept:] = added
        gone = self._messages[max(0, kept - self._first) :]
        del self._messages[max(0, kept - self._first) :]
        if to_end and not (was_seen and self._messages):
            await self._show_end(gone)
            return
        if not self._messages:
            # What was seen is gone, and what comes in its place begins above.
            await self._reveal(min(kept, len(self._views) - 1), at_top=True, gone=gone)
            return
        end = self._begins()[-1]
        await self._move(self._end, end, self._above.lines, end + 2 * self._page if was_seen else end, gone)

    async def _show_end(self, gone: Sequence[Message] = ()) -> None:
        """Have widgets for the last messages, and no others."""
        gone, self._messages = [*gone, *self._messages], []
        self._first = len(self._views)
        self._place = None
        self._take_width()
        await self._move(len(self._views), 0, -2 * self._page, 0, gone)

    async def _reveal(self, place: int, *, at_top: bool = False, gone: Sequence[Widget] = ()) -> None:
        """Have a message seen: where it is, else at the top, or at the edge that it is beyond."""
        if not self._first <= place < self._end:
            y = sum(self._thought(0, place))
            await self._move(place, y, y - self._page, y + 2 * self._page, gone, see=place)
        ident = self._views[place].id
        self._scroll_to_message(ident, at_top)
        # Once more when the new widgets have made the conversation as high as it is.
        self.call_after_refresh(self._scroll_to_message, ident, at_top)

    def _scroll_to_message(self, ident: str, at_top: bool) -> None:
        begins = self._begins()
        for message, y, end in zip(self._messages, begins, begins[1:], strict=False):
            if message.item_id == ident:
                if y < self._top or at_top or end - y > self._page:
                    self.scroll_to(y=y, animate=False, immediate=True)
                elif end > self._top + self._page:
                    self.scroll_to(y=end - self._page, animate=False, immediate=True)

    # The window.

    async def _move(
        self, at: int, at_y: int, top: int, bottom: int, gone: Sequence[Widget] = (), *, see: int | None = None
    ) -> None:
        """Have widgets for what covers the lines from `top` to `bottom`, where the message `at` begins at `at_y`.

        What is seen stays so, but where the message `see` is to be at the top.

        All that is known changes at once, and what is drawn when every widget is there: others may come in between.
        """
        built: dict[int, Message] = {}

        def height(place: int) -> int:
            if self._first <= place < self._end:
                return self._height(self._messages[place - self._first])
            built[place] = self._widget(place)
            return self._height(built[place])

        first, end, first_y = covering(len(self._views), at, at_y, top, bottom, height)
        kept = {place: message for place, message in enumerate(self._messages, self._first) if first <= place < end}
        for place, message in enumerate(self._messages, self._first):
            if place not in kept:
                self._views[place] = message.view
                self._heights[message.item_id] = self._height(message)
                gone = [*gone, message]
        head = [built[place] for place in range(first, min(kept, default=end))]
        tail = [built[place] for place in range(first + len(head) + len(kept), end)]
        self._first, self._messages = first, [*head, *kept.values(), *tail]
        # The gap above is what keeps the rest where it is, as long as it can stand for what is in it.
        above = first_y if 0 < 2 * first <= first_y else sum(self._thought(0, first))
        with self.app.batch_update():
            self._above.show(above)
            self._below.show(sum(self._thought(end, len(self._views))))
            y = self.scroll_y + above - first_y if see is None else self._begins()[see - first]
            if y != self.scroll_y:
                self._shift_to(y)
            waits: list[Awaitable[None]] = [
                self.remove_children(gone),
                self.mount_all(head, after=self._above),
                self.mount_all(tail, before=self._below),
            ]
            for wait in waits:
                await wait

    def _shift_to(self, y: float) -> None:
        """Scroll, and stay at the end where one is: Textual's `scroll_to` leaves it, whatever it is told."""
        if self.allow_vertical_scroll:
            self.scroll_target_y = y
            self.scroll_y = self.scroll_target_y

    def release_anchor(self) -> None:
        """Leave the end, where there is something to scroll.

        What is shorter than the screen is drawn at the screen's end, which is a place above its beginning. Nothing
        could be scrolled back from there, and what comes to it would be below the screen.
        """
        # What came just now may not be laid out yet; a line of padding is above it.
        if self.max_scroll_y > 0 or self._begins()[-1] + self._below.lines >= self._page:
            super().release_anchor()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """See to it that what is scrolled to has widgets."""
        super().watch_scroll_y(old_value, new_value)
        self._slide_soon()

    def watch_virtual_size(self) -> None:
        """See to it that what is seen has widgets once it is laid out: the end moves without being scrolled to."""
        self._slide_soon()

    def on_resize(self) -> None:
        """Lay out for another width, and have widgets for another height."""
        self._slide_soon()

    def _slide_soon(self) -> None:
        if not self._slides and self._messages:
            self._slides = True
            self.call_next(self._slide)

    async def _slide(self) -> None:
        self._slides = False
        if not self._messages or not self.is_attached or not self.size:
            return
        if self._width != max(1, self.scrollable_content_region.width - MESSAGE_GUTTER):
            self._lay_out_anew()
        begins, page, top = self._begins(), self._page, self._top
        if self.is_anchored and self.is_vertical_scroll_end and top + page < begins[-1] + self._below.lines:
            # The end is what will be seen, and it is not laid out yet: what comes there is not far away.
            return
        is_near = (self._first == 0 or begins[0] <= top - page // 2) and (
            self._end == len(self._views) or begins[-1] >= top + page + page // 2
        )
        is_far = begins[1] < top - FAR_PAGES * page or begins[-2] > top + (1 + FAR_PAGES) * page
        if not is_near or is_far:
            if self._below.lines and top + page >= begins[-1] + self._below.lines:
                # Exactly the end, whatever was thought of the way there.
                await self._show_end()
                self.scroll_end(animate=False)
            else:
                await self._move(*self._seen_at(top, begins), top - page, top + 2 * page)
        self._note_place()

    def _seen_at(self, top: int, begins: Sequence[int]) -> tuple[int, int]:
        """Return the message at the first line that is seen, and where it begins; estimated in a gap."""
        if top + self._page <= begins[0]:
            return message_at(self._thought(0, self._first), self._above.lines, top)
        if top >= begins[-1]:
            thought = self._thought(self._end, len(self._views))
            if thought:
                place, y = message_at(thought, self._below.lines, top - begins[-1])
                return self._end + place, begins[-1] + y
        index = min(max(0, bisect_right(begins, top) - 1), len(self._messages) - 1)
        return self._first + index, begins[index]

    def _note_place(self) -> None:
        """Remember what is seen first, for when all heights change."""
        if self._messages:
            place, y = self._seen_at(self._top, self._begins())
            self._place = self._views[place].id, self._top - y

    def _lay_out_anew(self) -> None:
        """Take another width; what was seen first stays so."""
        self._take_width()
        self._above.show(sum(self._thought(0, self._first)))
        self._below.show(sum(self._thought(self._end, len(self._views))))
        if self._place is None or (self.is_anchored and self.is_vertical_scroll_end):
            return
        begins = dict(zip((message.item_id for message in self._messages), self._begins(), strict=False))
        ident, offset = self._place
        if ident in begins:
            y = begins[ident] + offset
            self.call_after_refresh(self._shift_to, y)
