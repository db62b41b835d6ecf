"""The engine under everything at once: seeded runs with every invariant checked after every step.

The witness (`chatd.testing.witness`) keeps what should be true; the runner's slots know where they came from. Under a
hash and under a constant, in pools from roomy to hopeless.
"""

import logging
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from chatd.engine.fairness import VirtualCounters
from chatd.engine.messages import RequestClass
from chatd.engine.sampling import SamplingParams
from chatd.testing.constant_hash import constant_hash
from chatd.testing.night import HASHES, Run, all_runs, describe, simulate_all, simulate_run
from chatd.testing.night import SEEDS as NIGHT_SEEDS
from chatd.testing.night import STEPS as NIGHT_STEPS
from chatd.testing.simulation import SHAPES, VERBS, Simulation, simulate
from chatd.testing.witness import Witness
from chatd.testing.witnessed_sessions import STOP_ID, VOCAB_SIZE, Shape

# 10 shapes × 2 hashes × 6 seeds × 800 steps: 96,000 steps; two million of them by night.
SEEDS, STEPS = 6, 800


@pytest.fixture(autouse=True)
def quiet():
    """Failed steps are logged with their traceback, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_invariant_holds_after_every_step(shape, hash_name):
    runs = [Run(shape, hash_name, 1000 * shape + seed, STEPS) for seed in range(SEEDS)]
    counts = sum((simulate_run(run) for run in runs), Counter())
    assert counts["steps"] >= SEEDS * STEPS
    # A run in which nothing happens proves nothing.
    for verb in VERBS:
        assert counts[f"verb {verb}"] > 10, f"{verb} was hardly asked for: {counts}"
    for what in (
        *("cached_tokens", "forked", "cancelled", "finished", "trimmed busy"),
        *("end failed", "preempted", "evicted", "joined", "end stop", "sampled", "searched"),
    ):
        assert counts[what] > 10, f"{what} hardly happened: {counts}"
    if SHAPES[shape].host_slots:
        for what in ("stored", "loaded", "swapped"):
            assert counts[what] > 10, f"{what} hardly happened: {counts}"
        assert counts["moves alone"] > 0, "no step only moved blocks"
    if SHAPES[shape].disk_blocks:
        assert counts["from disk"] > 10, f"hardly anything came back from the disk: {counts}"


# Two tenants that always wait, of weights one and four, and whatever else is asked for between.
BACKLOG = Shape(
    num_blocks=60,
    max_model_len=40,
    max_num_seqs=3,
    max_sessions=8,
    max_leases=30,
    weights=(1.0, 4.0, 1.0),
    floors=(0, 0, 0),
    public=0.0,
    backlog=3,
)


@pytest.mark.parametrize("seed", range(3))
def test_tenants_that_wait_all_the_time_are_served_by_their_weights(seed):
    run = simulate(seed, STEPS, shape=BACKLOG)
    assert run.gap.num_compared >= STEPS
    assert run.gap.largest < 0.5


def test_where_nothing_is_charged_the_gap_is_beyond_its_bound(monkeypatch):
    monkeypatch.setattr(VirtualCounters, "charge", lambda *_: None)
    with pytest.raises(AssertionError, match="I15"):
        simulate(0, STEPS, shape=BACKLOG)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_gives_the_same_log_and_a_constant_hash_too(seed):
    runs = [
        simulate(seed, 300, shape=SHAPES[seed], keep_log=True, hash_function=hash_function)
        for hash_function in (HASHES["xxh3"], HASHES["xxh3"], HASHES["constant"])
    ]
    assert runs[0].log == runs[1].log == runs[2].log
    assert runs[0].counts == runs[1].counts == runs[2].counts
    assert len(runs[0].log) > 300


def answers(shape, **options):
    """Run fixed turns with no cancels and no faults, and return all ids of all sessions."""
    run = Simulation(5, shape, faults=False, **options)
    sessions = [run.open_session(("acme", "blue")[number % 2]) for number in range(8)]
    for turn in range(3):
        for number, session in enumerate(sessions):
            run.submit(session, len(session.token_ids), [1 + number % 3] * (5 + turn), SamplingParams(max_tokens=7))
        while run.core.has_work:
            run.step()
    return [session.token_ids for session in sessions], run.core.scheduler.num_preemptions


def test_caching_chunking_and_preemption_change_no_answer():
    tenants = {"tenants": ("acme", "blue"), "floors": (0, 0), "weights": (1.0, 1.0), "max_leases": 20}
    roomy = Shape(num_blocks=2000, max_num_batched_tokens=500, max_num_seqs=16, max_model_len=64, **tenants)
    expected, none = answers(roomy)
    tight, some = answers(Shape(num_blocks=17, max_num_batched_tokens=6, max_num_seqs=6, max_model_len=64, **tenants))
    uncached, _ = answers(roomy, hash_function=_never_twice())
    assert expected == tight == uncached
    assert none == 0
    assert some > 0


def _never_twice():
    number = iter(range(10**9))
    return lambda data: next(number).to_bytes(8, "big")


@pytest.mark.night
def test_every_invariant_holds_all_night():
    runs = list(all_runs(NIGHT_SEEDS, NIGHT_STEPS))
    counts, found = simulate_all(runs, len(os.sched_getaffinity(0)))
    assert not found, describe(found)
    assert len(runs) >= 1000
    assert counts["steps"] >= 2_000_000


class Conversations(RuleBasedStateMachine):
    """The same witness, asked by hypothesis, which shrinks what it finds."""

    sessions = Bundle("sessions")

    @rule(target=sessions, tenant=st.sampled_from(("acme", "blue", "")))
    def open_session(self, tenant):
        return self.witness.open_session(tenant)

    def __init__(self):
        super().__init__()
        tenants = {"tenants": ("acme", "blue"), "floors": (3, 0), "weights": (1.0, 2.0)}
        self.witness = Witness(
            Shape(
                num_blocks=14,
                max_model_len=40,
                max_num_seqs=3,
                max_num_batched_tokens=10,
                host_slots=7,
                disk_blocks=12,
                preemption="swap",
                **tenants,
            ),
            constant_hash,
        )

    @rule(
        session=sessions,
        keep=st.integers(0, 40),
        new_ids=st.lists(st.integers(0, 2), min_size=1, max_size=13),
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        request_class=st.sampled_from(RequestClass),
    )
    def turn(self, session, keep, new_ids, max_tokens, stops, request_class):
        if session.job is None and session in self.witness.sessions:
            params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_ID,) if stops else ())
            self.witness.submit(session, min(keep, len(session.token_ids)), new_ids, params, request_class)

    @rule(target=sessions, session=sessions, at=st.integers(0, 40))
    def fork(self, session, at):
        if session not in self.witness.sessions or len(self.witness.sessions) >= 9:
            return multiple()
        return self.witness.fork(session, min(at, len(session.token_ids)))

    @rule(session=sessions, length=st.integers(0, 40))
    def trim(self, session, length):
        if session in self.witness.sessions:
            self.witness.trim(session, length)

    @rule(session=sessions)
    def cancel(self, session):
        if session.job is not None:
            self.witness.cancel(session.job)

    @rule(session=sessions, tokens=st.integers(0, 12))
    def finish(self, session, tokens):
        if session.job is not None:
            job = session.job
            self.witness.finish_at(job, min(job.num_prompt + tokens, len(session.token_ids)))

    @rule(session=consumes(sessions))
    def release(self, session):
        if session in self.witness.sessions:
            self.witness.release(session)

    @precondition(lambda self: self.witness.jobs)
    @rule(which=st.integers(0, 100), not_finite=st.booleans())
    def break_a_request(self, which, not_finite):
        job = list(self.witness.jobs.values())[which % len(self.witness.jobs)]
        job.may_fail = True
        runner = self.witness.runner
        (runner.not_finite if not_finite else runner.failing).add(job.request)

    @rule(fault=st.sampled_from(("fails_writes", "fails_reads", "is_paused")), damaged=st.integers(0, 11))
    def break_the_disk(self, fault, damaged):
        disk = self.witness.disk
        setattr(disk, fault, not getattr(disk, fault))
        disk.damaged.update(disk.digests[damaged : damaged + 1])

    @rule(steps=st.integers(1, 6))
    def run_steps(self, steps):
        for _ in range(steps):
            self.witness.step()

    @invariant()
    def the_engine_is_whole(self):
        self.witness.core.check_invariants()

    def teardown(self):
        self.witness.drain()


Conversations.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestConversations = Conversations.TestCase
assert VOCAB_SIZE > 2
