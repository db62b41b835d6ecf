"""The pool's last minute: what the sparklines draw, and the moments that one can go back to. No widgets here."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from chatd.client import PoolState
from chatd.protocol import PoolTotals

WINDOW_S = 60
"""What a sparkline shows, in columns of a second."""

MOMENT_INTERVAL_S = 0.25
MAX_MOMENTS = 240
"""Moments that are kept, no closer to each other than that: a minute of a busy pool, hours of a quiet one."""

MAX_ROWS = 50_000
"""Rows of sessions in all moments together: with many sessions fewer moments are kept, so that memory is bounded."""

_SLACK_S = 0.05
"""Frames that come a little early are moments of their own."""


@dataclass(frozen=True)
class PoolMoment:
    """The pool at one moment.

    Attributes:
        state: As the daemon told it.
        at_s: When it came, in the page's own seconds.
        wall_s: Likewise, in Unix seconds.
    """

    state: PoolState
    at_s: float
    wall_s: float


@dataclass(frozen=True)
class PoolPast:
    """The last minute in seconds, oldest first: the greatest value of each, and what was counted in it.

    `wanted_again` is empty where the daemon does not tell it.
    """

    occupancy: tuple[float, ...]
    tok_s: tuple[float, ...]
    queue: tuple[float, ...]
    evictions: tuple[float, ...]
    wanted_again: tuple[float, ...]


class PoolHistory:
    """Keeps the last moments, bounded, and makes the last minute of them."""

    def __init__(self) -> None:
        self.moments: deque[PoolMoment] = deque(maxlen=MAX_MOMENTS)
        self._totals: deque[tuple[float, PoolTotals]] = deque()
        self._latest: PoolMoment | None = None

    @property
    def latest(self) -> PoolMoment | None:
        """The last one, None before the first."""
        return self._latest

    def add(self, moment: PoolMoment) -> None:
        """Take what the daemon says now."""
        self._latest = moment
        kept = self.moments
        if len(kept) > 1 and kept[-1].at_s - kept[-2].at_s < MOMENT_INTERVAL_S - _SLACK_S:
            kept.pop()  # Too close to the one before it, and not the last one any more.
        kept.append(moment)
        num_rows = sum(len(other.state.sessions or ()) for other in kept)
        while num_rows > MAX_ROWS and len(kept) > 1:
            num_rows -= len(kept.popleft().state.sessions or ())
        self._totals.append((moment.at_s, moment.state.totals))
        # As far back as the minute before the oldest moment one can go to; a value holds until the next one.
        first_s = self.moments[0].at_s - WINDOW_S
        while len(self._totals) > 1 and self._totals[1][0] <= first_s:
            self._totals.popleft()

    def past(self, now_s: float) -> PoolPast:
        """Return the minute that ends at `now_s`."""
        return PoolPast(
            self._greatest(now_s, lambda totals: totals.active / max(1, totals.blocks)),
            self._greatest(now_s, lambda totals: totals.tok_s),
            self._greatest(now_s, lambda totals: float(totals.waiting)),
            self._counted(now_s, lambda totals: totals.evictions),
            self._counted(now_s, lambda totals: totals.wanted_again),
        )

    def _greatest(self, now_s: float, value_of: Callable[[PoolTotals], float]) -> tuple[float, ...]:
        """Return the greatest value of each second; one that no frame came in has that of the last frame before."""
        greatest = [0.0] * WINDOW_S
        held, held_until = 0.0, 0
        for at_s, totals in self._totals:
            column = _column(at_s, now_s)
            if column >= WINDOW_S:
                break
            value = value_of(totals)
            for passed in range(held_until, max(held_until, min(column, WINDOW_S))):
                greatest[passed] = max(greatest[passed], held)
            if column >= 0:
                greatest[column] = max(greatest[column], value)
                held_until = column + 1
            held = value
        for passed in range(held_until, WINDOW_S):
            greatest[passed] = held
        return tuple(greatest)

    def _counted(self, now_s: float, counter_of: Callable[[PoolTotals], int | None]) -> tuple[float, ...]:
        """Return by how much a counter grew in each second; one that fell is another daemon's, which began anew."""
        counted = [0.0] * WINDOW_S
        before: int | None = None
        is_told = False
        for at_s, totals in self._totals:
            counter = counter_of(totals)
            column = _column(at_s, now_s)
            if column >= WINDOW_S:
                break
            if counter is not None:
                is_told = True
                if before is not None and column >= 0:
                    counted[column] += max(0, counter - before)
            before = counter
        return tuple(counted) if is_told else ()


def _column(at_s: float, now_s: float) -> int:
    """Return which second of the last minute a moment is in: below 0 is before it, `WINDOW_S` or more after it."""
    return WINDOW_S - 1 - math.floor(now_s - at_s)


class PoolPlayer:
    """What the page shows of the history: the latest moment, or one that it was paused at.

    Args:
        clock: The page's seconds.
        wall_clock: Unix seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.history = PoolHistory()
        self.clock = clock
        self._wall_clock = wall_clock
        self._paused: PoolMoment | None = None

    @property
    def is_paused(self) -> bool:
        """Whether what is shown stays as it is."""
        return self._paused is not None

    @property
    def shown(self) -> PoolMoment | None:
        """What to draw; None before the first frame."""
        return self._paused or self.history.latest

    @property
    def elapsed_s(self) -> float:
        """Seconds since what is shown was told; 0 in a pause, which shows how it was."""
        latest = self.history.latest
        return 0.0 if self._paused is not None or latest is None else max(0.0, self.clock() - latest.at_s)

    @property
    def past(self) -> PoolPast:
        """The minute before what is shown; without a pause it goes on although nothing comes."""
        return self.history.past(self._paused.at_s if self._paused is not None else self.clock())

    def add(self, state: PoolState, now_s: float) -> None:
        """Take what the daemon says now, paused or not."""
        self.history.add(PoolMoment(state, now_s, self._wall_clock()))

    def toggle(self) -> None:
        """Pause at the latest moment, or go on."""
        self._paused = None if self._paused is not None else self.history.latest

    def step(self, moments: int) -> None:
        """Go back (negative) or on through the moments that are kept; from the live page that pauses it first."""
        kept = self.history.moments
        if not kept:
            return
        if self._paused is None:
            self._paused = kept[-1]
            if moments > 0:
                return
        place = self._place(self._paused) + moments
        self._paused = kept[max(0, min(len(kept) - 1, place))]

    @property
    def position(self) -> tuple[int, int]:
        """Which of the kept moments is shown, from 1, and how many there are; 0 where it is kept no more."""
        kept = self.history.moments
        if self._paused is None or not kept:
            return len(kept), len(kept)
        return self._place(self._paused) + 1, len(kept)

    def words(self) -> str:
        """Say that the page is paused, and at which moment; "" where it is not."""
        if self._paused is None:
            return ""
        ago_s = max(0.0, self.clock() - self._paused.at_s)
        place, number = self.position
        at = time.strftime("%H:%M:%S", time.localtime(self._paused.wall_s))
        return f"PAUSED at {at}, {ago_s:.0f} s ago, step {self._paused.state.step} ({place}/{number})"

    def _place(self, moment: PoolMoment) -> int:
        """Return a moment's place among the kept ones, that of the last one before it, or -1."""
        place = -1
        for index, kept in enumerate(self.history.moments):
            if kept.at_s > moment.at_s:
                break
            place = index
        return place
