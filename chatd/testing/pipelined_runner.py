"""A provenance runner that takes a second plan while the first one runs, and draws pending tokens itself.

What a plan says is read when it is launched, as on a device. The work is done as late as can be, when the result is
asked for, so that whatever was given to others too early is missing by then; or at once, so that whatever may be seen
too early is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from chatd.engine.plan import PENDING_TOKEN, Chunk, Plan, RequestId, StepOutput
from chatd.kvcache.block import BlockId
from chatd.testing.engine import ProvenanceRunner, Truth, extend_chain


@dataclass(slots=True)
class LaunchedStep:
    """A step of a `PipelinedProvenanceRunner`.

    Attributes:
        plan: With copies of all that may change after the launch.
        truths: What its requests were then.
        output: What came of it, once it has run.
        error: Or why it failed.
    """

    runner: PipelinedProvenanceRunner
    plan: Plan
    truths: Mapping[RequestId, Truth]
    output: StepOutput | None = None
    error: Exception | None = None

    def fail_with(self, before: LaunchedStep) -> None:
        """Have nothing come of it, since the step before has failed."""
        self.output, self.error = None, RuntimeError(f"step {before.plan.step} has failed before")

    def result(self) -> StepOutput:
        """Run what was launched up to this step, and return what came of it."""
        self.runner.run_up_to(self)
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


class PipelinedProvenanceRunner(ProvenanceRunner):
    """As `ProvenanceRunner`, with up to two steps in flight.

    Attributes:
        is_eager: Steps run when they are launched, and not when their result is asked for.
        fails_launch: The next launch raises.
        launched: Steps whose result nobody has asked for.
        num_ahead: Plans that were launched behind another one.
        num_pending: Rows whose token was pending.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_eager = False
        self.fails_launch = False
        self.launched: deque[LaunchedStep] = deque()
        self.num_ahead = self.num_pending = 0
        self._truths: Mapping[RequestId, Truth] | None = None
        self._drawn: Mapping[RequestId, int] = {}

    def execute(self, plan: Plan) -> StepOutput:
        """Run a plan with none in flight."""
        if self.launched:
            self.violation = AssertionError("a plan is executed while another one is in flight")
            raise self.violation
        self._truths = None
        return super().execute(plan)

    def launch(self, plan: Plan) -> LaunchedStep:
        """Keep a plan as it is now."""
        try:
            step = self._launch(plan)
        except AssertionError as error:
            self.violation = error
            raise
        if self.is_eager:
            before = self.launched[0]
            if before.error is None:
                self._run(step)
            else:
                step.fail_with(before)
        return step

    def _launch(self, plan: Plan) -> LaunchedStep:
        assert len(self.launched) < 2, "three steps are in flight"
        if self.fails_launch:
            self.fails_launch = False
            raise RuntimeError("the launch failed as it was told to")
        chunks = [
            replace(chunk, token_ids=list(chunk.token_ids), block_ids=list(chunk.block_ids)) for chunk in plan.chunks
        ]
        kept = replace(plan, chunks=chunks, copies=list(plan.copies), stores=list(plan.stores), loads=list(plan.loads))
        truths: dict[RequestId, Truth] = {}
        ahead = self.launched[-1].plan if self.launched else None
        for chunk in chunks:
            if chunk.token_ids == [PENDING_TOKEN]:
                draws = [] if ahead is None else [each.request_id for each in ahead.chunks if each.sample is not None]
                assert chunk.request_id in draws, f"nobody draws the pending token of request {chunk.request_id}"
                self.num_pending += 1
            else:
                assert PENDING_TOKEN not in chunk.token_ids, f"request {chunk.request_id} has a pending token too many"
            truth = self._truth_of(chunk.request_id)
            if truth is not None:
                truths[chunk.request_id] = Truth(truth.tenant, list(truth.chains[: chunk.start + chunk.num_tokens]))
        self._check_writes(kept)
        self.num_ahead += bool(self.launched)
        step = LaunchedStep(self, kept, truths)
        self.launched.append(step)
        return step

    def run_up_to(self, step: LaunchedStep) -> None:
        """Run what was launched, in its order, up to a step; its result is asked for."""
        assert self.launched[0] is step, "results are asked for in another order than steps were launched"
        self.launched.popleft()
        if step.output is None and step.error is None:
            self._run(step)
        if step.error is not None:
            for behind in self.launched:
                behind.fail_with(step)

    def _run(self, step: LaunchedStep) -> None:
        self._truths = step.truths
        plan = replace(step.plan, chunks=[self._resolved(chunk) for chunk in step.plan.chunks])
        try:
            step.output = super().execute(plan)
        except Exception as error:
            step.error = error
        finally:
            self._truths = None
        self._drawn = {} if step.output is None else step.output.sampled

    def _resolved(self, chunk: Chunk) -> Chunk:
        """Return a chunk with its pending token; where none was drawn, since the request has failed, with any."""
        if chunk.token_ids != [PENDING_TOKEN]:
            return chunk
        token_id = self._drawn.get(chunk.request_id, 0)
        truth = self._truths.get(chunk.request_id) if self._truths else None
        if truth is not None:
            chains = list(truth.chains)
            chains.append(extend_chain(chains[-1], token_id))
            self._truths = {**(self._truths or {}), chunk.request_id: Truth(truth.tenant, chains)}
        return replace(chunk, token_ids=[token_id])

    def _check_writes(self, plan: Plan) -> None:
        if self.before_write is None:
            return
        size = self.block_size
        blocks: list[BlockId] = [move.block_id for move in plan.loads]
        for chunk in plan.chunks:
            blocks += chunk.block_ids[chunk.start // size :]
        for block_id in blocks:
            self.before_write(block_id)

    def _will_write(self, block_id: BlockId) -> None:
        if self._truths is None:  # What was launched was looked at then.
            super()._will_write(block_id)

    def _truth_of(self, request_id: RequestId) -> Truth | None:
        return super()._truth_of(request_id) if self._truths is None else self._truths.get(request_id)
