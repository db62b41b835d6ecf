"""One answer as it streams: drawn ten times a second, an open code fence as plain text."""

from __future__ import annotations

import time
from dataclasses import replace

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from chatd_tui.highlighting import Highlighter
from chatd_tui.markdown_stream import FenceSplitter
from chatd_tui.messages import BranchChosen
from chatd_tui.views import ItemView
from chatd_tui.widgets.markdown_view import MarkdownView
from chatd_tui.widgets.versions import leaf_at, marker

FLUSH_INTERVAL_S = 0.1


class AnswerMessage(Vertical):
    """Draws an assistant's `ItemView`; `extend` adds text.

    Args:
        view: What to draw; `view.done` says whether more can come.
        highlight: Shared by the answers of an app.
    """

    DEFAULT_CSS = """
    AnswerMessage {
        height: auto; margin: 0 0 1 0; padding: 0 1 0 2;
        & .note { height: auto; color: $muted; display: none; }
        & .note.-shown { display: block; margin-top: 1; }
        & .note.-trouble { color: $warning; }
        &.-selected { border-left: thick $accent; padding: 0 1; }
    }
    """

    def __init__(self, view: ItemView, highlight: Highlighter | None = None) -> None:
        super().__init__()
        self.item_id = view.id
        self._view = view
        self._splitter = FenceSplitter()
        self._text = view.text
        self._ready = ""
        self._fence = ""
        self._dirty = False
        self._timer: Timer | None = None
        self._not_before = 0.0
        initial = view.text
        if not view.done:
            pieces = self._splitter.feed(view.text)
            initial, self._fence = pieces.markdown, pieces.open_fence
        self._body = MarkdownView(initial, highlight)
        self._note = Static(markup=False, classes="note")

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._text

    @property
    def view(self) -> ItemView:
        """What it draws, with the text so far."""
        return self._view if self._view.done else replace(self._view, text=self._text)

    @property
    def drawn(self) -> str:
        """The part of it that is drawn as Markdown."""
        return self._body.source

    @property
    def settled(self) -> bool:
        """Whether the answer has ended and all of it is drawn."""
        return self._view.done and self._timer is None

    def height_at(self, width: int) -> int:
        """Lay out for a width inside of the margins, and return the number of lines."""
        note = self._noted()
        return self._body.height_at(width) + (1 + len(note.wrap(width)) if note else 0)

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield self._body
        yield self._note

    def on_mount(self) -> None:
        """Draw what the view holds, and begin to flush where more can come."""
        self._show_note()
        if self._view.done:
            return
        self._dirty = True
        self._timer = self.set_interval(FLUSH_INTERVAL_S, self._flush)

    def on_unmount(self) -> None:
        """Forget the lines as they were drawn, as `LinesView` does."""
        self._styles_cache.clear()

    def extend(self, text: str) -> None:
        """Add cleaned text; cheap, drawn at the next flush."""
        self._text += text
        pieces = self._splitter.feed(text)
        self._ready += pieces.markdown
        self._fence = pieces.open_fence
        self._dirty = True

    def finish(self, view: ItemView) -> None:
        """Draw the finished answer; its text is right whatever came before."""
        self._view = view if view.siblings else replace(view, siblings=self._view.siblings)
        if self._timer is not None:
            self._ready += self._splitter.end().markdown
            self._fence = ""
            self._dirty = True
            self._not_before = 0.0

    def _flush(self) -> None:
        if not self._dirty or time.monotonic() < self._not_before:
            return
        started = time.monotonic()
        self._dirty = False
        ready, self._ready = self._ready, ""
        view = self._view
        if view.done and view.text != self._text:
            self._text = view.text
            self._body.replace(view.text)
        else:
            self._body.append(ready, self._fence.split("\n", 1)[1] if self._fence else None)
        if view.done:
            self._show_note()
            if self._timer is not None:
                self._timer.stop()
                self._timer = None
        self.call_after_refresh(self._rest, started)

    def _rest(self, started: float) -> None:
        # Where drawing is slow, keys come first: at most a third of the time goes into drawing answers.
        now = time.monotonic()
        self._not_before = now + 2 * (now - started) - FLUSH_INTERVAL_S

    def _noted(self) -> Content:
        parts = [marker(self._view.siblings), Content(self._view.note)]
        return Content(" · ").join([part for part in parts if part])

    def _show_note(self) -> None:
        note = self._noted()
        self._note.update(note)
        self._note.set_class(bool(note), "-shown")
        self._note.set_class(self._view.trouble, "-trouble")

    def on_click(self, event: events.Click) -> None:
        """Show another version where the mark is clicked."""
        offset = event.get_content_offset(self._note)
        if offset is None or offset.y != 0:
            return
        leaf = leaf_at(self._view.siblings, offset.x)
        if leaf is not None:
            event.stop()
            self.post_message(BranchChosen(leaf))
