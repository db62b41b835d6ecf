"""A recorded engine is lived again to the same decisions; where it is not, the first difference is named."""

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatd.engine import fairness, scheduler
from chatd.engine.core import EngineCore
from chatd.engine.decision_log import Call, Header, LogReader, LogWriter, ResultRecord
from chatd.engine.messages import Beams, LeaseId, Submit, Tokens, WatchPool
from chatd.engine.plan import Chunk, Plan, RequestId
from chatd.engine.recording import RecordingCore
from chatd.engine.replay import Difference, Replay, replay_file
from chatd.engine.sampling import BeamSearch
from chatd.testing import engine, witnessed_engine
from chatd.testing.constant_hash import constant_hash
from chatd.testing.engine import EngineHarness, ProvenanceRunner, engine_config, sampling_params
from chatd.testing.pipelined_runner import PipelinedProvenanceRunner
from chatd.testing.simulation import SHAPES, Simulation
from chatd.testing.witnessed_sessions import Shape


class Kept:
    """A log in memory, through the very encoding of the file."""

    header: Header

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.is_closed = False

    def open(self, header: Header) -> "Kept":
        self.header = msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=Header)
        return self

    def write(self, call: Call) -> None:
        self.bodies.append(msgspec.msgpack.encode(call))

    def close(self) -> None:
        self.is_closed = True

    @property
    def calls(self) -> list[Call]:
        return [msgspec.msgpack.decode(body, type=Call) for body in self.bodies]


class Recordable(Simulation):
    """A simulation that changes one core by its calls alone: memory broken from outside is in no log."""

    def _corrupt(self) -> bool:
        return False

    def _die(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failed steps are logged with their traceback, when they are recorded and when they are replayed."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def recorded(seed: int, num_steps: int, **options: Any) -> tuple[Kept, Simulation]:
    kept = Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(witnessed_engine, "EngineCore", functools.partial(RecordingCore, make_writer=kept.open))
        simulation = Recordable(seed, **options)
    simulation.run(num_steps)
    simulation.drain()
    return kept, simulation


def harness(**config: Any) -> tuple[Kept, EngineHarness]:
    kept = Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "EngineCore", functools.partial(RecordingCore, make_writer=kept.open))
        runner_class = PipelinedProvenanceRunner if config.get("steps_in_flight") == 2 else ProvenanceRunner
        return kept, EngineHarness(config=engine_config(**config), runner_class=runner_class)


def replayed(kept: Kept, calls: list[Call] | None = None, **options: Any) -> tuple[Difference | None, EngineCore]:
    replay = Replay(kept.header, **options)
    return replay.run(kept.calls if calls is None else calls), replay.core


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_a_simulation_is_replayed_to_the_same_log(shape: int) -> None:
    kept, simulation = recorded(shape, 300, shape=SHAPES[shape])
    difference, core = replayed(kept)
    assert difference is None
    assert core.scheduler.step == simulation.core.scheduler.step > 200
    assert core.scheduler.num_preemptions == simulation.core.scheduler.num_preemptions
    assert core.pool.num_evictions == simulation.core.pool.num_evictions
    assert core.stats() == simulation.core.stats()
    core.check_invariants()


@pytest.mark.parametrize("shape", [0, 4, 8])
def test_a_simulation_that_plans_one_step_ahead_is_replayed_to_the_same_log(shape: int) -> None:
    kept, simulation = recorded(shape, 200, shape=replace(SHAPES[shape], steps_in_flight=2))
    calls = kept.calls
    assert sum(len(call.results) for call in calls) > 100
    assert any(result.error for call in calls for result in call.results)
    difference, core = replayed(kept)
    assert difference is None
    assert core.scheduler.step == simulation.core.scheduler.step > 100
    assert core.stats() == simulation.core.stats()
    core.check_invariants()


