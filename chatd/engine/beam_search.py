"""Which sequences a beam search keeps: log probabilities in, the next beams and the finished sequences out.

The rules are those of transformers' `generate(num_beams=…)`, in the same float32 arithmetic: the `width` best
sequences that go on are kept; one that ends is a result if it is among the `width` best continuations of its step, by
its score, the sum of its log probabilities over length ** penalty. Knows no requests, no blocks and no model.

Source: transformers `GenerationMixin._beam_search` (5.x).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chatd.engine.sampling import BeamSearch

Candidates = Sequence[tuple[int, float]]
"""(token id, log probability) pairs, likeliest first; of equal ones the lowest id first."""


class Child(NamedTuple):
    """A beam of the next step: the place of its parent among the beams, the token that it adds, and its sum."""

    parent: int
    token_id: int
    sum: np.float32


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A sequence that has ended.

    Attributes:
        ids: Of the answer.
        score: Its sum of log probabilities over length ** penalty, in float32.
        parent: The place, among the beams of the step in which it ended, of the one that it is but for its last id.
    """

    ids: tuple[int, ...]
    score: np.float32
    parent: int


def num_candidates(width: int, num_stop_ids: int) -> int:
    """Return how many continuations of each beam can matter: `width` that go on, and those that end."""
    return width + num_stop_ids


class BeamSearcher:
    """One search.

    Args:
        search: Width, penalty, and when to stop.
        stop_ids: A sequence ends with one of these.
        max_length: Or at this many tokens.

    Attributes:
        finished: The best sequences that have ended, best first; at most `width`.
        sums: Of the beams, as `advance` returned them.
    """

    def __init__(self, search: BeamSearch, stop_ids: Collection[int], max_length: int) -> None:
        self.finished: list[Finished] = []
        self.sums: list[np.float32] = [np.float32(0.0)]
        self._search = search
        self._stop_ids = frozenset(stop_ids)
        self._max_length = max_length

    def advance(self, answers: Sequence[Sequence[int]], candidates: Sequence[Candidates]) -> list[Child]:
        """Go one token on.

        Args:
            answers: What each beam has so far; all of one length.
            candidates: `num_candidates` continuations of each, or all there are. One that is forbidden, with a log
                probability of minus infinity, is passed over.

        Returns:
            The next beams, best first; none where the search is over.
        """
        width, penalty = self._search.width, self._search.length_penalty
        length = len(answers[0]) + 1
        continuations = [
            Child(place, token_id, total)
            for place, options in enumerate(candidates)
            for token_id, logprob in options
            if (total := self.sums[place] + np.float32(logprob)) != -np.inf
        ]
        # Equal ones stay in the order given, and are not told apart by their ids: in a replay these are other numbers.
        continuations.sort(key=lambda child: -child.sum)
        is_last = length >= self._max_length
        divisor = np.float32(length**penalty)
        children: list[Child] = []
        for rank, child in enumerate(continuations):
            if is_last or child.token_id in self._stop_ids:
                if rank < width:
                    ids = (*answers[child.parent], child.token_id)
                    self.finished.append(Finished(ids, child.sum / divisor, child.parent))
            elif len(children) < width:
                children.append(child)
        self.finished.sort(key=lambda sequence: -sequence.score)
        del self.finished[width:]
        if not children or self._is_settled(children[0].sum, length):
            children = []
        self.sums = [child.sum for child in children]
        return children

    def _is_settled(self, best: np.float32, length: int) -> bool:
        """Return whether nothing that goes on could become a result, as far as `early_stopping` wants to know."""
        search = self._search
        if len(self.finished) < search.width:
            return False
        if search.early_stopping is True:
            return True
        if search.early_stopping == "never" and search.length_penalty > 0.0:
            length = self._max_length
        return bool(best / np.float32(length**search.length_penalty) <= self.finished[-1].score)
