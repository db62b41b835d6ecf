"""Beams as requests of one group: they survive what requests survive, and end together."""

import random

import pytest

from chatd.engine.messages import (
    Cancel,
    Done,
    Finish,
    FinishReason,
    Fork,
    LeaseId,
    LeaseTier,
    PoolFrame,
    Preempted,
    Release,
    Tokens,
    Trim,
    WatchPool,
)
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch
from chatd.testing.engine import EngineHarness, chains_of, engine_config, find_beams, sampling_params

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
STOPS = tuple(range(0, 97, 9))


def search_of(width=4, early_stopping=False, penalty=1.0, num_returned=None):
    return BeamSearch(
        width=width, num_returned=num_returned or width, length_penalty=penalty, early_stopping=early_stopping
    )


def found(engine, request=1):
    return [(tuple(one.ids), one.score) for one in engine.beams[request]]


def start(engine, request=1, prompt=PROMPT, search=None, **params):
    sampling = sampling_params(**({"max_tokens": 12, "stop_token_ids": STOPS} | params))
    engine.submit(request, prompt, params=sampling, beam=search or search_of())
    return sampling


def expected(engine, prompt=PROMPT, search=None, params=None):
    return find_beams(engine.runner, prompt, search or search_of(), params, engine.config.max_model_len)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_finds_what_it_finds_without_an_engine(length, early_stopping):
    engine = EngineHarness()
    prompt, search = [1 + i % 7 for i in range(length)], search_of(early_stopping=early_stopping)
    params = start(engine, prompt=prompt, search=search)
    engine.run()
    assert found(engine) == expected(engine, prompt, search, params)
    assert engine.outputs == {}
    done = engine.done[1]
    assert done.num_output_tokens == len(engine.beams[1][0].ids)
    assert done.reason is engine.beams[1][0].reason


def test_only_the_head_is_spoken_of():
    engine = EngineHarness(engine_config(num_blocks=14, max_num_seqs=6))
    engine.send(WatchPool(0.001, with_leases=True))
    start(engine)
    for number in range(2, 6):
        engine.submit(number, [number] * 9, params=sampling_params(20))
    for _ in range(60):
        engine.clock.advance(0.01)
        engine.step()
    for message in engine.messages:
        if isinstance(message, Done | Preempted):
            assert message.request > 0
        elif isinstance(message, LeaseTier):
            assert message.lease > 0
        elif isinstance(message, PoolFrame):
            assert all(row.lease > 0 for row in message.leases)
        elif isinstance(message, Tokens):
            assert all(delta.request > 1 for delta in message.deltas)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 20])
