"""What lies over the conversation, and closes once."""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen, Screen, ScreenResultType


class Page(Screen[ScreenResultType]):
    """Covers the conversation until it is dismissed.

    Textual takes the topmost screen away whoever asks for it. Two keys that come together, of a hurried person or on a
    slow line, would so close the page and then what is below it.
    """

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        """Close this page; does nothing where it is closed already, or where something lies over it."""
        return super().dismiss(result) if self.is_active else AwaitComplete()


class Dialog(ModalScreen[ScreenResultType], Page[ScreenResultType]):
    """Lies over the conversation, which can be seen around it, until it is dismissed."""
