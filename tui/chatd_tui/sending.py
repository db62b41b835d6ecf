"""What becomes of a message that was typed: the files that it names, the question about them, and the way out."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chatd.errors import ChatdError
from chatd_tui import status_text
from chatd_tui.attachments import Attachment, attachments, with_attachments
from chatd_tui.background import run_beside
from chatd_tui.link import not_connected
from chatd_tui.widgets.composer import too_long
from chatd_tui.widgets.status import StatusView

if TYPE_CHECKING:
    from chatd_tui.app import ChatApp


class Sending:
    """Sends messages, and says above the input why one is not sent; that one stays there.

    Args:
        app: Whose conversation and input they are.
    """

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    async def send(self, text: str, editing: str | None) -> None:
        """Send a message, or another version of the message `editing`; asks first where it names files."""
        app = self._app
        if app.conversation.busy:
            stops = f"{app.keymap.way('stop')} stops it, then send"
            hint = stops if app.context.connected else "it goes on once there is a connection"
            app.chat.status = StatusView("warning", "an answer is in progress", hint)
            self._give_back(text, editing)
            return
        if app.link.role == "observer":
            app.chat.status = status_text.WATCHING
            self._give_back(text, editing)
            return
        try:
            self._check_length(text)
            files = await asyncio.to_thread(attachments, text, Path()) if "@" in text else []
            if files:
                self._frame_limit_bytes()
        except ChatdError as error:
            app.show_error(error)
            self._give_back(text, editing)
            return
        if files:
            self._offer_to_attach(text, editing, files)
        else:
            self._say(text, editing)

    def _offer_to_attach(self, text: str, editing: str | None, files: list[Attachment]) -> None:
        """Show which files would be sent: what names them may have been pasted."""

        def attach() -> None:
            run_beside(self._app, partial(self._send_with, text, editing, files), group="commands")

        names = "\n".join(f"{file.name} ({file.size_bytes} bytes)" for file in files)
        self._app.ask(
            "Send the text of this with the message?", names, "send", attach, lambda: self._give_back(text, editing)
        )

    async def _send_with(self, text: str, editing: str | None, files: list[Attachment]) -> None:
        try:
            whole = await asyncio.to_thread(with_attachments, text, files, self._frame_limit_bytes())
        except ChatdError as error:
            self._app.show_error(error)
            self._give_back(text, editing)
        else:
            self._say(whole, editing)

    def _give_back(self, text: str, editing: str | None) -> None:
        """Put a message that is not sent back into the input; an edited one is there still."""
        if editing is None:
            self._app.chat.composer.take_back(text)

    def _frame_limit_bytes(self) -> int:
        """Return how much a message may have, which only a daemon can say.

        Raises:
            InvalidRequest: There is none yet.
        """
        hello = self._app.link.hello
        if hello is None:
            raise not_connected()
        return hello.limits.frame_bytes

    def _check_length(self, text: str) -> None:
        """Refuse what no frame can hold, before the input is emptied; the client counts the frame itself."""
        size_bytes, limit_bytes = len(text.encode("utf-8", "replace")), self._app.chat.composer.max_bytes
        if size_bytes > limit_bytes:
            raise too_long("the message", size_bytes, limit_bytes)

    def _say(self, text: str, editing: str | None) -> None:
        app = self._app
        app.chat.status = StatusView("busy", "sending")
        app.chat.transcript.select(None)
        if editing is None:
            app.link.send(text)
        else:
            app.chat.composer.end_edit()
            run_beside(app, partial(self._send_edit, editing, text), group="commands")

    async def _send_edit(self, item: str, text: str) -> None:
        try:
            await self._app.link.edit(item, text)
        except ChatdError as error:
            self._app.show_error(error)
            self._app.chat.composer.begin_edit(item, text)
