"""Requests that are computed alone: each was running when an engine died, and one of them may have been the reason.

A suspect has whole steps to itself, one suspect after another, until it has got past the place where it was: then two
tokens of its answer are drawn, and the row of the first one is computed. Its steps and those of all others take turns,
so neither waits for the other's end. If an engine dies once more in a suspect's step, nobody else was in it.

Suspects that wait are set aside: they are no candidates for a step with others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatd.engine.request import Request, RequestStatus

if TYPE_CHECKING:
    from chatd.engine.block_moves import BlockMoves
    from chatd.engine.joins import Joins
    from chatd.engine.samples import Samples


class Suspects:
    """The suspects of an engine, in the order in which they came.

    Args:
        samples: Tell who waits for another one's prompt.
        joins: Tell who waits for another one's prefix.
        moves: Tell who waits for the disk.
    """

    def __init__(self, samples: Samples, joins: Joins, moves: BlockMoves) -> None:
        self._samples = samples
        self._joins = joins
        self._moves = moves
        self._requests: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def open(self, request: Request) -> None:
        """Take in a request that was just queued, where it is one."""
        if request.is_suspect:
            self._requests.append(request)

    def advance(self, request: Request, num_computed: int) -> None:
        """Note how far a request is computed; one that has got past its place goes on beside the others."""
        if request.is_suspect and num_computed > request.num_submitted_tokens:
            request.is_suspect = False
            self._requests.remove(request)

    def close(self, request: Request) -> None:
        """Forget a request that has ended."""
        if request.is_suspect:
            self._requests.remove(request)

    def next(self) -> Request | None:
        """Return the first one that waits for nothing but a step."""
        return next((request for request in self._requests if not self.is_held_up(request)), None)

    def next_waiting(self) -> Request | None:
        """As `next`, of those that do not run."""
        waiting = (request for request in self._requests if request.status is RequestStatus.WAITING)
        return next((request for request in waiting if not self.is_held_up(request)), None)

    def is_held_up(self, request: Request) -> bool:
        """Return whether a suspect waits for another request, or for the disk, before it can have a step."""
        return (
            request.is_stalled
            or self._samples.is_waiting(request)
            or self._joins.has_joined(request)
            or self._moves.is_restoring(request)
        )