def test_a_changed_result_of_a_launched_step_is_reported_as_a_message() -> None:
    kept, harnessed = harness(steps_in_flight=2)
    harnessed.submit(1, [1] * 7)
    harnessed.run()
    calls = kept.calls
    place = next(place for place, call in enumerate(calls) if call.results and place > 2)
    result = calls[place].results[0]
    assert result.output is not None
    sampled = {request: token_id + 1 for request, token_id in result.output.sampled.items()}
    changed = msgspec.structs.replace(result, output=replace(result.output, sampled=sampled))
    calls[place] = msgspec.structs.replace(calls[place], results=[changed])
    difference, _ = replayed(kept, calls)
    assert difference is not None
    assert (difference.what, difference.request) == ("message", 1)


def test_a_result_that_nobody_asks_for_is_a_difference() -> None:
    kept, harnessed = harness(steps_in_flight=2)
    harnessed.submit(1, [1] * 7)
    harnessed.run()
    calls = kept.calls
    place = next(place for place, call in enumerate(calls) if call.results and place > 2)
    calls[place] = msgspec.structs.replace(
        calls[place], results=[*calls[place].results, ResultRecord(99, None, "Oops")]
    )
    difference, _ = replayed(kept, calls)
    assert difference is not None
    assert difference.expected == "the result of plan 99"
    assert difference.found == "no result"


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), shape=st.sampled_from(SHAPES), constant=st.booleans())
def test_any_simulation_is_replayed_to_the_same_log(seed: int, shape: Shape, constant: bool) -> None:
    options = {"hash_function": constant_hash if constant else xxhash.xxh3_128_digest}
    kept, simulation = recorded(seed, 80, shape=shape, **options)
    more = {"max_entries_per_key": shape.num_blocks} if constant else {}
    difference, core = replayed(kept, **options, **more)
    assert difference is None
    assert core.scheduler.step == simulation.core.scheduler.step


def test_what_the_scheduler_says_to_its_log_is_the_same_with_and_without_a_decision_log() -> None:
    _, simulation = recorded(3, 200, keep_log=True)
    plain = Recordable(3, keep_log=True)
    plain.run(200)
    plain.drain()
    assert simulation.log == plain.log


def test_the_log_holds_no_token_of_the_vocabulary() -> None:
    kept, run = harness(vocab_size=60_000)
    prompt = [59_000 + i for i in range(20)]
    run.runner.vocab_size = 58_000
    run.submit(1, prompt, params=sampling_params(5, stop_token_ids=(59_999,), logit_bias=((59_998, 1.0),)))
    run.run()
    numbers = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list):
            for item in value:
                collect(item)
        elif isinstance(value, int):
            numbers.append(value)

    for body in kept.bodies:
        collect(msgspec.msgpack.decode(body))
    secret = {*prompt, *run.outputs[1], 59_999, 59_998}
    assert len(secret) > 20
    assert not secret & set(numbers) - {*range(64)}
    assert replayed(kept)[0] is None


def test_a_search_and_samples_are_replayed() -> None:
    kept, run = harness(num_blocks=30)
    prompt = [90 - i for i in range(9)]
    run.send(
        Submit(
            RequestId(1), LeaseId(1), "acme", 0, prompt, sampling_params(9), beam=BeamSearch(width=4, num_returned=3)
        )
    )
    run.submit(2, prompt, tenant="blue")
    run.send(Submit(RequestId(3), LeaseId(3), "blue", 0, prompt, sampling_params(9), sample_of=RequestId(2)))
    run.run()
    assert any(isinstance(message, Beams) for message in run.messages)
    difference, core = replayed(kept)
    assert difference is None
    assert core.scheduler.step == run.core.scheduler.step


# Differences.


def first_step_with_token(calls: list[Call], least: int) -> tuple[int, int]:
    """Return the place of the first call from the `least`-th on whose step drew a token, and the request."""
    for place, call in enumerate(calls):
        if place >= least and call.runs and call.runs[0].output and call.runs[0].output.sampled:
            return place, next(iter(call.runs[0].output.sampled))
    raise AssertionError("no step drew a token")


