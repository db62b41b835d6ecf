"""What becomes of a text that the person copies: the terminal gets it, a file has it, and what is known is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from chatd.config import child_environment
from chatd_tui.clipboard import MAX_OSC52_BYTES, obstacle, save_copy, told
from chatd_tui.widgets.status import StatusView

if TYPE_CHECKING:
    from chatd_tui.app import ChatApp


class Copying:
    """Copies texts.

    Args:
        app: Whose terminal it is.
        folder: It keeps what was copied last.
    """

    def __init__(self, app: ChatApp, folder: Path) -> None:
        self._app = app
        self._folder = folder

    async def copy(self, what: str, text: str) -> None:
        """Copy a text and say what is known of that."""
        environment = child_environment()
        data = text.encode("utf-8", "replace")
        fits = len(data) <= MAX_OSC52_BYTES
        if fits:
            self._app.copy_to_clipboard(data.decode())
        path = await asyncio.to_thread(save_copy, text, self._folder)
        reason = await asyncio.to_thread(obstacle, environment) if fits else "too long for a terminal's clipboard"
        is_remote = bool(environment.get("SSH_CONNECTION"))
        self._app.chat.status = StatusView(*told(what, path, reason, is_remote=is_remote))
