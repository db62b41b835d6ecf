"""Which messages of a long conversation have widgets: those near what is seen. Knows heights, and no widgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def covering(
    count: int, at: int, at_y: int, top: int, bottom: int, height: Callable[[int], int]
) -> tuple[int, int, int]:
    """Choose the messages that cover some lines.

    Args:
        count: How many messages there are.
        at: One of them, or `count` for the end.
        at_y: The line at which it begins, not below `bottom`.
        top: First line to cover.
        bottom: The line after the last one to cover.
        height: Of a message, in lines; asked only of the chosen.

    Returns:
        The first message, the one after the last, and the line at which the first begins.
    """
    first, first_y = at, at_y
    while first > 0 and first_y > top:
        first -= 1
        first_y -= height(first)
    end, y = at, at_y
    while end < count and y < bottom:
        y += height(end)
        end += 1
    return first, end, first_y


def message_at(heights: Sequence[int], lines: int, y: int) -> tuple[int, int]:
    """Find the message at a line of a stretch whose height is estimated.

    Args:
        heights: Of the stretch's messages, as estimated; at least one.
        lines: The stretch's height as it is drawn.
        y: The line, from the stretch's first one.

    Returns:
        The message's place in the stretch, and the line at which it begins.
    """
    scale = lines / max(1, sum(heights))
    begins = [round(scale * begin) for begin in accumulate(heights[:-1], initial=0)]
    place = max((place for place, begin in enumerate(begins) if begin <= y), default=0)
    return place, begins[place]


def estimated_height(text: str, width: int) -> int:
    """Return about how many lines a message takes, its margin included; cheap, and never less than two."""
    return 2 + text.count("\n") + len(text) // max(1, width)
