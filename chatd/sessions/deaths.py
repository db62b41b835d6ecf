"""Which answers go on after an engine's death, which of them alone, and which fails: counted by the front, on a turn.

Every answer that was running is a suspect, since the engine cannot say what ended it. A suspect is computed alone until
it is past its place (`engine.suspects`), so the second death with no progress between is its own doing. One that has
got on since then is counted anew: what kills engines must not take those with it who only happened to run.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DEATHS = 2
"""In so many deaths, without getting on between them, an answer may have been running."""

NUM_PASSING = 2
"""Tokens that a suspect draws before it is computed beside others again."""


@dataclass(slots=True)
class DeathCount:
    """The deaths that one answer was running at.

    Attributes:
        num_deaths: Since it last got on.
        num_answered: Tokens of the answer at the last of them.
    """

    num_deaths: int = 0
    num_answered: int = 0

    def on_death(self, num_answered: int, *, was_running: bool) -> bool:
        """Count a death of the engine; return whether the answer may go on.

        Args:
            num_answered: Tokens of the answer that the front has.
            was_running: The engine had said `Started` of it, and nothing of its end. One that waited is no suspect.
        """
        if self.has_passed(num_answered):
            self.num_deaths = 0
        if was_running:
            self.num_deaths += 1
            self.num_answered = num_answered
        return self.num_deaths < MAX_DEATHS

    def has_passed(self, num_answered: int) -> bool:
        """Return whether an answer of so many tokens is past the place where it was at the last death."""
        return num_answered >= self.num_answered + NUM_PASSING

    def is_suspect(self, num_answered: int) -> bool:
        """Return whether an answer that is submitted now, with so many tokens, is to be computed alone."""
        return self.num_deaths > 0 and not self.has_passed(num_answered)
