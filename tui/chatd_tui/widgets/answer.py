"""One answer as it streams: drawn ten times a second, an open code fence as plain text."""

from __future__ import annotations

import time
from dataclasses import replace

from textual import events
from textual.content import Content
from textual.timer import Timer

from chatd_tui.highlighting import Highlighter
from chatd_tui.markdown_stream import FenceSplitter
from chatd_tui.messages import BranchChosen
from chatd_tui.views import ItemView
from chatd_tui.widgets.markdown_view import MarkdownView
from chatd_tui.widgets.versions import leaf_at, marker

FLUSH_INTERVAL_S = 0.1


class AnswerMessage(MarkdownView):
    """Draws an assistant's `ItemView` and what there is to say of it; `extend` adds text.

    Args:
        view: What to draw; `view.done` says whether more can come.
        highlight: Shared by the answers of an app.
    """

    DEFAULT_CSS = """
    AnswerMessage {
        margin: 0 0 1 0; padding: 0 1 0 2;
        &.-selected { border-left: thick $accent; padding: 0 1; }
    }
    """

    def __init__(self, view: ItemView, highlight: Highlighter | None = None) -> None:
        super().__init__(highlight=highlight)
        self.item_id = view.id
        self._view = view
        self._splitter = FenceSplitter()
        self._text = view.text
        self._ready = ""
        self._open_fence = ""
        self._grows = self._dirty = not view.done
        self._timer: Timer | None = None
        self._not_before = 0.0
        initial = view.text
        if self._grows:
            pieces = self._splitter.feed(view.text)
            initial, self._open_fence = pieces.markdown, pieces.open_fence
        self._take(initial)

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._text

    @property
    def view(self) -> ItemView:
        """What it draws, with the text so far."""
        return self._view if self._view.done else replace(self._view, text=self._text)

    @property
    def settled(self) -> bool:
        """Whether the answer has ended and all of it is drawn."""
        return not self._grows

    @property
    def note(self) -> Content:
        """What stands under it: the mark of its versions, and how it ended."""
        parts = [marker(self._view.siblings), Content(self._view.note)]
        return Content(" · ").join([part for part in parts if part])

    def _under(self) -> list[Content]:
        note, color = self.note, "$warning" if self._view.trouble else "$muted"
        return note.stylize_before(color).wrap(self._width) if note and self._width else []

    async def on_mount(self) -> None:
        """Begin to flush where more can come."""
        if self._grows:
            self._timer = self.set_interval(FLUSH_INTERVAL_S, self._flush)

    def extend(self, text: str) -> None:
        """Add cleaned text; cheap, drawn at the next flush."""
        self._text += text
        pieces = self._splitter.feed(text)
        self._ready += pieces.markdown
        self._open_fence = pieces.open_fence
        self._dirty = True

    def finish(self, view: ItemView) -> None:
        """Draw the finished answer; its text is right whatever came before."""
        self._view = view if view.siblings else replace(view, siblings=self._view.siblings)
        if self._grows:
            self._ready += self._splitter.end().markdown
            self._open_fence = ""
            self._dirty = True
            self._not_before = 0.0

    def _flush(self) -> None:
        if not self._dirty or time.monotonic() < self._not_before:
            return
        started = time.monotonic()
        self._dirty = False
        ready, self._ready = self._ready, ""
        view = self._view
        self._grows = not view.done
        if view.done and view.text != self._text:
            self._text = view.text
            self.replace(view.text)
        else:
            self.append(ready, self._open_fence.split("\n", 1)[1] if self._open_fence else None)
        if view.done and self._timer is not None:
            self._timer.stop()
            self._timer = None
        self.call_after_refresh(self._rest, started)

    def _rest(self, started: float) -> None:
        # Where drawing is slow, keys come first: at most a third of the time goes into drawing answers.
        now = time.monotonic()
        self._not_before = now + 2 * (now - started) - FLUSH_INTERVAL_S

    def on_click(self, event: events.Click) -> None:
        """Show another version where the mark is clicked."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y != len(self.lines) - len(self._under()):
            return
        leaf = leaf_at(self._view.siblings, offset.x)
        if leaf is not None:
            event.stop()
            self.post_message(BranchChosen(leaf))
