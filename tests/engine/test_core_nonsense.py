"""A front that talks nonsense: any message about anything at any time changes no other request and breaks nothing."""

import logging
import random
from collections import Counter

import pytest

from chatd.engine.messages import (
    Cancel,
    Done,
    Finish,
    Fork,
    LeaseLost,
    Release,
    RequestClass,
    Retain,
    Submit,
    Trim,
    WatchPool,
)
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.testing.engine import EngineHarness, engine_config

LEASES = [-1, 0, 1, 2, 3, 4, 2**40]
LENGTHS = [-(2**40), -1, 0, 1, 3, 4, 5, 9, 16, 30, 2**40]
IDS = [[], [1], [2] * 4, [3] * 9, [5] * 40, [5] * 300, [-1], [96, 97], [2**31], [1, 2**62]]
PARAMS = [
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=7),
    SamplingParams(max_tokens=60, min_tokens=3),
    SamplingParams(max_tokens=0),
    SamplingParams(max_tokens=-5),
    SamplingParams(max_tokens=2, top_p=float("nan")),
]
BEAMS = [
    None,
    None,
    BeamSearch(width=3, num_returned=2),
    BeamSearch(width=2, early_stopping="never", length_penalty=-3.0),
    BeamSearch(width=2**40),
    BeamSearch(width=3, num_returned=-1),
    BeamSearch(width=3, length_penalty=float("nan")),
]


def nonsense(rng, request):
    """Return any message, with numbers that are mostly wrong."""
    lease, length = rng.choice(LEASES), rng.choice(LENGTHS)
    about = rng.choice([request, request - 1, request - 2, -7])
    return rng.choice(
        [
            Submit(
                request,
                lease,
                rng.choice(["acme", "blue", ""]),
                length,
                rng.choice(IDS),
                rng.choice(PARAMS),
                rng.choice(list(RequestClass)),
                rng.random() < 0.7,
                sample_of=rng.choice([None, about]),
                beam=rng.choice(BEAMS),
            ),
            Submit(
                request,
                rng.randrange(5),
                "acme",
                0,
                [rng.randrange(3)] * rng.randrange(1, 30),
                PARAMS[1],
                sample_of=rng.choice([None, about]),
                beam=rng.choice(BEAMS),
            ),
            Cancel(about),
            Finish(about, lease, length),
            Fork(lease, rng.choice(LEASES), length),
            Trim(lease, length),
            Release(lease),
            Retain(lease, rng.random() < 0.5),
            WatchPool(rng.choice([0.0, -1.0, 1e-9]), rng.random() < 0.5, rng.random() < 0.5),
        ]
    )


@pytest.mark.parametrize("num_blocks", [8, 30, 200])
@pytest.mark.parametrize("seed", range(8))
def test_nonsense_ends_each_request_once_and_breaks_no_invariant(seed, num_blocks, caplog):
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(seed)
    engine = EngineHarness(
        engine_config(num_blocks=num_blocks, max_model_len=64, max_num_seqs=4, max_leases=6, max_waiting=5)
    )
    submitted = set()
    for request in range(300):
        message = nonsense(rng, request)
        if isinstance(message, Submit):
            submitted.add(message.request)
        engine.send(message)
        engine.core.check_invariants()
        if rng.random() < 0.5:
            engine.step()
            engine.core.check_invariants()
    engine.run()
    engine.core.check_invariants()
    ends = Counter(m.request for m in engine.messages if isinstance(m, Done | LeaseLost))
    assert set(ends) == submitted
    assert set(ends.values()) == {1}
    for lease in LEASES:
        engine.send(Release(lease))
    assert len(engine.core.leases) == 0
    assert engine.core.pool.num_active == 0


def test_64_requests_for_8_blocks_all_end():
    engine = EngineHarness(
        engine_config(num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=64, max_num_batched_tokens=64)
    )
    for request in range(64):
        engine.send(Submit(request, request, f"t{request % 5}", 0, [request % 97] * 9, SamplingParams(max_tokens=23)))
    engine.run()
    assert len(engine.done) == 64
    assert {done.num_output_tokens for done in engine.done.values()} == {23}
    engine.core.check_invariants()


def test_a_request_that_fills_the_context_and_the_pool_to_the_last_slot_ends_by_itself():
    engine = EngineHarness(engine_config(num_blocks=8, block_size=4, max_model_len=32))
    engine.send(Submit(1, 1, "acme", 0, [1] * 31, SamplingParams(max_tokens=9)))
    engine.run()
    assert (engine.done[1].reason, engine.done[1].num_output_tokens) == ("context", 1)
    engine.send(Submit(2, 1, "acme", 32, [], SamplingParams(max_tokens=9)))
    engine.send(Submit(3, 2, "acme", 0, [2] * 32, SamplingParams(max_tokens=9)))
    engine.run()
    assert {engine.done[2].error_code, engine.done[3].error_code} == {"context_length_exceeded"}
