"""Keys that are typed behind one that gives the keyboard away reach what has it then, in their order."""

from __future__ import annotations

from collections import deque
from typing import Any

from textual import events
from textual.app import App
from textual.dom import DOMNode
from textual.message_pump import MessagePump

PASSES = 4
"""A key, what it presses, what that chooses, and what that is made known as: each goes the way from a widget up."""

PATIENCE_S = 0.25
"""What takes longer over a key gets the next one all the same."""


class KeysInOrder(App[Any], inherit_bindings=False):
    """Gives one key at a time to all but what `stays`.

    Textual sends each key to whatever has the keyboard when it arrives. What is typed right behind an Enter or Esc that
    closes a page would so go to the page, and be lost with it; what is typed behind a Tab, to where that leads from.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: deque[events.Key | events.Paste] = deque()
        self._num_given = 0
        self._is_waiting = False

    def stays(self, widget: DOMNode) -> bool:
        """Whether a widget gets keys as they come, which is faster, and passes those on that are another's by then."""
        return False

    async def on_event(self, event: events.Event) -> None:
        """Hold what is typed until the key before it was taken."""
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        elif self._is_waiting:
            self._held.append(event)
        else:
            await self._give(event)

    async def _give(self, event: events.Key | events.Paste) -> None:
        target = self.focused or self.screen
        await super().on_event(event)
        if not self.stays(target):
            self._is_waiting = True
            self._num_given += 1
            self.set_timer(PATIENCE_S, lambda given=self._num_given: self._go_on(given))
            self._follow(list(target.ancestors_with_self), 0, PASSES, self._num_given)

    def _follow(self, way: list[MessagePump], at: int, passes: int, given: int) -> None:
        """Go behind the key through the queues of all whom it may concern; those that close meanwhile are left out."""
        if at == len(way):
            at, passes = 0, passes - 1
        if not passes:
            self.call_later(self._go_on, given)
        elif not way[at].call_later(self._follow, way, at + 1, passes, given):
            self._follow(way, at + 1, passes, given)

    async def _go_on(self, given: int) -> None:
        if given != self._num_given:
            return
        self._is_waiting = False
        while self._held and not self._is_waiting:
            await self._give(self._held.popleft())
