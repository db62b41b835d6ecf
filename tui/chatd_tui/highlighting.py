"""Colors of code: at once for a little of it, in a thread for more, remembered for what was colored lately."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from textual.content import Content
from textual.highlight import highlight

# Coloring takes about half a millisecond a line; more than this is colored in a thread, and too much never.
MAX_LINES_AT_ONCE = 16
MAX_CHARACTERS_AT_ONCE = 1500
MAX_CHARACTERS = 60_000


class Highlighter:
    """Colors code.

    Args:
        capacity: How many pieces of code are remembered.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._colored: OrderedDict[tuple[str, str], Content] = OrderedDict()
        self._wanted: list[tuple[str, str]] = []

    def __call__(self, code: str, language: str) -> Content:
        """Return the code, plain where its colors would take long; `color_wanted` then makes them."""
        key = (code, language)
        known = self._colored.get(key)
        if known is not None:
            self._colored.move_to_end(key)
            return known
        if len(code) > MAX_CHARACTERS or not language:
            return Content(code)
        if len(code) <= MAX_CHARACTERS_AT_ONCE and code.count("\n") < MAX_LINES_AT_ONCE:
            return self._remember(key, _color(code, language))
        self._wanted.append(key)
        return Content(code)

    async def color_wanted(self) -> bool:
        """Color in a thread what was given out plain; True if there was any."""
        wanted, self._wanted = list(dict.fromkeys(self._wanted)), []
        for key in wanted:
            self._remember(key, await asyncio.to_thread(_color, *key))
        return bool(wanted)

    @property
    def wants(self) -> bool:
        """Whether code was given out plain that can have colors."""
        return bool(self._wanted)

    def _remember(self, key: tuple[str, str], content: Content) -> Content:
        self._colored[key] = content
        while len(self._colored) > self._capacity:
            self._colored.popitem(last=False)
        return content


def _color(code: str, language: str) -> Content:
    return highlight(code, language=language)
