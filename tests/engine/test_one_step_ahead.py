"""One step ahead: what a plan in flight cannot know, what it keeps, and what becomes of it where something ends."""

import logging
import os
import random
import socket
from types import SimpleNamespace

import pytest

from chatd.engine import process
from chatd.engine.messages import (
    Cancel,
    Done,
    Finish,
    FinishReason,
    Fork,
    LeaseId,
    Prefill,
    Release,
    Tokens,
    Trim,
)
from chatd.engine.options import EXIT_DEVICE_FAULT
from chatd.engine.pipe import EnginePipe
from chatd.engine.pipeline import MAX_LONE_FAILURES
from chatd.engine.plan import PENDING_TOKEN, DeviceFault, RequestId
from chatd.engine.pulse import create_page
from chatd.engine.request import RequestStatus
from chatd.engine.row_limit import RowLimit
from chatd.engine.sampling import BeamSearch
from chatd.errors import ConfigError
from chatd.testing.engine import EngineHarness, ProvenanceRunner, engine_config, sampling_params
from chatd.testing.pipelined_runner import PipelinedProvenanceRunner


def ahead(*, is_eager: bool = False, **config) -> EngineHarness:
    engine = EngineHarness(engine_config(steps_in_flight=2, **config), runner_class=PipelinedProvenanceRunner)
    engine.runner.is_eager = is_eager
    return engine


def in_flight(engine: EngineHarness):
    """Return the plan that was launched and not waited for."""
    (step,) = engine.runner.launched
    return step.plan


def num_held(engine: EngineHarness) -> int:
    """Return the blocks that somebody holds, once nothing is in flight."""
    while engine.core.has_work:
        engine.step()
    return engine.core.pool.num_active


@pytest.fixture
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# What is planned.


def test_the_next_step_is_launched_before_a_result_is_asked_for():
    engine = ahead()
    engine.submit(1, [1, 2, 3])
    said = engine.step()
    assert [delta.ids for m in said if isinstance(m, Tokens) for delta in m.deltas] == [engine.outputs[1]]
    (chunk,) = in_flight(engine).chunks
    assert (chunk.start, chunk.token_ids, chunk.sample.output_position) == (3, [PENDING_TOKEN], 1)
    engine.step()
    assert engine.runner.num_ahead == 2


def test_an_answer_has_no_row_that_its_length_makes_needless():
    engine = ahead()
    engine.generate(1, [1, 2, 3], params=sampling_params(6))
    assert len(engine.outputs[1]) == 6
    assert engine.runner.num_rows == 3 + 5


def test_an_answer_has_no_row_beyond_the_context():
    engine = ahead(max_model_len=12)
    engine.generate(1, [1, 2, 3], params=sampling_params(100))
    assert engine.done[1].reason is FinishReason.CONTEXT
    assert engine.runner.num_rows == 11


def test_a_prompt_goes_on_one_step_ahead_in_chunks_with_nothing_pending():
    engine = ahead(max_num_batched_tokens=8)
    engine.submit(1, range(20))
    engine.step()
    (chunk,) = in_flight(engine).chunks
    assert (chunk.start, chunk.token_ids) == (8, list(range(8, 16)))
    assert [m.done for m in engine.messages if isinstance(m, Prefill)] == [8]


def test_a_request_that_only_computes_its_prompt_has_no_row_after_it():
    engine = ahead()
    engine.submit(1, range(9), compute_only=True)
    engine.run()
    assert engine.done[1].reason is FinishReason.COMPUTED
    assert engine.runner.num_rows == 9


def test_beams_wait_for_their_candidates():
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(6), beam=BeamSearch(width=3, num_returned=3))
    engine.submit(2, [4, 5, 6], params=sampling_params(12))
    engine.run()
    plain = EngineHarness()
    plain.submit(1, [1, 2, 3], params=sampling_params(6), beam=BeamSearch(width=3, num_returned=3))
    plain.run()
    assert engine.beams[1] == plain.beams[1]
    assert engine.runner.num_pending > 5


