"""Sessions and their clients under everything at once, on the real engine core, checked after every action.

The simulation (`chatd.testing.session_simulation`) says what happens and what is compared.
"""

import asyncio
import logging
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from chatd.testing.night import ACTIONS as ACTIONS_A_SEED
from chatd.testing.night import SESSION_SEEDS, all_session_runs, describe, simulate_all
from chatd.testing.session_simulation import VERBS, SessionSimulation, simulate_sessions

SEEDS, ACTIONS = 21, 400


@pytest.fixture(autouse=True)
def quiet():
    """Failed steps are logged with their traceback, many times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("replay_events", [3, 40, 1000])
def test_every_client_shows_the_same_transcript_whatever_happens(replay_events):
    counts: Counter[str] = Counter()
    for seed in range(SEEDS // 3):
        num_blocks = 50 if seed % 2 else 100
        counts += simulate_sessions(1000 + seed, ACTIONS, num_blocks=num_blocks, replay_events=replay_events)
    # A run in which nothing happens proves nothing.
    for verb in VERBS:
        assert counts[f"session {verb}"] > 10, f"{verb} hardly happened: {counts}"
    assert counts["rolled back"] > 10, f"hardly a turn was rolled back: {counts}"
    for reason in ("stop", "stop_string", "max_output_tokens", "cancelled", "failed"):
        assert counts[f"end {reason}"] > 2, f"hardly an answer ended by {reason}: {counts}"


@pytest.mark.night
def test_every_client_shows_the_same_transcript_all_night():
    counts, found = simulate_all(list(all_session_runs(SESSION_SEEDS, ACTIONS_A_SEED)), len(os.sched_getaffinity(0)))
    assert not found, describe(found)
    assert counts["session step"] > 10_000


def test_a_seed_does_the_same_again():
    assert simulate_sessions(5, 200) == simulate_sessions(5, 200)


class Sessions(RuleBasedStateMachine):
    """The same actions, chosen by hypothesis, which shrinks what it finds."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()

    @initialize(replay_events=st.sampled_from((2, 5, 100)), num_blocks=st.sampled_from((45, 60, 200)))
    def begin(self, replay_events, num_blocks):
        async def make():
            return SessionSimulation(0, num_blocks=num_blocks, replay_events=replay_events)

        self.simulation = self.runner.run(make())

    @rule(verb=st.sampled_from(VERBS), random=st.randoms(use_true_random=False))
    def act(self, verb, random):
        self.simulation.rng = random
        self.runner.run(self.simulation.do(verb))

    def teardown(self):
        if hasattr(self, "simulation"):
            self.runner.run(self.simulation.finish())
        self.runner.close()


Sessions.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSessions = Sessions.TestCase
