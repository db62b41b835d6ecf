"""How one direction of the disk tier fares with the system: what to tell of it, and when to stop for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable

MAX_FAILURES = 8
"""After so many failures in a row nothing is tried for a while."""

PAUSE_S = 30.0
"""That while."""

_logger = logging.getLogger("chatd.disk_tier")


class IoHealth:
    """Tells of the first failure of a row, and pauses after too many.

    Args:
        direction: "writes" or "reads".
        clock: Seconds.
    """

    def __init__(self, direction: str, clock: Callable[[], float]) -> None:
        self._direction = direction
        self._clock = clock
        self._failures = 0
        self._has_told = False
        self._paused_until: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be tried now."""
        return self._paused_until is not None and self._clock() < self._paused_until

    def note(self, error: OSError | None) -> str:
        """Note how it went, and return what the system said; "" where all is well."""
        if error is None:
            if self._has_told:
                _logger.info("disk_tier.recovered", extra={"fields": {"direction": self._direction}})
            self._failures, self._has_told, self._paused_until = 0, False, None
            return ""
        why = error.strerror or str(error)
        self._failures += 1
        if self._failures % MAX_FAILURES == 0:
            self._paused_until = self._clock() + PAUSE_S
        if self._failures in (1, MAX_FAILURES):
            event = "disk_tier.failed" if self._failures == 1 else "disk_tier.paused"
            _logger.warning(event, extra={"fields": {"direction": self._direction, "why": why}})
            self._has_told = True
        return why
