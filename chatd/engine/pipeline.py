"""Runs what the scheduler plans: launch, wait, commit; and what is done where a step fails.

```
steps_in_flight 1    plan N ─ run N ─ commit N ─ plan N+1 ─ run N+1 ─ …        the device waits while the CPU works
steps_in_flight 2    plan N+1 ─ launch ─ result N ─ commit N ─ plan N+2 ─ …    the CPU works while N+1 runs
```
A step that was too large is discarded and tried again with half as many rows. Any other exception of a runner costs at
most one request: the requests of the step are halved until the culprit fails alone, with nothing else in flight.
A `DeviceFault` ends the engine. Knows the scheduler and the runner, and nothing of what a plan says.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from chatd.engine.engine_config import EngineConfig
from chatd.engine.messages import Tokens
from chatd.engine.plan import (
    DeviceFault,
    PipelinedRunner,
    Plan,
    RequestId,
    Runner,
    StepInFlight,
    StepOutput,
    StepTooLarge,
)
from chatd.engine.reports import Reporter
from chatd.engine.scheduler import Scheduler

MAX_LONE_FAILURES = 3
"""A request whose single row is too large so often fails."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Launched:
    plan: Plan
    step: StepInFlight
    started: float


class Pipeline:
    """Steps of one engine.

    Args:
        config: The engine core's.
        scheduler: Makes plans.
        runner: Executes them; with two steps in flight a `PipelinedRunner`.
        clock: Seconds; stamps starts and ends.
        reporter: Is told what is counted.

    Attributes:
        runner: As given.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner | PipelinedRunner,
        clock: Callable[[], float],
        reporter: Reporter,
    ) -> None:
        self._scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self._reporter = reporter
        self._launch: Callable[[Plan], StepInFlight] | None = None
        if config.steps_in_flight > 1:
            launch = getattr(runner, "launch", None)
            assert launch is not None, f"{type(runner).__name__} does not run two steps at a time (steps_in_flight)"
            self._launch = launch
        self._launched: deque[_Launched] = deque()
        self._ended_at = -1.0
        # Groups of requests whose common step failed, to be tried apart; the last one is next.
        self._apart: list[list[RequestId]] = []
        # How often the single row of a request was too large, while steps are kept small.
        self._lone_failures: Counter[RequestId] = Counter()

    @property
    def is_busy(self) -> bool:
        """Whether a step was launched and not waited for."""
        return bool(self._launched)

    def step(self, now: float) -> None:
        """Commit one step, if there is one to plan; with two in flight the next one is launched before."""
        if self._launch is None or self._apart:
            if self._launched:
                self._collect(now)
            else:
                self._run_alone(now)
            return
        self._fill(self._launch, now)
        if self._launched:
            self._collect(now)

    def settle(self, now: float) -> None:
        """Wait for all that was launched, and commit it."""
        while self._launched:
            self._collect(now)

    def copy_down(self, now: float) -> None:
        """Run a step that only copies blocks, for an engine without requests."""
        plan = self._scheduler.plan_idle(now)
        self._reporter.mark_changed()  # if not by a plan, then by what the disk has done
        if plan is None:
            return
        try:
            output = self.runner.execute(plan)
        except DeviceFault:
            raise
        except Exception:
            # What could not be stored is not tried again: it is computed when it is wanted.
            _log.exception("step %d failed, which only copies blocks", plan.step)
            self._scheduler.discard(plan)
            self._reporter.count_failed_step()
        else:
            self._scheduler.commit(plan, output, now)

    def close(self) -> None:
        """Wait for what was launched; nobody wants it any more."""
        with suppress(DeviceFault):
            while self._launched:
                _wait_for(self._launched.popleft().step)

    # One step.

    def _run_alone(self, now: float) -> None:
        started = self._clock()
        plan = None
        while self._apart and plan is None:
            plan = self._scheduler.plan(now, self._apart[-1])
            if plan is None:
                self._apart.pop()  # They have ended, or were preempted.
        if plan is None:
            plan = self._scheduler.plan(now)
        if plan is None:
            return
        try:
            output = self.runner.execute(plan)
        except DeviceFault:
            raise
        except Exception as error:
            self._scheduler.discard(plan)
            self._recover(plan, error, now, is_retry=bool(self._apart))
        else:
            self._commit(plan, output, now, started)
            if self._apart:
                self._apart.pop()

    def _fill(self, launch: Callable[[Plan], StepInFlight], now: float) -> None:
        """Launch as many steps as may be in flight, so that the device finds one when it is done with another."""
        while True:
            started = self._clock()
            plan = self._scheduler.plan(now)
            if plan is None:
                return
            try:
                step = launch(plan)
            except DeviceFault:
                raise
            except Exception as error:
                self._scheduler.discard(plan)
                self._recover(plan, error, now)
                return
            self._launched.append(_Launched(plan, step, started))

    def _collect(self, now: float) -> None:
        """Wait for the oldest step and commit it; where it failed, those behind it are void as well."""
        oldest = self._launched.popleft()
        try:
            output = oldest.step.result()
        except DeviceFault:
            self._launched.clear()  # Nothing that was launched ends any more.
            raise
        except Exception as error:
            while self._launched:
                _wait_for(self._launched.popleft().step)
            self._scheduler.discard(oldest.plan)
            self._recover(oldest.plan, error, now)
        else:
            self._commit(oldest.plan, output, now, max(oldest.started, self._ended_at))

    def _commit(self, plan: Plan, output: StepOutput, now: float, started: float) -> None:
        outbox = self._scheduler.outbox
        num_before = len(outbox)
        self._scheduler.commit(plan, output, self._clock())
        if self._lone_failures and not self._scheduler.rows.is_cut:
            self._lone_failures.clear()
        num_output = sum(len(m.deltas) for m in outbox[num_before:] if isinstance(m, Tokens))
        self._ended_at = self._clock()
        self._reporter.count_step(now, self._ended_at - started, output, num_output)

    # A step that failed.

    def _recover(self, plan: Plan, error: Exception, now: float, *, is_retry: bool = False) -> None:
        """Decide how the requests of a discarded step are tried again; `is_retry`: they were tried apart."""
        self._reporter.count_failed_step()
        if not plan.chunks or not isinstance(error, StepTooLarge | MemoryError):
            self._isolate(plan, error, now, is_retry=is_retry)
            return
        self._reporter.count_oversized_step()
        num_rows, rows = plan.num_tokens, self._scheduler.rows
        rows.cut(num_rows)
        _log.warning("step %d is too large with %d rows, the limit is %d now", plan.step, num_rows, rows.limit)
        if num_rows == 1:
            culprit = plan.chunks[0].request_id
            self._lone_failures[culprit] += 1
            if self._lone_failures[culprit] >= MAX_LONE_FAILURES:
                del self._lone_failures[culprit]
                self._fail(plan, error, now)

    def _isolate(self, plan: Plan, error: Exception, now: float, *, is_retry: bool) -> None:
        """Halve the requests of a failed step until the culprit fails alone, and that not for the first time."""
        planned = [chunk.request_id for chunk in plan.chunks]
        if is_retry:
            self._apart.pop()
        if not planned:
            # It only moved blocks. What it loaded is forgotten, and what it stored is not tried again.
            _log.warning("step %d failed with nothing to compute", plan.step, exc_info=error)
            return
        if len(planned) > 1 or not is_retry:
            middle = len(planned) // 2
            self._apart += [group for group in (planned[middle:], planned[:middle]) if group]
            _log.warning("step %d failed with %d requests, retrying apart", plan.step, len(planned), exc_info=error)
            return
        self._fail(plan, error, now)

    def _fail(self, plan: Plan, error: Exception, now: float) -> None:
        culprit = plan.chunks[0].request_id
        _log.error("step %d failed with request %d alone", plan.step, culprit, exc_info=error)
        request = self._scheduler.requests.get(culprit)
        if request is not None:
            # The error's text may quote what others computed, so the front is told its kind only.
            self._scheduler.fail(request, f"the model could not compute this request ({type(error).__name__})", now)


def _wait_for(step: StepInFlight) -> None:
    """Wait until a step that is void has ended, however that is."""
    try:
        step.result()
    except DeviceFault:
        raise
    except Exception:
        _log.debug("a step that is void has failed", exc_info=True)
