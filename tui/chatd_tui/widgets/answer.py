"""One answer as it streams: Markdown for what is whole, plain text for a code fence that is still open."""

from __future__ import annotations

import time

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Markdown, Static

from chatd_tui.markdown_stream import FenceSplitter, make_parser
from chatd_tui.messages import LinkChosen
from chatd_tui.views import ItemView
from chatd_tui.widgets.fence import ColoredFence, OpenFence

FLUSH_INTERVAL_S = 0.1
# Markdown of a line or a paragraph is parsed anew with each piece; beyond this an answer goes on as plain text.
MAX_MARKDOWN = 200_000
# Laying a document out costs time for each of its blocks, so a long answer is several documents.
SEGMENT_BLOCKS = 10


class AnswerMarkdown(Markdown):
    """Markdown of remote text: no HTML, and links are only told of."""

    BLOCKS = {  # noqa: RUF012 - an instance variable to Textual
        **Markdown.BLOCKS,
        "fence": ColoredFence,
        "code_block": ColoredFence,
    }

    def __init__(self, text: str) -> None:
        super().__init__(text, parser_factory=make_parser, open_links=False)
        self._own_source: str | None = None

    @property
    def own_source(self) -> str:
        """The part of the answer that this document draws."""
        if self._own_source is not None:
            return self._own_source
        return self.source if self._initial_markdown is None else self._initial_markdown

    @own_source.setter
    def own_source(self, text: str) -> None:
        self._own_source = text

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Tell what was clicked; nothing opens by itself."""
        event.stop()
        self.post_message(LinkChosen(event.href))


class AnswerBody(Vertical):
    """Markdown that grows at its end; the cost of growing does not depend on how much there is."""

    DEFAULT_CSS = """
    AnswerBody {
        height: auto;
        & AnswerMarkdown { padding: 0; margin: 0; height: auto; background: transparent; }
        & MarkdownBlock { link-color: $primary; link-style: underline; link-background: transparent; }
        & MarkdownFence { margin: 0 0 1 0; background: $surface; }
        & .plain { height: auto; }
    }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._initial = text
        self._last = AnswerMarkdown("")
        self._plain: Static | None = None
        self._plain_text = ""
        self._length = 0

    @property
    def source(self) -> str:
        """What was drawn so far."""
        return "".join(segment.own_source for segment in self.query(AnswerMarkdown)) + self._plain_text

    async def on_mount(self) -> None:
        """Draw the text that was there at first."""
        await self.replace(self._initial)

    async def replace(self, text: str) -> None:
        """Draw another text."""
        await self.remove_children()
        self._plain, self._plain_text, self._length = None, "", len(text)
        if self._length > MAX_MARKDOWN:
            await self._append_plain(text)
            return
        self._last = AnswerMarkdown(text)
        await self.mount(self._last)

    async def append(self, text: str) -> None:
        """Draw more at the end."""
        self._length += len(text)
        if self._plain is not None or self._length > MAX_MARKDOWN:
            await self._append_plain(text)
            return
        await self._last.append(text)
        if len(self._last.children) > SEGMENT_BLOCKS:
            await self._begin_segment()

    async def _begin_segment(self) -> None:
        """Let the last block, which may still grow, go on in a document of its own."""
        lines = self._last.source.split("\n")
        starts = [token.map[0] for token in make_parser().parse(self._last.source) if token.level == 0 and token.map]
        if not starts or starts[-1] == 0:
            return
        tail = "\n".join(lines[starts[-1] :])
        before = self._last
        before.own_source = before.source.removesuffix(tail)
        self._last = AnswerMarkdown(tail)
        await before.children[-1].remove()
        await self.mount(self._last)

    async def _append_plain(self, text: str) -> None:
        if self._plain is None:
            self._plain = Static(markup=False, classes="plain")
            await self.mount(self._plain)
        self._plain_text += text
        self._plain.update(Content(self._plain_text))


class AnswerMessage(Vertical):
    """Draws an assistant's `ItemView`; `extend` adds text that is drawn ten times a second."""

    DEFAULT_CSS = """
    AnswerMessage {
        height: auto; padding: 0 1 0 2;
        & .note { height: auto; color: $faint; display: none; }
        & .note.-shown { display: block; margin-bottom: 1; }
        & .note.-trouble { color: $warning; }
    }
    """

    def __init__(self, view: ItemView) -> None:
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
        self._body = AnswerBody(initial)
        self._open_fence = OpenFence()
        self._note = Static(markup=False, classes="note")

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._text

    @property
    def drawn(self) -> str:
        """The part of it that is drawn as Markdown."""
        return self._body.source

    @property
    def settled(self) -> bool:
        """Whether the answer has ended and all of it is drawn."""
        return self._view.done and self._timer is None

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield self._body
        yield self._open_fence
        yield self._note

    def on_mount(self) -> None:
        """Draw what the view holds, and begin to flush where more can come."""
        if self._view.done:
            self._show_note()
            return
        self._dirty = True
        self._timer = self.set_interval(FLUSH_INTERVAL_S, self._flush)

    def extend(self, text: str) -> None:
        """Add cleaned text; cheap, drawn at the next flush."""
        self._text += text
        pieces = self._splitter.feed(text)
        self._ready += pieces.markdown
        self._fence = pieces.open_fence
        self._dirty = True

    def finish(self, view: ItemView) -> None:
        """Draw the finished answer; its text is right whatever came before."""
        self._view = view
        if self._timer is not None:
            self._ready += self._splitter.end().markdown
            self._fence = ""
            self._dirty = True

    async def _flush(self) -> None:
        if not self._dirty or time.monotonic() < self._not_before:
            return
        started = time.monotonic()
        self._dirty = False
        ready, self._ready = self._ready, ""
        view = self._view
        with self.app.batch_update():
            if view.done and view.text != self._text:
                self._text = view.text
                await self._body.replace(view.text)
            elif ready:
                await self._body.append(ready)
            if self._fence:
                self._open_fence.show(self._fence.split("\n", 1)[1])
            self._open_fence.set_class(bool(self._fence), "-open")
            if view.done and not self._dirty:
                self._show_note()
                if self._timer is not None:
                    self._timer.stop()
                    self._timer = None
        self.call_after_refresh(self._rest, started)

    def _rest(self, started: float) -> None:
        # Where drawing is slow, keys come first: at most a third of the time goes into drawing answers.
        now = time.monotonic()
        self._not_before = now + 2 * (now - started) - FLUSH_INTERVAL_S

    def _show_note(self) -> None:
        self._note.update(Content(self._view.note))
        self._note.set_class(bool(self._view.note), "-shown")
        self._note.set_class(self._view.trouble, "-trouble")
