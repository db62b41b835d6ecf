"""Long texts that stand in the input as one mark each, so that the input stays as fast as it is with a short one."""

from __future__ import annotations

import re
from collections import OrderedDict

SHOWN_CHARS = 10_000
"""A longer text stands as a mark; the input lays out a text of this length in a few milliseconds."""
MAX_HELD = 8

_MARK = re.compile(r"\[text \d+: [\d,]+ characters in [\d,]+ lines?\]")


class Pasted:
    """The texts of the marks that may still be sent: the last ones."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._count = 0

    def mark(self, text: str) -> str:
        """Keep a text and return what stands for it."""
        lines = text.count("\n") + 1
        self._count += 1
        mark = f"[text {self._count}: {len(text):,} characters in {lines:,} line{'' if lines == 1 else 's'}]"
        self._texts[mark] = text
        while len(self._texts) > MAX_HELD:
            self._texts.popitem(last=False)
        return mark

    def whole(self, shown: str) -> str:
        """Return what is sent for what stands in the input."""
        if not self._texts or "[text " not in shown:
            return shown
        return _MARK.sub(lambda mark: self._texts.get(mark[0], mark[0]), shown)

    def shown(self, message: str) -> str:
        """Return what stands in the input for a message that is put there."""
        if len(message) <= SHOWN_CHARS:
            return message
        for mark, text in self._texts.items():
            message = message.replace(text, mark)
        return message if len(message) <= SHOWN_CHARS else self.mark(message)