def test_a_draw_knows_its_number_and_what_min_tokens_still_forbids():
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(9, stop_token_ids=(50,), min_tokens=2))
    engine.step()
    specs = [in_flight(engine).chunks[0].sample]
    engine.step()
    specs.append(in_flight(engine).chunks[0].sample)
    assert [(spec.output_position, spec.stop_token_ids) for spec in specs] == [(1, (50,)), (2, ())]


def test_the_history_of_a_penalty_has_no_pending_token():
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(9, presence_penalty=0.5))
    engine.step(2)
    spec = in_flight(engine).chunks[0].sample
    # The one that was pending then has been drawn since.
    assert (list(spec.prompt_ids), list(spec.output_ids)) == ([1, 2, 3], engine.outputs[1][:-1])
    assert spec.output_position == len(engine.outputs[1])


def test_a_prefix_in_flight_is_found_by_nobody():
    engine = ahead(max_num_batched_tokens=8)
    engine.submit(1, range(30))
    engine.step()  # 0 to 8 is committed, 8 to 16 in flight.
    engine.submit(2, range(30), tenant="acme")
    lease = engine.core.leases.get(2)
    assert len(engine.core.kv.get_computed_blocks(lease.table, lease.token_ids)) == 2
    engine.run()
    assert engine.outputs[1] == engine.outputs[2]


def test_steps_in_flight_are_one_or_two():
    with pytest.raises(ConfigError, match="steps_in_flight is 3, it is 1 or 2"):
        engine_config(steps_in_flight=3)


def test_a_runner_of_one_step_at_a_time_is_refused():
    with pytest.raises(AssertionError, match="ProvenanceRunner does not run two steps at a time"):
        EngineHarness(engine_config(steps_in_flight=2), runner_class=ProvenanceRunner)


# The same answers.


def answers(config, seed, **options):
    """Return what requests of all kinds are answered, in an engine whose pool is too small for all of them."""
    rng = random.Random(seed)
    engine = EngineHarness(engine_config(**config), **options)
    if isinstance(engine.runner, PipelinedProvenanceRunner):
        engine.runner.is_eager = bool(seed % 2)
    engine.runner.answer_ids = range(20)
    systems = [[rng.randrange(20) for _ in range(9)] for _ in range(2)]
    for request in range(24):
        prompt = rng.choice(systems) + [rng.randrange(20) for _ in range(rng.randrange(12))]
        params = sampling_params(rng.choice((1, 2, 7, 30)), stop_token_ids=(3,), min_tokens=rng.choice((0, 2)))
        more = {"beam": BeamSearch(width=2)} if rng.random() < 0.1 else {}
        engine.submit(request, prompt, tenant=rng.choice(("acme", "blue")), params=params, **more)
        if not more and rng.random() < 0.2:
            engine.submit(100 + request, prompt, tenant="acme", params=params, sample_of=RequestId(request))
        for _ in range(rng.randrange(3)):
            engine.step()
    engine.run()
    ends = {request: (done.reason, done.num_output_tokens) for request, done in engine.done.items()}
    return engine.outputs, engine.beams, ends


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("config", [{}, {"num_blocks": 22, "max_model_len": 64}, {"max_num_batched_tokens": 9}])
def test_every_answer_is_the_same_as_without_it(config, seed):
    plain = answers(config, seed)
    assert answers(config | {"steps_in_flight": 2}, seed, runner_class=PipelinedProvenanceRunner) == plain


# Ends.


