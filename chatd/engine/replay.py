"""A decision log on a fresh engine core: are the decisions the same, and where is the first that is not?

The core is the real one; clock and runner answer with what was recorded. So an engine's life is lived again without
its model, at thousands of steps a second, with everything there to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

import chatd
from chatd.engine.core import Decision, EngineCore
from chatd.engine.decision_log import CLOSED, Call, Header, LogReader, ResultRecord, RunRecord
from chatd.engine.disk_record import DiskAnswer, ReplayedDisk
from chatd.engine.messages import EngineMessage, Tokens
from chatd.engine.plan import DeviceFault, Plan, RequestId, StepInFlight, StepOutput, StepTooLarge
from chatd.engine.recording import SAID_BY_PLANS, PlanEncoder, condensed
from chatd.engine.replay_report import Life, Tally


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that a replay does otherwise.

    Attributes:
        step: Whose plan was made or carried out; what happens between two steps belongs to the one before.
        request: Whose decision it is; None where it is nobody's.
        what: "decision", "chunk", "plan", "message", "clock", "question to the disk" or "exception".
        expected: What the log has.
        found: What the replay does.
    """

    step: int
    request: int | None
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        whose = "" if self.request is None else f", request {self.request}"
        return (
            f"step {self.step}{whose}: another {self.what}\n  in the log: {self.expected}\n  replayed:   {self.found}"
        )


class Observer(Protocol):
    """Looks at a replay after each call."""

    def see(self, call: Call, core: EngineCore) -> None:
        """Look at a call that was replayed without a difference."""
        ...


class _Diverged(BaseException):
    """Ends a replay in the middle of a call. No `Exception`: the core takes these for a failed step."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class Replay:
    """Plays the calls of a log on a core of its own.

    Args:
        header: Of the log.
        options: Arguments of `EngineCore` that do not decide, such as the hash function.

    Attributes:
        core: That is driven.
    """

    def __init__(self, header: Header, **options: Any) -> None:
        self._plans = PlanEncoder()
        self._call = Call("idle", 0.0, None, [], [], [], [], [])
        self._num_decisions = self._num_runs = self._num_reads = self._num_answers = self._step = 0
        self._num_results = 0
        disk = ReplayedDisk(self._next_answer, self._differ_disk) if header.has_disk else None
        self.core = EngineCore(header.config, self, self._clock, log=self._decide, disk=disk, **options)

    def run(
        self, calls: Iterable[Call], observers: Sequence[Observer] = (), *, last_step: int | None = None
    ) -> Difference | None:
        """Play calls, and return the first difference, or None.

        Args:
            calls: In order, from the engine's first on.
            observers: Told of each call.
            last_step: End after this step.
        """
        for call in calls:
            if last_step is not None and call.verb == "step" and self.core.scheduler.step >= last_step:
                return None
            try:
                self._play(call)
            except _Diverged as diverged:
                return diverged.difference
            for observer in observers:
                observer.see(call, self.core)
        return None

    def _play(self, call: Call) -> None:
        self._call = call
        self._step = self.core.scheduler.step + (call.verb == "step")
        self._num_decisions = self._num_runs = self._num_reads = self._num_answers = self._num_results = 0
        said: list[EngineMessage] = []
        raised = ""
        try:
            said = self._ask(call)
        except Exception as error:
            raised = type(error).__name__
        if raised != call.error:
            self._differ(None, "exception", call.error or "none", raised or "none")
        said = [condensed(message) for message in said]
        if said != call.said:
            self._compare_messages(call.said, said)
        if self._num_decisions < len(call.decisions):
            missing = call.decisions[self._num_decisions]
            self._differ(missing.request_id, "decision", _shown(missing), "none")
        if self._num_runs < len(call.runs):
            self._differ(None, "plan", f"plan {call.runs[self._num_runs].step}", "no plan")
        if self._num_results < len(call.results):
            self._differ(None, "plan", f"the result of plan {call.results[self._num_results].step}", "no result")
        if self._num_answers < len(call.disk):
            self._differ_disk(call.disk[self._num_answers].asked, "no question")
        if self._num_reads < len(call.clock):
            self._differ(None, "clock", f"read {len(call.clock)} times", f"read {self._num_reads} times")

    def _ask(self, call: Call) -> list[EngineMessage]:
        if call.verb == "step":
            return self.core.step(call.now)
        if call.message is not None:
            return self.core.handle(call.message, call.now)
        return self.core.idle(call.now)

    # What the core is given.

    def execute(self, plan: Plan) -> StepOutput:
        """Stand where the runner stands: compare a plan, and answer as was recorded."""
        recorded = self._compare_plan(plan)
        if recorded.output is None:
            raise _exception_of(recorded.error)
        return recorded.output

    def launch(self, plan: Plan) -> StepInFlight:
        """As `execute`; the answer comes when it is asked for."""
        recorded = self._compare_plan(plan)
        if recorded.error:
            raise _exception_of(recorded.error)
        return _ReplayedStep(plan.step, self._next_result)

    def _next_result(self, step: int) -> ResultRecord:
        results = self._call.results
        recorded = results[self._num_results] if self._num_results < len(results) else None
        if recorded is None or recorded.step != step:
            expected = "no result" if recorded is None else f"the result of plan {recorded.step}"
            self._differ(None, "plan", expected, f"the result of plan {step}")
        self._num_results += 1
        return recorded

    def _compare_plan(self, plan: Plan) -> RunRecord:
        run = self._plans.encode(plan)
        recorded = self._call.runs[self._num_runs] if self._num_runs < len(self._call.runs) else None
        if recorded is None:
            self._differ(None, "plan", "no plan", f"plan {plan.step}")
        self._num_runs += 1
        self._compare_plans(recorded, run)
        return recorded

    def _clock(self) -> float:
        reads = self._call.clock
        if self._num_reads == len(reads) and self._call.error:
            self._differ(None, "exception", self._call.error, "none")
        if self._num_reads == len(reads):
            self._differ(None, "clock", f"read {len(reads)} times", "read once more")
        self._num_reads += 1
        return reads[self._num_reads - 1]

    def _next_answer(self) -> DiskAnswer | None:
        answers = self._call.disk
        self._num_answers += 1
        return answers[self._num_answers - 1] if self._num_answers <= len(answers) else None

    def _differ_disk(self, expected: str, found: str) -> NoReturn:
        self._differ(None, "question to the disk", expected, found)

    def _decide(self, decision: Decision) -> None:
        if decision.verb in SAID_BY_PLANS:
            return
        recorded = self._call.decisions
        expected = recorded[self._num_decisions] if self._num_decisions < len(recorded) else None
        if decision != expected:
            request = decision.request_id if decision.request_id >= 0 or expected is None else expected.request_id
            self._differ(request, "decision", "none" if expected is None else _shown(expected), _shown(decision))
        self._num_decisions += 1

    # Comparisons.

    def _compare_plans(self, expected: RunRecord, found: RunRecord) -> None:
        if msgspec.structs.replace(expected, output=None, error="") == found:
            return
        for place in range(max(len(expected.chunks), len(found.chunks))):
            old = expected.chunks[place] if place < len(expected.chunks) else None
            new = found.chunks[place] if place < len(found.chunks) else None
            if old != new:
                either = old or new
                self._differ(None if either is None else either.request, "chunk", _shown(old), _shown(new))
        for name in ("step", "copies", "stores", "loads"):
            old_value, new_value = getattr(expected, name), getattr(found, name)
            if old_value != new_value:
                self._differ(None, "plan", f"{name} {old_value}", f"{name} {new_value}")

    def _compare_messages(self, expected: list[EngineMessage], found: list[EngineMessage]) -> None:
        for place in range(max(len(expected), len(found))):
            old = expected[place] if place < len(expected) else None
            new = found[place] if place < len(found) else None
            if old != new:
                deltas = _differing_deltas(old, new)
                if deltas is not None:
                    old, new = deltas
                request = getattr(new if new is not None else old, "request", None)
                self._differ(request, "message", _shown(old), _shown(new))

    def _differ(self, request: int | None, what: str, expected: str, found: str) -> NoReturn:
        request = None if request is None or request < 0 else request
        raise _Diverged(Difference(self._step, request, what, expected, found))


@dataclass(frozen=True, slots=True)
class _ReplayedStep:
    step: int
    next_result: Callable[[int], ResultRecord]

    def result(self) -> StepOutput:
        recorded = self.next_result(self.step)
        if recorded.output is None:
            raise _exception_of(recorded.error)
        return recorded.output


_DECIDED_BY = {error.__name__: error for error in (StepTooLarge, DeviceFault, MemoryError)}
"""Exceptions of a runner whose kind the engine decides by."""


def _exception_of(name: str) -> Exception:
    known = _DECIDED_BY.get(name)
    error: Exception = type(name, (Exception,), {})("as recorded") if known is None else known("as recorded")
    return error


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a replay.

    Attributes:
        is_same: All was decided as in the log.
        lines: For a person.
    """

    is_same: bool
    lines: list[str]


