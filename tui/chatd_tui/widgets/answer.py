"""One answer as it streams: Markdown for what is whole, plain text for a code fence that is still open."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Markdown, Static

from chatd_tui.markdown_stream import FenceSplitter, make_parser
from chatd_tui.messages import LinkChosen
from chatd_tui.views import ItemView

FLUSH_INTERVAL_S = 0.1
# Markdown of a line or a paragraph is parsed anew with each piece; beyond this an answer goes on as plain text.
MAX_MARKDOWN = 200_000


class AnswerMarkdown(Markdown):
    """Markdown of remote text: no HTML, and links are only told of."""

    def __init__(self, text: str) -> None:
        super().__init__(text, parser_factory=make_parser, open_links=False)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Tell what was clicked; nothing opens by itself."""
        event.stop()
        self.post_message(LinkChosen(event.href))


class AnswerMessage(Vertical):
    """Draws an assistant's `ItemView`; `extend` adds text that is drawn ten times a second."""

    DEFAULT_CSS = """
    AnswerMessage {
        height: auto; margin: 0 0 1 0; padding: 0 1 0 2;
        & AnswerMarkdown { padding: 0; margin: 0; height: auto; background: transparent; }
        & AnswerMarkdown > *:last-child { margin-bottom: 0; }
        & MarkdownFence { margin: 1 0; background: $surface; }
        & .open-fence { height: auto; margin: 1 0; padding: 1 2; background: $surface; display: none; }
        & .open-fence.-open { display: block; }
        & .note { height: auto; color: $faint; display: none; }
        & .note.-shown { display: block; margin-top: 1; }
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
        self._length = 0
        self._timer: Timer | None = None
        if view.done:
            self._initial = view.text
        else:
            pieces = self._splitter.feed(view.text)
            self._initial, self._fence = pieces.markdown, pieces.open_fence
        self._plain_from = len(self._initial) > MAX_MARKDOWN
        self._length = len(self._initial)

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._text

    def compose(self) -> ComposeResult:
        """Lay out."""
        if self._plain_from:
            self._plain = self._initial
            yield Static(Content(self._initial), markup=False, classes="plain")
        else:
            yield AnswerMarkdown(self._initial)
        yield Static(markup=False, classes="open-fence")
        yield Static(markup=False, classes="note")

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
        if self._timer is None:
            return
        self._ready += self._splitter.end().markdown
        self._fence = ""
        self._dirty = True

    async def _flush(self) -> None:
        if not self._dirty:
            return
        self._dirty = False
        ready, self._ready = self._ready, ""
        view = self._view
        fence = self.query_one(".open-fence", Static)
        with self.app.batch_update():
            if view.done and view.text != self._text:
                self._text, ready = view.text, ""
                await self._replace(view.text)
            elif ready:
                await self._append(ready)
            if self._fence:
                fence.update(Content(self._fence.split("\n", 1)[1]))
            fence.set_class(bool(self._fence), "-open")
            if view.done and not self._dirty:
                self._show_note()
                if self._timer is not None:
                    self._timer.stop()
                    self._timer = None

    async def _append(self, text: str) -> None:
        self._length += len(text)
        if not self._plain_from and self._length <= MAX_MARKDOWN:
            await self.query_one(AnswerMarkdown).append(text)
            return
        if not self._plain_from:
            self._plain_from = True
            self._plain = ""
            await self.mount(Static(markup=False, classes="plain"), after=self.query_one(AnswerMarkdown))
        self._plain += text
        self.query_one(".plain", Static).update(Content(self._plain))

    async def _replace(self, text: str) -> None:
        if self._plain_from or len(text) > MAX_MARKDOWN:
            await self.query(".plain").remove()
            self._plain_from = False
            self._length = 0
            await self.query(AnswerMarkdown).remove()
            await self.mount(AnswerMarkdown(""), before=0)
            await self._append(text)
            return
        self._length = len(text)
        await self.query_one(AnswerMarkdown).update(text)

    def _show_note(self) -> None:
        note = self.query_one(".note", Static)
        note.update(Content(self._view.note))
        note.set_class(bool(self._view.note), "-shown")
        note.set_class(self._view.trouble, "-trouble")