def stopped_by_its_first_token(engine: EngineHarness) -> int:
    """End a request by its first token, with a row behind it in flight; return the tokens of its prompt."""
    prompt = [1, 2, 3, 4, 5]
    token = EngineHarness().generate(1, prompt, params=sampling_params(1))[0]
    engine.submit(1, prompt, params=sampling_params(9, stop_token_ids=(token,)))
    engine.step()
    return len(prompt)


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_row_behind_a_stop_id_is_void(is_eager):
    engine = ahead(is_eager=is_eager)
    num_prompt = stopped_by_its_first_token(engine)
    assert engine.done[1].reason is FinishReason.STOP
    assert [chunk.request_id for chunk in in_flight(engine).chunks] == [1]
    assert engine.step() == []
    assert len(engine.outputs[1]) == 1
    lease = engine.core.leases.get(1)
    assert (lease.table.num_computed_tokens, len(lease.token_ids)) == (num_prompt, num_prompt + 1)
    assert num_held(engine) == 2


def test_the_next_turn_goes_on_while_a_void_row_is_in_flight():
    engine = ahead()
    num_prompt = stopped_by_its_first_token(engine)
    engine.submit(2, [7, 7, 7], lease=1, base_len=num_prompt + 1)
    assert engine.runner.launched
    engine.run()
    plain = EngineHarness()
    whole = [1, 2, 3, 4, 5, engine.outputs[1][0], 7, 7, 7]
    assert engine.outputs[2] == plain.generate(1, whole)


def test_blocks_of_a_void_row_stay_until_its_step_has_ended():
    engine = ahead()
    stopped_by_its_first_token(engine)
    blocks = set(in_flight(engine).chunks[0].block_ids)
    engine.send(Release(LeaseId(1)))
    assert engine.core.leases.get(1) is None
    assert all(engine.core.pool.blocks[block_id].ref_count == 1 for block_id in blocks)
    engine.step()
    assert engine.core.pool.num_active == 0


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("verb", [Cancel(RequestId(1)), Release(LeaseId(1)), Finish(RequestId(1), LeaseId(1), 6)])
def test_what_ends_in_flight_is_back_within_two_steps(verb, is_eager):
    engine = ahead(is_eager=is_eager)
    engine.submit(1, [1, 2, 3, 4, 5], params=sampling_params(30), keep_lease=False)
    engine.step(4)
    assert engine.runner.launched
    said = engine.send(verb)
    assert [m.request for m in said if isinstance(m, Done)] == [1]
    num_tokens = len(engine.outputs[1])
    engine.step(2)
    assert engine.core.pool.num_active == 0
    assert len(engine.outputs[1]) == num_tokens
    assert not engine.core.has_work


def test_a_finish_in_flight_cuts_the_lease_where_the_front_says():
    engine = ahead()
    engine.submit(1, [1, 2, 3, 4, 5], params=sampling_params(30))
    engine.step(6)
    engine.send(Finish(RequestId(1), LeaseId(1), 7))
    lease = engine.core.leases.get(1)
    assert (len(lease.token_ids), lease.table.num_computed_tokens, lease.table.num_planned_tokens) == (7, 7, 7)
    assert num_held(engine) == 2


def test_a_trim_in_flight_waits_for_the_end():
    engine = ahead()
    engine.submit(1, [1, 2, 3, 4, 5], params=sampling_params(6))
    engine.step(2)
    engine.send(Trim(LeaseId(1), 3))
    engine.run()
    assert len(engine.outputs[1]) == 6
    assert engine.length(1) == 3


def test_a_prompt_whose_blocks_are_being_loaded_can_be_cancelled():
    config = engine_config(steps_in_flight=2, host_slots=40, num_blocks=24, max_model_len=80)
    engine = EngineHarness(config, runner_class=PipelinedProvenanceRunner)
    for request in (1, 2, 3):
        engine.generate(request, [request] * 33, params=sampling_params(2))
        engine.settle()
    engine.submit(9, [9, 9], params=sampling_params(40))
    engine.step(3)
    engine.submit(4, [8], lease=1, base_len=engine.length(1), params=sampling_params(9))
    while not in_flight(engine).loads:
        engine.step()
    free = len(engine.core.tiers.free_slots)
    engine.send(Cancel(RequestId(4)))
    engine.step(2)
    assert len(engine.core.tiers.free_slots) == free
    engine.run()
    assert engine.outputs[9] == EngineHarness(engine_config(max_model_len=80)).generate(
        9, [9, 9], params=sampling_params(40)
    )