def test_the_best_sequence_stays_in_the_lease(max_tokens):
    engine = EngineHarness()
    start(engine, max_tokens=max_tokens)
    engine.run()
    lease = engine.core.leases.get(1)
    ids = [*PROMPT, *engine.beams[1][0].ids]
    assert list(lease.token_ids) == ids
    assert lease.table.num_computed_tokens == len(ids) - 1
    slots = [engine.runner.chains[lease.table.block_ids[i // 4] * 4 + i % 4] for i in range(len(ids) - 1)]
    assert slots == chains_of(ids)[:-1]
    rows = engine.runner.num_rows
    engine.submit(2, [8, 8], lease=1, base_len=len(ids), params=sampling_params(1))
    engine.run()
    assert engine.runner.num_rows == rows + 3  # the last id of the answer and the new ones


def test_beams_share_the_prompt_by_reference():
    engine = EngineHarness()
    prompt = [1 + i % 7 for i in range(41)]
    start(engine, prompt=prompt, max_tokens=20, stop_token_ids=())
    engine.step(8)
    leases = list(engine.core.leases)
    assert len(leases) == 4
    assert len({tuple(lease.table.block_ids[:10]) for lease in leases}) == 1
    held = sum(len(lease.table.block_ids) for lease in leases)
    assert engine.core.pool.num_active < held / 2


def test_each_beam_is_a_row_and_the_prompt_is_computed_once():
    engine = EngineHarness()
    start(engine, max_tokens=6, stop_token_ids=())
    engine.run()
    assert engine.runner.num_rows == len(PROMPT) + 5 * 4


def test_every_row_is_charged():
    engine = EngineHarness()
    start(engine, max_tokens=6, stop_token_ids=())
    engine.run()
    assert engine.core.scheduler.counters.counter("acme") == len(PROMPT) + 2.0 * (1 + 5 * 4)


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9, 12])
def test_a_search_in_too_small_a_pool_finds_the_same(num_blocks):
    engine = EngineHarness(engine_config(num_blocks=num_blocks, max_model_len=20))
    params = start(engine, max_tokens=10, stop_token_ids=())
    engine.run()
    assert found(engine) == expected(engine, params=params)


def test_beams_that_wait_give_way_where_nothing_else_can_run():
    config = engine_config(num_blocks=13, max_model_len=40, max_num_seqs=8)
    engine = EngineHarness(config)
    params = [start(engine, number, [number] * 9, max_tokens=24, stop_token_ids=()) for number in (1, 2)]
    engine.run(max_steps=5000)
    for number in (1, 2):
        assert found(engine, number) == expected(engine, [number] * 9, params=params[number - 1])
    assert engine.core.scheduler.num_preemptions > 0


def test_searches_wait_for_all_their_slots():
    engine = EngineHarness(engine_config(max_num_seqs=6))
    wanted = {number: start(engine, number, [number] * 7) for number in range(1, 5)}
    engine.submit(9, PROMPT, params=sampling_params(30))
    widest = 0
    while engine.core.has_work:
        engine.step()
        widest = max(widest, len(engine.core.scheduler.running))
    assert widest <= 6
    for number, params in wanted.items():
        assert found(engine, number) == expected(engine, [number] * 7, params=params)


@pytest.mark.parametrize("seed", range(12))
def test_searches_among_others_under_pressure_find_the_same(seed):
    rng = random.Random(seed)
    config = engine_config(num_blocks=rng.choice((16, 20, 30)), max_model_len=48, max_num_seqs=8)
    engine = EngineHarness(config)
    wanted = {}
    for number in range(1, 7):
        prompt = [rng.randrange(1, 97) for _ in range(rng.randrange(1, 14))]
        if number % 2:
            search = search_of(rng.randint(1, 5), rng.choice((True, False, "never")), rng.choice((0.0, 1.0, -0.5)))
            params = start(engine, number, prompt, search, max_tokens=rng.randint(1, 16), min_tokens=0)
            wanted[number] = (prompt, search, params)
        else:
            engine.submit(number, prompt, params=sampling_params(rng.randint(1, 25)))
        if number == 4:
            engine.runner.raise_next = True
        engine.step(rng.randrange(4))
    engine.run(max_steps=5000)
    for number, (prompt, search, params) in wanted.items():
        assert found(engine, number) == expected(engine, prompt, search, params)
    for number in range(1, 7):
        engine.send(Release(LeaseId(number)))
    assert engine.core.pool.num_active == 0
    assert len(engine.core.leases) == 0


@pytest.mark.parametrize("when", range(9))
@pytest.mark.parametrize("verb", [Cancel, Release, Finish])
def test_an_ended_search_gives_all_back_at_once(when, verb):
    engine = EngineHarness(engine_config(num_blocks=11, max_num_batched_tokens=8, max_model_len=40))
    start(engine, max_tokens=20, stop_token_ids=())
    engine.step(when)
    if verb is Cancel:
        engine.send(Cancel(RequestId(1)))
        assert engine.done[1].reason is FinishReason.CANCELLED
        assert list(engine.core.leases.get(1).token_ids) == PROMPT
        engine.send(Release(LeaseId(1)))
    elif verb is Finish:
        engine.send(Finish(RequestId(1), LeaseId(1), 11))
        assert list(engine.core.leases.get(1).token_ids) == PROMPT
        engine.send(Release(LeaseId(1)))
    else:
        engine.send(Release(LeaseId(1)))
    engine.core.check_invariants()
    assert engine.core.pool.num_active == 0
    assert len(engine.core.leases) == 0
    assert not engine.core.has_work
    assert engine.beams == {}


@pytest.mark.parametrize("when", [1, 3, 6])
def test_logits_of_one_beam_that_are_not_finite_fail_the_search(when):
    engine = EngineHarness()
    start(engine, max_tokens=20, stop_token_ids=())
    engine.submit(2, [7] * 5, params=sampling_params(12))
    engine.step(when)
    beams = [number for number in engine.core.scheduler.requests if number != 2]
    engine.runner.not_finite.add(beams[-1])
    engine.step(2)
    assert engine.done[1].reason is FinishReason.FAILED
    assert engine.done[1].error_code == "engine_error"
    assert engine.core.pool.num_cached == 0, "KV of a search that failed can be found"
    engine.run()
    assert len(engine.outputs[2]) == 12
    assert list(engine.core.leases.get(1).token_ids) == PROMPT


def test_a_search_of_which_several_beams_fail_at_once_ends_once():
    engine = EngineHarness()
    start(engine, max_tokens=20, stop_token_ids=())
    engine.step(4)
    engine.runner.not_finite.update(engine.core.scheduler.requests)
    engine.step()
    assert engine.done[1].reason is FinishReason.FAILED
    assert not engine.core.has_work
    assert len(engine.core.leases) == 1


def test_a_step_that_fails_once_changes_nothing():
    engine = EngineHarness()
    params = start(engine)
    while engine.core.has_work:
        engine.runner.raise_next = engine.core.scheduler.step % 3 == 1
        engine.step()
    assert found(engine) == expected(engine, params=params)


def test_a_beam_that_the_model_cannot_compute_fails_the_search_alone():
    engine = EngineHarness()
    start(engine, max_tokens=20, stop_token_ids=())
    engine.submit(2, [7] * 5, params=sampling_params(12))
    engine.step(3)
    engine.runner.failing.add(RequestId(-2))
    engine.run()
    assert engine.done[1].reason is FinishReason.FAILED
    assert len(engine.outputs[2]) == 12
    assert len(engine.core.leases) == 2


def test_a_search_without_leases_for_its_beams_fails_and_says_so():
    engine = EngineHarness(engine_config(max_leases=4))
    for number in (2, 3):
        engine.submit(number, [number] * 5, params=sampling_params(60))
    start(engine)
    engine.step(8)
    assert engine.done[1].error_code == "unavailable"
    assert len(engine.core.leases) == 3


@pytest.mark.parametrize("which", ["sample", "first"])
def test_a_search_can_share_a_prompt_with_samples(which):
    engine = EngineHarness()
    first = {"beam": search_of()} if which == "first" else {}
    second = {"beam": search_of()} if which == "sample" else {}
    params = sampling_params(12, stop_token_ids=STOPS)
    engine.submit(1, PROMPT, params=params, **first)
    engine.submit(2, PROMPT, params=params, sample_of=RequestId(1), **second)
    engine.step(2)
    assert engine.runner.num_rows <= len(PROMPT) + 1 + 4
    engine.run()
    searched = 1 if which == "first" else 2
    assert found(engine, searched) == expected(engine, params=params)


@pytest.mark.parametrize(
    ("search", "params", "named"),
    [
        ({"width": 0}, {}, "beam_width is 0, the range is 1 to 8"),
        ({"width": 9}, {}, "beam_width is 9"),
        ({"width": 4, "num_returned": 5}, {}, "num_returned is 5, the range is 1 to 4"),
        ({"width": 4, "length_penalty": float("nan")}, {}, "length_penalty is nan"),
        ({"width": 4}, {"temperature": 0.5}, "temperature is 0.5, a beam search takes 0.0 only"),
        ({"width": 4}, {"presence_penalty": 0.5}, "presence_penalty"),
        ({"width": 4}, {"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"width": 4}, {"logprobs": 1}, "logprobs"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(search, params, named):
    engine = EngineHarness(engine_config(vocab_size=97))
    engine.submit(1, PROMPT, params=sampling_params(**params), beam=BeamSearch(**search))
    assert engine.done[1].error_code == "invalid_request"
    assert named in engine.done[1].error_message
    assert len(engine.core.leases) == 0


def test_the_front_cannot_name_a_beam():
    engine = EngineHarness()
    params = start(engine)
    engine.step(3)
    for verb in (
        Cancel(RequestId(-1)),
        Finish(RequestId(-1), LeaseId(-1), 3),
        Trim(LeaseId(-2), 1),
        Release(LeaseId(-2)),
        Fork(LeaseId(-2), LeaseId(50), 3),
        Fork(LeaseId(1), LeaseId(-50), 3),
    ):
        engine.send(verb)
    engine.submit(-1, [1, 2])
    engine.submit(7, [1, 2], lease=-2)
    assert engine.done[7].error_code == "invalid_request"
    engine.run()
    assert found(engine) == expected(engine, params=params)
    assert len(engine.core.leases) == 1
