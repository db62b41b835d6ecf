"""Stop strings in a stream of text: what may be sent, what is held back, and where the answer ends.

The stop string that is *completed* first ends the answer; of two that are completed by the same character the longer
one counts. So the outcome does not depend on how the text was cut into pieces. One automaton per stop string
(Knuth, Morris, Pratt) reads each character once.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where an answer ends by a stop string.

    Args:
        stop_string: The one that was completed.
        num_tokens: Tokens of the answer up to and including the one that completed it.
        num_chars: Characters of the answer before the stop string.
    """

    stop_string: str
    num_tokens: int
    num_chars: int


class _Automaton:
    """Follows how much of one stop string the text read so far ends with."""

    __slots__ = ("failure", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self.failure = [0] * (len(pattern) + 1)
        length = 0
        for end in range(2, len(pattern) + 1):
            while length > 0 and pattern[length] != pattern[end - 1]:
                length = self.failure[length]
            if pattern[length] == pattern[end - 1]:
                length += 1
            self.failure[end] = length

    def read(self, char: str) -> bool:
        """Take one character; return whether it completes the stop string."""
        state = self.state
        while state > 0 and self.pattern[state] != char:
            state = self.failure[state]
        if self.pattern[state] == char:
            state += 1
        self.state = state
        return state == len(self.pattern)


class StopStrings:
    """Watches an answer's text for stop strings and never lets a part of a matched one through.

    Args:
        stop_strings: None of them empty. With none at all, text passes unchanged.

    Raises:
        ValueError: A stop string is empty.
    """

    __slots__ = ("_automatons", "_first_chars", "_held", "_num_sent", "_num_tokens", "match")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if "" in stop_strings:
            raise ValueError("a stop string is empty")
        unique = sorted(set(stop_strings), key=len, reverse=True)
        self._automatons = [_Automaton(pattern) for pattern in unique]
        self._first_chars = frozenset(pattern[0] for pattern in unique)
        self._held = ""
        self._num_sent = 0
        self._num_tokens = 0
        self.match: StopMatch | None = None
        """Set once a stop string is complete; nothing is sent after it."""

    @property
    def held(self) -> str:
        """The text that is held back because it may be the start of a stop string."""
        return self._held

    def push(self, text: str, num_tokens: int = 1) -> str:
        """Return what can be sent now that `num_tokens` more tokens have added `text` to the answer.

        A match names the end of this push as its token, so push token by token where that matters.
        """
        if self.match is not None:
            return ""
        self._num_tokens += num_tokens
        if not self._held and self._first_chars.isdisjoint(text):
            self._num_sent += len(text)
            return text
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            completed = None
            for automaton in self._automatons:
                if automaton.read(char) and completed is None:
                    completed = automaton.pattern
            if completed is not None:
                sent = pending[: end - len(completed)]
                self._held = ""
                self._num_sent += len(sent)
                self.match = StopMatch(completed, self._num_tokens, self._num_sent)
                return sent
        num_held = max((automaton.state for automaton in self._automatons), default=0)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        self._num_sent += cut
        return pending[:cut]

    def flush(self) -> str:
        """Return the text still held back, once the answer has ended without a stop string."""
        held, self._held = self._held, ""
        self._num_sent += len(held)
        return held
