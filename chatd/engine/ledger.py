"""What tenants are charged as their tokens are computed, and what the front is told of it. Decides nothing."""

from __future__ import annotations

from chatd.engine.draft import TenantCounts
from chatd.engine.fairness import CACHED_TOKEN_COST, OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, Tenant, VirtualCounters
from chatd.engine.messages import EngineMessage, Preempted, Prefill, Started, TokenDelta
from chatd.engine.plan import StepOutput
from chatd.engine.request import Request


class Ledger:
    """Counts committed service.

    Args:
        counters: Are charged.
        outbox: Receives what is told.

    Attributes:
        counts: Tokens served since start, by tenant.
    """

    def __init__(self, counters: VirtualCounters, outbox: list[EngineMessage]) -> None:
        self.counters = counters
        self.counts: dict[Tenant, TenantCounts] = {}
        self._outbox = outbox

    def open(self, tenant: Tenant) -> None:
        """Count a tenant's tokens from now on, if that was not done before."""
        self.counts.setdefault(tenant, TenantCounts())

    def count_cached(self, request: Request, start: int, end: int) -> None:
        """Count tokens that were found after the prompt was admitted, and need not be computed any more."""
        cached = min(end, request.num_submitted_tokens) - max(request.num_charged_tokens, start)
        if cached <= 0:
            return
        before = request.num_cached_tokens
        # What there was of an answer is paid for as a prompt is, and is not told as one.
        request.num_cached_tokens = min(before + cached, request.num_prompt_tokens)
        request.num_charged_tokens += cached
        if request.is_started:
            self.counts[request.tenant].cached_tokens += request.num_cached_tokens - before
            self.counters.charge(request.tenant, CACHED_TOKEN_COST * cached)

    def count_loaded(self, request: Request, start: int, end: int) -> None:
        """Count tokens that were loaded from below the pool, as those that are found computed."""
        if request.is_started:  # One that has not started says so with its first row.
            self._tell_resumed(request)
        self.count_cached(request, start, end)

    def count_prefill(self, request: Request, num_tokens: int, end: int) -> None:
        """Count rows of a prompt, which are computed up to `end` now."""
        counts = self.counts[request.tenant]
        if not request.is_started:
            request.is_started = True
            counts.prompt_tokens += request.num_prompt_tokens
            counts.cached_tokens += request.num_cached_tokens
            self.counters.charge(request.tenant, CACHED_TOKEN_COST * request.num_charged_tokens)
            queue_s = request.admitted_s - request.arrival_s
            self._outbox.append(
                Started(request.request_id, request.num_prompt_tokens, request.num_cached_tokens, queue_s)
            )
        self._tell_resumed(request)
        request.num_prefill_tokens += num_tokens
        # What is computed again after a preemption was paid for.
        charged = min(end, request.num_submitted_tokens)
        if charged > request.num_charged_tokens:
            self.counters.charge(request.tenant, PROMPT_TOKEN_COST * (charged - request.num_charged_tokens))
            request.num_charged_tokens = charged
        if end < request.num_tokens and request.is_told:
            self._outbox.append(Prefill(request.request_id, end, request.num_tokens))

    def count_token(self, request: Request, token_id: int, output: StepOutput, now: float) -> TokenDelta:
        """Count a token of an answer, and return what is told of it."""
        if request.first_token_s < 0:
            request.first_token_s = now
        request.last_token_s = now
        tenant = request.tenant
        self.counters.charge(tenant, OUTPUT_TOKEN_COST)
        self.counts[tenant].output_tokens += 1
        logprobs = output.logprobs.get(request.request_id) if output.logprobs else None
        if logprobs is None:
            return TokenDelta(request.request_id, [token_id])
        return TokenDelta(request.request_id, [token_id], [(logprobs.logprob, list(logprobs.top))])

    def _tell_resumed(self, request: Request) -> None:
        if request.is_preempted:
            request.is_preempted = False
            if request.is_told:
                self._outbox.append(Preempted(request.request_id, resumed=True))
