"""Tells the front why each request waits, and its place in its tenant's queue: a bounded number of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from chatd.engine.fairness import WaitingRequests
from chatd.engine.messages import Waiting, WaitReason
from chatd.engine.request import Request

MAX_LOOKED_AT = 512
"""Requests that are looked at for one call. Half of that is for the next ones of every queue; the rest goes round."""

_NUM_NEXT = 4


class Explanations:
    """What was told, and what is to be told.

    Args:
        waiting: The scheduler's.
    """

    def __init__(self, waiting: WaitingRequests) -> None:
        self._waiting = waiting
        self._round: Iterator[tuple[Request, int]] = iter(())

    def tell(self) -> list[Waiting]:
        """Return a message for each request whose place or reason has changed, of those that are looked at now."""
        messages: dict[Request, Waiting] = {}
        following = islice(self._waiting.next_ones(_NUM_NEXT), MAX_LOOKED_AT // 2)
        for request, position in chain(following, self._go_round()):
            why = _why(self._waiting, request)
            if request.is_told and request.told != (position, why):
                request.told = (position, why)
                messages[request] = Waiting(request.request_id, position, why)
        return list(messages.values())

    def _go_round(self) -> Iterator[tuple[Request, int]]:
        """Go on where the last call ended; not more than once round."""
        budget = min(MAX_LOOKED_AT // 2, len(self._waiting))
        for item in self._round:
            yield item
            budget -= 1
            if not budget:
                return
        self._round = self._waiting.positions()
        yield from islice(self._round, budget)


def explain_waiting(waiting: WaitingRequests) -> Iterator[tuple[Request, int, WaitReason]]:
    """Yield each waiting request that the front knows, with its place in its tenant's queue and why it waits."""
    for request, position in waiting.positions():
        if request.is_told:
            yield request, position, _why(waiting, request)


def _why(waiting: WaitingRequests, request: Request) -> WaitReason:
    """Return the reason; whoever stands behind waits for what the first of its tenant waits for."""
    if waiting.is_aside(request):
        return request.why
    head = waiting.head_of(request.tenant)
    return request.why if head is None else head.why
