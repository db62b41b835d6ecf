"""Counts of what sessions did, and whoever wants to be told. Knows no metrics library."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from chatd.protocol import Timings, Usage
from chatd.sessions.conversation import Owner


class TurnObserver(Protocol):
    """Is told of every turn as it happens, on the event loop; must neither block nor raise."""

    def turn_started(self, owner: Owner) -> None:
        """Note that a turn was submitted."""
        ...

    def first_token(self, owner: Owner, ttft_s: float) -> None:
        """Note the time from the message to the first token."""
        ...

    def next_tokens(self, owner: Owner, num_tokens: int, gap_s: float) -> None:
        """Note tokens after the first and the time since those before."""
        ...

    def turn_ended(self, owner: Owner, reason: str, usage: Usage | None, timings: Timings | None) -> None:
        """Note the end of a turn; `reason` is "failed" where there is no usage."""
        ...


@dataclass(slots=True)
class SessionStats:
    """Counters since start.

    Attributes:
        turns_started: Turns that the engine was given.
        turns_ended: By reason, "failed" included.
        prompt_tokens: Of ended turns.
        cached_tokens: Of those, found computed.
        output_tokens: Of ended turns.
        deltas: Pieces of text sent on.
        lease_misses: Logs that were sent again as a whole.
        known_hits: Stateless requests that found a known history.
        known_misses: Those that did not, of the ones that have an answer in their history.
    """

    turns_started: int = 0
    turns_ended: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    deltas: int = 0
    lease_misses: int = 0
    known_hits: int = 0
    known_misses: int = 0
