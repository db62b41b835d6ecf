"""The engine one step ahead, under everything at once: seeded runs with every invariant checked after every step.

The device is as late as it can be, so that what is given away too early is missing when a step runs, or as early, so
that what may be seen too early is there. Failed launches and steps that are too large are among the faults.
"""

import logging
from collections import Counter

import pytest

from chatd.testing.night import AHEAD, Run, simulate_run
from chatd.testing.simulation import SHAPES

# 10 shapes × 2 kinds of device × 3 seeds × 400 steps: 24,000 steps; by night as many as without it.
STEPS = 400


@pytest.fixture(autouse=True)
def quiet():
    """Failed steps are logged with their traceback, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mode", AHEAD[1:])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_invariant_holds_after_every_step_one_step_ahead(shape, mode):
    hashes = ("xxh3", "constant", "xxh3")
    runs = [Run(shape, hash_name, 5000 + 10 * shape + seed, STEPS, mode) for seed, hash_name in enumerate(hashes)]
    counts = sum((simulate_run(run) for run in runs), Counter())
    assert counts["launched ahead"] > STEPS
    for what in ("cached_tokens", "cancelled", "finished", "evicted", "forked", "verb release"):
        assert counts[what] > 5, f"{what} hardly happened: {counts}"
    assert counts["end failed"] > 0
    if SHAPES[shape].host_slots:
        for what in ("stored", "loaded"):
            assert counts[what] > 5, f"{what} hardly happened: {counts}"
