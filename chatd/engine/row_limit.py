"""How many rows a step may have, where the device has too little memory for as many as it was given."""

from __future__ import annotations

_GROW_AFTER_STEPS = 32
_GROW_PART = 4


class RowLimit:
    """Halves after a step that was too large, and grows back by a quarter for every few that were not.

    Args:
        most: Rows of a step that is known to be possible, or hoped to be.

    Attributes:
        limit: Rows of the next step.
    """

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._num_good = 0

    @property
    def is_cut(self) -> bool:
        """Whether it is below what was hoped for."""
        return self.limit < self._most

    def cut(self, num_rows: int) -> None:
        """Allow half of a step that was too large."""
        self.limit = max(1, min(self.limit, num_rows // 2))
        self._num_good = 0

    def succeed(self) -> None:
        """Count a step that was not too large."""
        if self.is_cut:
            self._num_good += 1
            if self._num_good == _GROW_AFTER_STEPS:
                self._num_good = 0
                self.limit = min(self._most, self.limit + -(-self.limit // _GROW_PART))
