"""How long a step will take, fitted to how long steps took.

`seconds = fixed + per_row · rows + per_pair · pairs`, where a row at position p reads p + 1 keys: so many pairs. The
model decides how large a prefill chunk may be; its parameters change at known steps only and are written to the
decision log, so a replay decides the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Seconds of one step, per row of the batch, and per (row, key) pair of attention."""

    fixed_s: float = 8e-3
    per_row_s: float = 2e-3
    per_pair_s: float = 4e-6

    def step_s(self, num_rows: int, num_pairs: int) -> float:
        """Return the predicted seconds of a step."""
        return self.fixed_s + self.per_row_s * num_rows + self.per_pair_s * num_pairs

    def rows_within(self, seconds: float, context: int) -> int:
        """Return how many rows after `context` tokens fit into `seconds`.

        Row i (from 0) costs `per_row + per_pair · (context + i + 1)`; the sum over n rows is a quadratic in n.
        """
        if seconds <= 0.0:
            return 0
        a = self.per_pair_s / 2
        b = self.per_row_s + self.per_pair_s * (context + 0.5)
        return int(2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds)))


GPU_COST = CostParameters(fixed_s=8e-3, per_row_s=5e-5, per_pair_s=2e-9)
"""Of steps on a GPU, until they were measured: a model of 8 billion weights on a card of 2 TB/s."""


def num_pairs(start: int, num_rows: int) -> int:
    """Return the (row, key) pairs of rows at positions `start` and on."""
    return num_rows * start + num_rows * (num_rows + 1) // 2


_NUM_FEATURES = 3
_OUTLIER_FACTOR = 3.0
# How strongly a fit is pulled to the one before it, in observations of the size of a whole step.
_PULL = 1e-2
# No parameter falls below this part of what it was at first: one that is 0 could never grow again.
_LEAST_OF_FIRST = 1e-3
_SWEEPS = 100


class CostModel:
    """Least squares over relative errors; older steps are forgotten, and what steps do not tell stays as it was.

    Args:
        parameters: Used until enough was seen.
        refit_steps: Observations between two changes of `parameters`.
        forgetting: The weight of an observation falls by this factor with each later one.
    """

    def __init__(self, parameters: CostParameters, *, refit_steps: int = 32, forgetting: float = 0.99) -> None:
        self.parameters = parameters
        self._first = (parameters.fixed_s, parameters.per_row_s, parameters.per_pair_s)
        self._refit_steps = refit_steps
        self._forgetting = forgetting
        self._num_observed = 0
        self._moments = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self._targets = [0.0] * _NUM_FEATURES

    def observe(self, num_rows: int, pairs: int, seconds: float) -> bool:
        """Count a step; return whether `parameters` changed with it. A time of 0 is not a measurement."""
        if not seconds > 0.0:
            return False
        expected = self.parameters.step_s(num_rows, pairs)
        # One stalled step must not change what all later ones may be; a lasting change still gets through.
        seconds = min(max(seconds, expected / _OUTLIER_FACTOR), expected * _OUTLIER_FACTOR)
        # Divided by the seconds, so that short steps count as much as long ones.
        features = (1.0 / seconds, num_rows / seconds, pairs / seconds)
        for i in range(_NUM_FEATURES):
            row = self._moments[i]
            for j in range(_NUM_FEATURES):
                row[j] = row[j] * self._forgetting + features[i] * features[j]
            self._targets[i] = self._targets[i] * self._forgetting + features[i]
        self._num_observed += 1
        if self._num_observed % self._refit_steps:
            return False
        return self._refit()

    def _refit(self) -> bool:
        """Solve in units of the current parameters: there the solution is near 1 and the system well scaled."""
        unit = (self.parameters.fixed_s, self.parameters.per_row_s, self.parameters.per_pair_s)
        matrix = [[self._moments[i][j] * unit[i] * unit[j] for j in range(_NUM_FEATURES)] for i in range(_NUM_FEATURES)]
        target = [self._targets[i] * unit[i] for i in range(_NUM_FEATURES)]
        for i in range(_NUM_FEATURES):
            matrix[i][i] += _PULL
            target[i] += _PULL
        least = [_LEAST_OF_FIRST * self._first[i] / unit[i] for i in range(_NUM_FEATURES)]
        solution = _solve(matrix, target, least)
        parameters = CostParameters(*(solution[i] * unit[i] for i in range(_NUM_FEATURES)))
        changed = parameters != self.parameters
        self.parameters = parameters
        return changed


def _solve(matrix: list[list[float]], target: list[float], least: list[float]) -> list[float]:
    """Minimize the quadratic form by cyclic coordinate descent, no coordinate below its least."""
    solution = [1.0] * _NUM_FEATURES
    for _ in range(_SWEEPS):
        for i in range(_NUM_FEATURES):
            rest = sum(matrix[i][j] * solution[j] for j in range(_NUM_FEATURES) if j != i)
            solution[i] = max(least[i], (target[i] - rest) / matrix[i][i])
    return solution


# Blocks that one request may have loaded in one step, however fast that is said to be.
_MAX_LOADS = 1024


class StepRoom:
    """What is left of a step for prefill: rows, and seconds where somebody waits for its next token.

    Args:
        parameters: Predict what rows cost.
        num_rows: At most so many.
        seconds: At most so long; infinite where nobody decodes.
        least: Rows that the first chunk may have whatever they cost, so that a prefill never stands still.
    """

    def __init__(self, parameters: CostParameters, num_rows: int, seconds: float, least: int) -> None:
        self._parameters = parameters
        self._num_rows = num_rows
        self._seconds = seconds
        self._least = least

    @property
    def is_full(self) -> bool:
        """No more rows fit, whoever asks."""
        return self._num_rows <= 0 or (self._least <= 0 and self._seconds <= self._parameters.per_row_s)

    def rows_after(self, context: int) -> int:
        """Return how many rows of a request that has computed `context` tokens fit."""
        if self._seconds == math.inf:
            return self._num_rows
        return min(self._num_rows, max(self._least, self._parameters.rows_within(self._seconds, context)))

    def rows_of(self, context: int, num_wanted: int, most: int | None) -> int:
        """Return how many of the rows that a request wants it gets, at least one; `most` is its class's limit."""
        num_rows = min(num_wanted, self.rows_after(context))
        return max(1, num_rows if most is None else min(num_rows, most))

    def loads_within(self, fixed_s: float, per_block_s: float) -> int:
        """Return how many blocks fit that are loaded in place of being computed, at least one."""
        if self._seconds == math.inf or per_block_s <= 0.0:
            return _MAX_LOADS
        return max(1, min(_MAX_LOADS, int((self._seconds - fixed_s) / per_block_s)))

    def take_loads(self, seconds: float) -> None:
        """Count blocks that are loaded."""
        self._seconds -= seconds
        self._least = 0

    def take(self, context: int, num_rows: int) -> None:
        """Count a chunk."""
        self._num_rows -= num_rows
        self._seconds -= self._parameters.step_s(num_rows, num_pairs(context, num_rows)) - self._parameters.fixed_s
        self._least = 0
