"""A runner that computes nothing, where a benchmark is about what decides and not about what computes."""

from __future__ import annotations

from collections.abc import Callable

from chatd.engine.plan import Plan, StepOutput


class EchoRunner:
    """Every row's next token is the same.

    Args:
        on_plan: Is shown each plan as it runs.

    Attributes:
        num_rows: Planned so far.
        num_copies: Blocks copied so far.
    """

    TOKEN = 1

    def __init__(self, on_plan: Callable[[Plan], None] | None = None) -> None:
        self.num_rows = 0
        self.num_copies = 0
        self._on_plan = on_plan

    def execute(self, plan: Plan) -> StepOutput:
        """Answer a plan at once."""
        self.num_rows += plan.num_tokens
        self.num_copies += len(plan.copies)
        if self._on_plan is not None:
            self._on_plan(plan)
        return StepOutput({chunk.request_id: self.TOKEN for chunk in plan.chunks if chunk.sample is not None})