# Forks and copies.


@pytest.mark.parametrize("at", range(4, 8))
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_fork_of_what_is_in_flight_goes_on_by_itself(at, is_eager):
    engine = ahead(is_eager=is_eager)
    engine.submit(1, [1, 2, 3, 4, 5], params=sampling_params(20))
    engine.step(3)
    ids = [1, 2, 3, 4, 5, *engine.outputs[1]]
    engine.send(Fork(LeaseId(1), LeaseId(2), at))
    engine.submit(2, [8, 8], lease=2, base_len=at, params=sampling_params(9))
    engine.run()
    plain = EngineHarness()
    assert engine.outputs[2] == plain.generate(2, [*ids[:at], 8, 8], params=sampling_params(9))
    assert engine.outputs[1] == plain.generate(1, ids[:5], params=sampling_params(20))


def copying(engine: EngineHarness):
    """Bring a request to where the step in flight copies its last block, and return that copy."""
    engine.submit(1, [1, 2, 3, 4, 5], params=sampling_params(20))
    engine.step()
    engine.send(Fork(LeaseId(1), LeaseId(2), 5))
    engine.step()
    (copy,) = in_flight(engine).copies
    return copy


def test_a_fork_during_a_copy_shares_what_is_copied():
    engine = ahead()
    copy = copying(engine)
    lease = engine.core.leases.get(1)
    assert lease.table.block_ids[-1] == copy.target
    engine.send(Fork(LeaseId(1), LeaseId(3), 6))
    assert engine.core.leases.get(3).table.block_ids[-1] == copy.source


def test_a_fork_during_a_copy_survives_the_copys_failure(quiet):
    engine = ahead()
    copying(engine)
    ids = [1, 2, 3, 4, 5, engine.outputs[1][0]]
    engine.send(Fork(LeaseId(1), LeaseId(3), 6))
    engine.runner.raise_next = True
    engine.step()
    engine.submit(3, [8, 8], lease=3, base_len=6)
    engine.run()
    assert engine.outputs[3] == EngineHarness().generate(3, [*ids, 8, 8])


# Failures.


def test_a_step_that_fails_takes_the_one_behind_it_along(quiet):
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(9))
    engine.step(2)
    engine.runner.raise_next = True
    engine.step()
    assert not engine.runner.launched
    assert engine.core.stats().num_failed_steps == 1
    engine.run()
    assert engine.outputs[1] == EngineHarness().generate(1, [1, 2, 3], params=sampling_params(9))


def test_a_launch_that_fails_costs_the_step_in_flight_nothing(quiet):
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(9))
    engine.step(2)
    num_tokens = len(engine.outputs[1])
    engine.runner.fails_launch = True
    engine.step()
    assert len(engine.outputs[1]) == num_tokens + 1
    engine.run()
    assert engine.outputs[1] == EngineHarness().generate(1, [1, 2, 3], params=sampling_params(9))


def test_the_culprit_of_a_failure_is_found_with_nothing_else_in_flight(quiet):
    engine = ahead()
    for request in range(5):
        engine.submit(request, [request] * 3, params=sampling_params(9))
    engine.step(2)
    engine.runner.failing.add(RequestId(3))
    engine.run()
    assert [request for request, done in engine.done.items() if done.reason is FinishReason.FAILED] == [3]
    for request in (0, 1, 2, 4):
        assert engine.outputs[request] == EngineHarness().generate(1, [request] * 3, params=sampling_params(9))


def test_a_step_that_fails_after_the_launch_behind_it_failed_is_tried_again_as_any(quiet):
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(9))
    engine.step(2)
    engine.submit(2, [4, 5, 6], params=sampling_params(9))
    engine.runner.fails_launch = engine.runner.raise_next = True
    engine.step()
    assert engine.core.stats().num_failed_steps == 2
    engine.run()
    assert {done.reason for done in engine.done.values()} == {FinishReason.MAX_OUTPUT_TOKENS}