def test_a_changed_output_is_reported_at_its_step() -> None:
    kept, harnessed = harness()
    for request in (1, 2, 3):
        harnessed.submit(request, [request] * 7)
    harnessed.run()
    calls = kept.calls
    place, request = first_step_with_token(calls, 6)
    run = calls[place].runs[0]
    assert run.output is not None
    sampled = dict(run.output.sampled)
    sampled[request] = sampled[request] + 1
    calls[place] = msgspec.structs.replace(
        calls[place], runs=[msgspec.structs.replace(run, output=replace(run.output, sampled=sampled))]
    )
    difference, _ = replayed(kept, calls)
    assert difference is not None
    assert (difference.step, difference.request) == (run.step, request)
    assert difference.what == "message"
    tokens = next(message for message in calls[place].said if isinstance(message, Tokens))
    assert difference.expected == repr(next(delta for delta in tokens.deltas if delta.request == request))


CHANGES: list[Callable[[pytest.MonkeyPatch], None]] = [
    lambda patch: patch.setattr(fairness, "CLASS_MIN_SHARE", 0.5),
    lambda patch: patch.setattr(scheduler, "OUTPUT_TOKEN_COST", 20.0),
    lambda patch: patch.setattr("chatd.engine.cost_model._PULL", 10.0),
]