def replay_file(
    path: Path, *, explain: int | None = None, first_step: int = 0, last_step: int | None = None
) -> ReplayReport:
    """Replay a log and sum it up.

    Args:
        path: Of the log.
        explain: A request whose life is told.
        first_step: What lies before is replayed and not counted.
        last_step: The replay ends after it.

    Raises:
        DecisionLogError: The file cannot be replayed.
    """
    tally = Tally(first_step)
    life = None if explain is None else Life(RequestId(explain), first_step)
    with LogReader(path) as log:
        replay = Replay(log.header)
        difference = replay.run(log.calls(), [tally] if life is None else [tally, life], last_step=last_step)
    lines = life.lines() if life is not None else tally.lines()
    if log.header.chatd_version != chatd.__version__:
        lines.insert(0, f"written by chatd {log.header.chatd_version}; this is {chatd.__version__}")
    if difference is not None:
        return ReplayReport(False, [*lines, str(difference)])
    if log.end is None and last_step is None:
        cut = f", and {log.num_cut_bytes} bytes of an unfinished record are left out" if log.num_cut_bytes else ""
        lines.append(f"the log ends in the middle: its engine was killed or runs still{cut}")
    elif log.end not in (None, CLOSED):
        lines.append(f"the log ends before its engine did: {log.end}")
    lines.append(f"every decision and message is the same, up to step {replay.core.scheduler.step}")
    return ReplayReport(True, lines)


def _differing_deltas(old: EngineMessage | None, new: EngineMessage | None) -> tuple[Any, Any] | None:
    """Return the first two deltas that differ, of two frames of tokens."""
    if not isinstance(old, Tokens) or not isinstance(new, Tokens) or len(old.deltas) != len(new.deltas):
        return None
    return next(((a, b) for a, b in zip(old.deltas, new.deltas, strict=True) if a != b), None)


def _shown(record: object) -> str:
    return "none" if record is None else repr(record)