def test_logits_that_are_not_finite_fail_their_request_and_void_its_next_row(quiet):
    engine = ahead()
    for request in (1, 2):
        engine.submit(request, [request] * 6, params=sampling_params(9))
    engine.step(2)
    engine.runner.not_finite.add(RequestId(1))
    engine.step()
    assert engine.done[1].reason is FinishReason.FAILED
    assert {chunk.request_id for chunk in in_flight(engine).chunks} == {1, 2}
    engine.run()
    assert engine.outputs[2] == EngineHarness().generate(1, [2] * 6, params=sampling_params(9))
    assert engine.core.leases.get(1).table.block_ids == []


def test_nobody_gives_way_to_a_plan_that_is_made_ahead():
    engine = ahead(num_blocks=12, max_model_len=40)
    for request in (1, 2):
        engine.submit(request, [request] * 14, tenant="acme", params=sampling_params(24))
    preempt = engine.core.scheduler.roster.preempt
    num_in_flight = []

    def watched(*arguments):
        num_in_flight.append(len(engine.core.scheduler.flights))
        preempt(*arguments)

    engine.core.scheduler.roster.preempt = watched
    engine.run()
    assert num_in_flight
    assert set(num_in_flight) == {0}
    assert engine.runner.num_ahead > 20
    assert {done.reason for done in engine.done.values()} == {FinishReason.MAX_OUTPUT_TOKENS}


def test_a_suspect_is_never_in_flight_beside_others():
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(20))
    engine.step(3)
    engine.submit(2, [4, 5, 6, 7], params=sampling_params(9), is_suspect=True, num_answered=1)
    for _ in range(4):
        engine.step()
        assert not engine.core.scheduler.requests[RequestId(2)].is_suspect or not engine.runner.launched
    engine.run()
    assert engine.core.scheduler.requests == {}


# Too large, and a device that is gone.


def test_a_step_that_is_too_large_is_tried_again_with_half_as_many_rows(quiet):
    engine = ahead()
    engine.runner.max_rows = 10
    engine.submit(1, range(30), params=sampling_params(4))
    engine.run()
    assert engine.done[1].reason is FinishReason.MAX_OUTPUT_TOKENS
    assert engine.outputs[1] == EngineHarness().generate(1, range(30), params=sampling_params(4))
    stats = engine.core.stats()
    assert stats.num_oversized_steps == stats.num_failed_steps == 2  # of 30 and of 15 rows


def test_a_step_that_is_too_large_without_a_second_one_in_flight_is_tried_again_as_well(quiet):
    engine = EngineHarness()
    engine.runner.max_rows = 10
    engine.submit(1, range(30), params=sampling_params(4))
    engine.run()
    assert engine.outputs[1] == EngineHarness().generate(1, range(30), params=sampling_params(4))
    assert engine.core.stats().num_oversized_steps == 2


def test_decodes_take_turns_where_a_step_has_no_room_for_all(quiet):
    engine = ahead()
    for request in range(6):
        engine.submit(request, [request] * 3, params=sampling_params(12))
    engine.step(3)
    engine.runner.max_rows = 4
    engine.run()
    for request in range(6):
        assert engine.outputs[request] == EngineHarness().generate(1, [request] * 3, params=sampling_params(12))


def test_a_single_row_that_is_too_large_again_and_again_fails_its_request(quiet):
    engine = ahead()
    engine.runner.max_rows = 0
    engine.submit(1, [1, 2, 3, 4])
    engine.run()
    assert engine.done[1].reason is FinishReason.FAILED
    assert "StepTooLarge" in engine.done[1].error_message
    assert engine.core.stats().num_oversized_steps == 2 + MAX_LONE_FAILURES
    engine.runner.max_rows = None
    assert engine.generate(2, [1, 2, 3, 4]) == EngineHarness().generate(2, [1, 2, 3, 4])


