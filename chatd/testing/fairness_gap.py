"""I15: tenants that wait all the time are served by their weights, within a bound that does not grow.

Service is counted from plans and from what the front is told, not from the counters that decide. Two tenants are
compared for as long as both have a request of the same class left over after every step. A tenant is left out while
what it waits for is not a matter of turns: blocks beyond its share of the pool, or slots for a whole search at once.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, theorem 4.4.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from chatd.engine.core import EngineCore
from chatd.engine.messages import RequestClass, WaitReason
from chatd.engine.plan import Plan, RequestId, StepOutput

PROMPT_COST, CACHED_COST, OUTPUT_COST = 1.0, 0.1, 2.0


class _Window(NamedTuple):
    """Since when two tenants are compared: what each had been served then, and how far their counters were apart."""

    request_class: RequestClass
    first: float
    second: float
    head_start: float


class FairnessGap:
    """Compares the service of tenants after each step.

    Args:
        core: Whose.

    Attributes:
        num_compared: Pairs of tenants and steps.
        largest: The largest part of its bound that a gap has reached.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._served: dict[str, float] = {}
        self._charged: dict[RequestId, int] = {}
        self._windows: dict[tuple[str, str], _Window] = {}
        self.num_compared = 0
        self.largest = 0.0

    def count_step(self, plan: Plan, output: StepOutput) -> None:
        """Count what a step that did not fail has computed; before it is committed."""
        for chunk in plan.chunks:
            request = self._core.scheduler.requests.get(chunk.request_id)
            # One that has ended since it was planned is served no more.
            if request is None or request.tenant is None or chunk.request_id in output.failed:
                continue
            prompt, charged = request.num_submitted_tokens, self._charged.get(chunk.request_id, 0)
            end = min(chunk.start + chunk.num_tokens, prompt)
            # A beam's prompt is its head's; what is computed again was counted before.
            if chunk.request_id >= 0 and end > charged:
                found = max(0, min(chunk.start, prompt) - charged)
                cost = CACHED_COST * found + PROMPT_COST * (end - charged - found)
                self._served[request.tenant] = self._served.get(request.tenant, 0.0) + cost
                self._charged[chunk.request_id] = end
            if chunk.sample is not None:
                self._served[request.tenant] = self._served.get(request.tenant, 0.0) + OUTPUT_COST

    def restart(self) -> None:
        """Compare from now on only: somebody's weight has changed."""
        self._windows.clear()

    def check(self) -> None:
        """Compare, after a step.

        Raises:
            AssertionError: Somebody is served beyond the bound.
        """
        classes = self._backlogged()
        for pair in [pair for pair in self._windows if not classes.keys() >= set(pair)]:
            del self._windows[pair]
        counters = self._core.scheduler.counters
        for pair in combinations(sorted(classes), 2):
            first, second = pair
            served = [self._served.get(name, 0.0) / counters.weight(name) for name in pair]
            window = self._windows.get(pair)
            if classes[first] is not classes[second]:
                self._windows.pop(pair, None)
            elif window is None or window.request_class is not classes[first]:
                head_start = abs(counters.counter(first) - counters.counter(second))
                self._windows[pair] = _Window(classes[first], served[0], served[1], head_start)
            else:
                gap = abs((served[0] - window.first) - (served[1] - window.second))
                bound = self._bound(min(map(counters.weight, pair))) + window.head_start
                self.num_compared += 1
                self.largest = max(self.largest, gap / bound)
                assert gap <= bound, f"I15: {first} and {second} are {gap:.0f} apart, at most {bound:.0f} is fair"

    def _backlogged(self) -> dict[str, RequestClass]:
        """Return the tenants that have a request left over whose turn it will be, and its class."""
        scheduler = self._core.scheduler
        pool = scheduler.kv.pool
        found: dict[str, RequestClass] = {}
        for name in {request.tenant for request in scheduler.requests.values()}:
            head = None if name is None else scheduler.waiting.head_of(name)
            if name is None or head is None:
                continue
            share = scheduler.counters.share(name, pool.num_blocks)
            is_full = head.why is WaitReason.NO_BLOCKS and pool.account(name).num_active >= share
            if not is_full and head.group is None:
                found[name] = head.schedule_class
        return found

    def _bound(self, weight: float) -> float:
        """Return 2 max(w_p L, w_q M) by the lesser weight: L is the longest prompt, M what the running batch holds."""
        config = self._core.config
        batch = min(config.max_num_seqs * config.max_model_len, config.num_blocks * config.block_size)
        return 2 * max(PROMPT_COST * config.max_model_len, OUTPUT_COST * batch) / weight
