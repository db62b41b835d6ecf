"""Type-ahead: what is typed is computed before it is sent, while the person has that turned on. Knows no connection."""

from __future__ import annotations

from collections.abc import Callable

from chatd.protocol import PrefillState
from chatd_tui.commands import parse
from chatd_tui.views import short_number

AFTER_S = 0.25
"""What is typed is told when no key was pressed for so long."""

MIN_CHARS = 8
"""Less than this is computed with the message."""


class TypingAhead:
    """Tells what is typed, and says how much of it is computed.

    Args:
        tell: Takes what is typed and how long to wait for more; None takes it back.
        show: Takes what stands at the input.

    Attributes:
        is_on: It was turned on.
    """

    def __init__(self, tell: Callable[[str | None, float], None], show: Callable[[str], None]) -> None:
        self.is_on = False
        self._tell = tell
        self._show = show
        self._is_told = False

    def turn(self, on: bool, text: str) -> None:
        """Turn it on with what is typed now, or off."""
        self.is_on = on
        self._show("type-ahead" if on else "")
        if on:
            self.changed(text)
        else:
            self._take_back(0.0)

    def changed(self, text: str) -> None:
        """Take what is typed now; commands are nobody else's business."""
        if not self.is_on:
            return
        message = parse(text)
        if isinstance(message, str) and len(message) >= MIN_CHARS:
            self._is_told = True
            self._tell(message, AFTER_S)
        else:
            self._take_back(AFTER_S)

    def show(self, state: PrefillState) -> None:
        """Say how much is computed."""
        if self.is_on:
            number = f"{short_number(state.tokens)} token{'' if state.tokens == 1 else 's'} ready"
            self._show(f"type-ahead · {number}" if state.computed and state.tokens else "type-ahead")

    def forget(self) -> None:
        """Begin anew in another conversation."""
        self._is_told = False
        if self.is_on:
            self._show("type-ahead")

    def _take_back(self, after_s: float) -> None:
        if self._is_told:
            self._is_told = False
            self._tell(None, after_s)