def test_the_rows_of_a_step_grow_back_slowly():
    rows = RowLimit(64)
    rows.cut(40)
    assert rows.limit == 20
    limits = []
    while rows.is_cut:
        for _ in range(32):
            rows.succeed()
        limits.append(rows.limit)
    assert limits == [25, 32, 40, 50, 63, 64]


def test_an_error_of_memory_that_python_raises_is_too_large_as_well(quiet):
    engine = ahead()
    launch, failures = engine.runner.launch, iter([MemoryError("no memory")])

    def failing_once(plan):
        for failure in failures:
            raise failure
        return launch(plan)

    engine.core.pipeline._launch = failing_once
    assert engine.generate(1, range(20)) == EngineHarness().generate(1, range(20))
    assert engine.core.stats().num_oversized_steps == 1


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_fault_of_the_device_ends_the_engine(steps_in_flight):
    engine = ahead() if steps_in_flight == 2 else EngineHarness()
    engine.submit(1, [1, 2, 3])
    engine.step()
    engine.runner.device_fails = True
    with pytest.raises(DeviceFault):
        engine.core.step(0.0)
    engine.core.close()


def test_a_fault_of_the_device_has_an_exit_code_of_its_own(monkeypatch, quiet):
    class Core:
        has_work, is_shutting_down = True, False
        scheduler = SimpleNamespace()

        def step(self, now):
            raise DeviceFault("an illegal memory access was encountered")

        def close(self):
            pass

    front, theirs = socket.socketpair()
    ends = []

    def open_pipe(end):
        ends.append(end)
        return EnginePipe(end)

    monkeypatch.setattr(process, "EnginePipe", open_pipe)
    monkeypatch.setattr(process, "_start", lambda options, pipe: Core())
    monkeypatch.setattr(process, "decode_options", lambda body: type("Options", (), {"log_level": "error"}))
    monkeypatch.setattr(process, "configure_logging", lambda level: None)
    monkeypatch.setattr(process, "_IGNORED_SIGNALS", ())
    monkeypatch.setattr(process.faulthandler, "register", lambda number: None)
    monkeypatch.setattr(process, "_exit_without_front", lambda descriptor: None)
    front.sendall((1).to_bytes(4, "big") + b"x")
    with front:
        page = create_page()
        assert process.main([str(theirs.detach()), str(page)]) == EXIT_DEVICE_FAULT
        os.close(page)
        ends[0].close()


def test_whoever_watches_is_told_what_all_should_take_that_is_in_flight():
    engine = ahead()
    told = []
    engine.core.scheduler.on_planned = lambda seconds, _alone: told.append(seconds)
    engine.submit(1, [1, 2, 3], params=sampling_params(3))
    step_s = engine.core.scheduler.cost.parameters.step_s
    engine.step()
    engine.step()
    engine.step()
    prompt, first, second = step_s(3, 6), step_s(1, 4), step_s(1, 5)
    assert told == pytest.approx([prompt, prompt + first, prompt + first, first + second, first + second, second])


# Idle, and the end.


def test_an_idle_engine_waits_for_what_is_in_flight():
    engine = ahead()
    stopped_by_its_first_token(engine)
    assert engine.core.has_work
    engine.core.idle(0.0)
    assert not engine.core.has_work
    assert not engine.runner.launched
    engine.core.check_invariants()


def test_what_is_in_flight_is_waited_for_at_the_end(quiet):
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(9))
    engine.step(2)
    engine.runner.raise_next = True
    engine.core.close()
    assert not engine.runner.launched


def test_a_request_stays_in_one_state_while_two_plans_have_a_part_for_it():
    engine = ahead()
    engine.submit(1, [1, 2, 3], params=sampling_params(9))
    engine.step(2)
    request = engine.core.scheduler.requests[RequestId(1)]
    assert request.status is RequestStatus.RUNNING
    assert request.num_planned_tokens == request.num_computed_tokens + 1 == request.num_tokens