def decided(call: Call) -> list[Any]:
    return [call.decisions, *([run.chunks, run.copies] for run in call.runs)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_constant_is_reported_at_the_first_step_that_it_changes(
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Recorded anew with the changed constant, from the same calls: the first step that is decided otherwise."""
    kept, _ = recorded(0, 400, shape=SHAPES[5])
    calls = kept.calls
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        difference, _ = replayed(kept)
        again = Kept()
        core = RecordingCore(kept.header.config, AsRecorded(calls), lambda: 0.0, make_writer=again.open)
        for call in calls:
            if call.message is not None:
                core.handle(call.message, call.now)
            elif call.verb == "step":
                core.step(call.now)
            else:
                core.idle(call.now)
            if decided(again.calls[-1]) != decided(call):
                break
    assert difference is not None
    assert difference.what in ("decision", "chunk", "plan")
    assert difference.step == core.scheduler.step


class AsRecorded:
    """A runner that answers as was recorded and compares nothing."""

    def __init__(self, calls: list[Call]) -> None:
        self._runs = iter([run for call in calls for run in call.runs])

    def execute(self, plan: Plan) -> Any:
        run = next(self._runs)
        if run.output is None:
            raise RuntimeError
        return run.output


def test_a_call_that_is_missing_is_reported() -> None:
    kept, run = harness()
    run.submit(1, [1, 2, 3])
    run.step()
    run.submit(2, [4, 5, 6])
    run.run()
    calls = kept.calls
    del calls[2]
    difference, _ = replayed(kept, calls)
    assert difference is not None
    assert (difference.step, difference.request, difference.what) == (2, 2, "chunk")
    assert str(difference).startswith("step 2, request 2: another chunk\n  in the log: ChunkRecord(request=2, start=0")
    assert str(difference).endswith("\n  replayed:   none")


def test_a_message_that_is_not_said_is_reported() -> None:
    kept, run = harness()
    run.generate(1, [1, 2, 3])
    calls = kept.calls
    calls[-1] = msgspec.structs.replace(calls[-1], said=calls[-1].said[:-1])
    difference, _ = replayed(kept, calls)
    assert difference is not None
    assert (difference.what, difference.request, difference.expected) == ("message", 1, "none")
    assert difference.found.startswith("Done(request=1, reason=")


def test_a_core_that_breaks_is_recorded_to_its_last_call_and_breaks_again() -> None:
    kept, run = harness()
    run.submit(1, [1, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.Scheduler, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step()
        assert kept.calls[-1].error == "ZeroDivisionError"
        assert replayed(kept)[0] is None
    difference, _ = replayed(kept)
    assert difference is not None
    assert (difference.what, difference.expected, difference.found) == ("exception", "ZeroDivisionError", "none")


def test_frames_with_maps_are_compared_by_their_hash() -> None:
    kept, run = harness()
    run.send(WatchPool(0.001, with_map=True, with_leases=True))
    run.generate(1, list(range(30)))
    assert all(len(body) < 1000 for body in kept.bodies)
    assert replayed(kept)[0] is None


def test_all_of_a_plan_is_recorded() -> None:
    """A new field of a plan belongs into its record, or here."""
    assert {field.name for field in fields(Plan)} == {"step", "chunks", "copies", "block_size", "stores", "loads"}
    assert {field.name for field in fields(Chunk)} == {"request_id", "start", "token_ids", "block_ids", "sample"}


# Files.


def logged(path: Path, seed: int = 4, num_steps: int = 150) -> Simulation:
    def make_writer(header: Header) -> LogWriter:
        return LogWriter(path, header, 2**24)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(witnessed_engine, "EngineCore", functools.partial(RecordingCore, make_writer=make_writer))
        simulation = Recordable(seed)
    simulation.run(num_steps)
    simulation.drain()
    simulation.core.close()
    return simulation


def test_a_file_is_replayed_and_summed_up(tmp_path: Path) -> None:
    simulation = logged(tmp_path / "log")
    report = replay_file(tmp_path / "log")
    assert report.is_same
    assert report.lines[-1] == f"every decision and message is the same, up to step {simulation.core.scheduler.step}"
    assert report.lines[0].startswith(f"{simulation.core.scheduler.step} steps in ")
    ended = sum(1 for _ in simulation._ended)
    assert ended > 20


def test_a_replay_can_stop_early(tmp_path: Path) -> None:
    logged(tmp_path / "log")
    report = replay_file(tmp_path / "log", last_step=50)
    assert report.is_same
    assert report.lines[-1] == "every decision and message is the same, up to step 50"


def test_a_log_of_another_process_is_replayed_whatever_its_hash_seed(tmp_path: Path) -> None:
    """No decision may hang on the order of a set."""
    code = f"""
import functools, logging, pathlib
from chatd.engine.decision_log import LogWriter
from chatd.engine.recording import RecordingCore
from chatd.testing import witnessed_engine
from chatd.testing.simulation import SHAPES, Simulation

logging.disable(logging.CRITICAL)
Simulation._die = Simulation._corrupt = lambda self: False
for number, shape in enumerate(SHAPES):
    path = pathlib.Path({str(tmp_path)!r}) / str(number)
    make = functools.partial(RecordingCore, make_writer=lambda header: LogWriter(path, header, 2**24))
    witnessed_engine.EngineCore = make
    simulation = Simulation(number, shape)
    simulation.run(60)
    simulation.core.close()
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, check=True)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == len(SHAPES)
    for path in paths:
        report = replay_file(path)
        assert report.is_same, report.lines[-1]


def test_a_file_that_was_cut_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    logged(tmp_path / "log")
    path = tmp_path / "log"
    path.write_bytes(path.read_bytes()[:-25])
    report = replay_file(path)
    assert report.is_same
    assert "the log ends in the middle: its engine was killed or runs still, and" in report.lines[-2]


def test_a_file_that_reached_its_limit_says_so(tmp_path: Path) -> None:
    kept, _ = recorded(4, 50)
    writer = LogWriter(tmp_path / "log", kept.header, 3000)
    for call in kept.calls:
        writer.write(call)
    writer.close()
    assert replay_file(tmp_path / "log").lines[-2] == "the log ends before its engine did: 3000 bytes are reached"


def test_a_log_of_another_chatd_is_replayed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged(tmp_path / "log")
    monkeypatch.setattr("chatd.__version__", "77")
    with LogReader(tmp_path / "log") as log:
        version = log.header.chatd_version
    assert replay_file(tmp_path / "log").lines[0] == f"written by chatd {version}; this is 77"


def test_a_difference_is_shown_and_is_no_success(tmp_path: Path) -> None:
    logged(tmp_path / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatd.engine.fairness.CLASS_MIN_SHARE", 0.9)
        report = replay_file(tmp_path / "log")
    assert not report.is_same
    assert report.lines[-1].startswith("step ")
    assert "in the log: " in report.lines[-1]
