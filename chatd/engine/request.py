"""One generation: what is asked, how far it is, and how it ended."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from chatd.engine.messages import FinishReason, RequestClass, RequestTimings, WaitReason
from chatd.engine.plan import RequestId, SampleSpec
from chatd.engine.sampling import SamplingParams
from chatd.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from chatd.engine.beams import BeamGroup
    from chatd.kvcache.lease import Lease


class RequestStatus(Enum):
    """Where a request is; it ends once."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def check_fits(num_tokens: int, *, max_model_len: int, usable_blocks: int, block_size: int) -> None:
    """Refuse a prompt that can never run, before any state changes.

    Args:
        num_tokens: Of the whole prompt, history included.
        max_model_len: Tokens of a context.
        usable_blocks: Of the pool, without what the other tenants' floors protect.
        block_size: Tokens of a block.

    Raises:
        ContextLengthExceeded: There is no room for the prompt and one token after it.
    """
    if num_tokens + 1 > max_model_len:
        raise ContextLengthExceeded(
            f"prompt has {num_tokens} tokens, the limit is {max_model_len - 1} (max_model_len {max_model_len} with one"
            " token of answer)",
            param="input",
        )
    limit = usable_blocks * block_size
    if num_tokens + 1 > limit:
        raise ContextLengthExceeded(
            f"prompt has {num_tokens} tokens, the KV pool has room for {max(0, limit - 1)} with one token of answer"
            " (num_blocks, tenant floors)",
            param="input",
        )


class Request:
    """A request in the engine. Its ids and blocks are its lease's; there is one request on a lease at a time.

    Attributes:
        request_id: The front's.
        lease: Where its ids and blocks are.
        params: Resolved sampling parameters.
        request_class: Its place in the schedule, as the front chose it.
        schedule_class: Its place now: the highest of its own class and those of the requests that wait for it.
        keep_lease: Whether the lease outlives it.
        compute_only: It ends when its prompt is computed, and draws nothing.
        stop_ids: Drawing one of these ends the answer.
        num_prompt_tokens: Ids before the answer.
        num_submitted_tokens: Ids that it came with: its prompt, and what there was of its answer.
        num_cached_tokens: Of the prompt, found computed at the first admission.
        arrival_s: When it was submitted.
        admission: Counts admissions; the greatest is the youngest. 0 while it waits for its first.
        safe_until: It is not preempted before so many tokens are computed: what it lost the last time, and one.
        num_found_tokens: Leading tokens that the cache had for it when that was last seen.
        num_leads_seen: Admissions of its tenant when it was last looked whether one of them computes its prefix.
        num_charged_tokens: Submitted tokens that its tenant has paid for.
        why: Why it waits.
        told: Its place in its tenant's queue and `why`, as last told to the front.
        is_started: `Started` was said.
        is_suspect: It is planned alone: it was running when an engine died, and has not got past that place.
        has_joined: It has waited for a prefix that another request computed.
        is_overtaken: Others that needed its prefix compute it themselves now.
        is_preempted: It lost its blocks and has not gone on yet.
        sort_key: Its place in the queue that it waits in.
        retry_at: The state of the pool in which there were too few blocks for it.
        num_fetched_blocks: Leading blocks of its lease that the disk was asked for, once each.
        has_loaded: Some of its blocks came from below the pool, so that others may.
        group: The beam search of which it is a beam.
    """

    __slots__ = (
        "admission",
        "admitted_s",
        "arrival_s",
        "compute_only",
        "first_token_s",
        "group",
        "has_joined",
        "has_loaded",
        "is_overtaken",
        "is_preempted",
        "is_started",
        "is_suspect",
        "keep_lease",
        "last_token_s",
        "lease",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_fetched_blocks",
        "num_found_tokens",
        "num_leads_seen",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_submitted_tokens",
        "params",
        "request_class",
        "request_id",
        "retry_at",
        "safe_until",
        "schedule_class",
        "sort_key",
        "status",
        "stop_ids",
        "told",
        "why",
    )

    def __init__(
        self,
        request_id: RequestId,
        lease: Lease,
        params: SamplingParams,
        request_class: RequestClass,
        *,
        keep_lease: bool,
        stop_ids: frozenset[int],
        arrival_s: float,
        compute_only: bool = False,
        num_answered: int = 0,
        is_suspect: bool = False,
    ) -> None:
        self.request_id = request_id
        self.lease = lease
        self.params = params
        self.request_class = self.schedule_class = request_class
        self.keep_lease = keep_lease
        self.compute_only = compute_only
        self.stop_ids = stop_ids
        self.arrival_s = arrival_s
        self.status = RequestStatus.WAITING
        self.num_submitted_tokens = len(lease.token_ids)
        self.num_prompt_tokens = self.num_submitted_tokens - num_answered
        self.is_suspect = is_suspect
        self.num_cached_tokens = 0
        self.num_charged_tokens = 0
        self.num_leads_seen = 0
        self.num_found_tokens = 0
        self.num_prefill_tokens = 0
        self.num_preemptions = 0
        self.admission = 0
        self.safe_until = 0
        self.admitted_s = self.first_token_s = self.last_token_s = -1.0
        self.why = WaitReason.FAIR_SHARE
        self.is_started = False
        self.is_preempted = False
        self.is_overtaken = False
        self.has_joined = False
        self.told: tuple[int, WaitReason] | None = None
        self.sort_key = (0.0, 0)
        self.retry_at = (-1, -1)
        self.num_fetched_blocks = 0
        self.has_loaded = False
        self.group: BeamGroup | None = None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens})"

    @property
    def tenant(self) -> str | None:
        """None for a system request, whose blocks are public."""
        return self.lease.tenant

    @property
    def num_tokens(self) -> int:
        """Ids of prompt and answer."""
        return len(self.lease.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Of those, with committed KV."""
        return self.lease.table.num_computed_tokens

    @property
    def num_planned_tokens(self) -> int:
        """As `num_computed_tokens`, with what plans in flight compute."""
        return self.lease.table.num_planned_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Rows to compute before the next token can be drawn."""
        return len(self.lease.token_ids) - self.lease.table.num_computed_tokens

    @property
    def num_expected_tokens(self) -> int:
        """As `num_remaining_tokens`, less what is known to be found in the cache; for its place in the queue."""
        return len(self.lease.token_ids) - max(self.lease.table.num_computed_tokens, self.num_found_tokens)

    @property
    def is_decode(self) -> bool:
        """True where one row stands between it and the next token of its answer."""
        planned = self.lease.table.num_planned_tokens
        return planned >= self.num_submitted_tokens and len(self.lease.token_ids) - planned == 1

    @property
    def num_output_tokens(self) -> int:
        """Ids of the answer."""
        return len(self.lease.token_ids) - self.num_prompt_tokens

    @property
    def is_told(self) -> bool:
        """True where the front knows it; beams are the engine's own."""
        return self.request_id >= 0

    @property
    def is_stalled(self) -> bool:
        """True where it has computed all it can and waits for the other beams of its group."""
        return self.group is not None and self.request_id in self.group.candidates

    def sample_spec(self, num_pending: int = 0) -> SampleSpec:
        """Return how the next token is drawn, or the one after the next where that is pending."""
        params = self.params
        num_candidates = 0 if self.group is None else self.group.num_candidates
        position = len(self.lease.token_ids) - self.num_prompt_tokens + num_pending
        forbidden = tuple(sorted(self.stop_ids)) if position < params.min_tokens else ()
        if not params.needs_history:
            return SampleSpec(params, position, forbidden, num_candidates=num_candidates)
        # Slices of an array are one memcpy; a view would forbid appending to it.
        ids = self.lease.token_ids
        prompt_ids, output_ids = ids[: self.num_prompt_tokens], ids[self.num_prompt_tokens :]
        return SampleSpec(params, position, forbidden, prompt_ids, output_ids, num_candidates)

    def finish_reason(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Return why the answer ends with the token that was just appended, or None."""
        num_tokens = len(self.lease.token_ids)
        num_output = num_tokens - self.num_prompt_tokens
        if token_id in self.stop_ids and num_output > self.params.min_tokens:
            return FinishReason.STOP
        if num_output >= self.params.max_tokens:
            return FinishReason.MAX_OUTPUT_TOKENS
        if num_tokens >= max_model_len:
            return FinishReason.CONTEXT
        return None

    def outlives_pending(self, max_model_len: int) -> bool:
        """Return whether a row after the token that is being drawn will be wanted, whatever that is but a stop id."""
        if self.group is not None or self.compute_only:
            return False
        num_tokens = len(self.lease.token_ids) + 1
        return num_tokens - self.num_prompt_tokens < self.params.max_tokens and num_tokens < max_model_len

    def timings(self, now: float) -> RequestTimings:
        """Return where the time went, for a request that ends now."""
        admitted = self.admitted_s if self.admitted_s >= 0 else now
        first = self.first_token_s if self.first_token_s >= 0 else now
        last = self.last_token_s if self.last_token_s >= 0 else first
        return RequestTimings(
            queue_s=admitted - self.arrival_s,
            prefill_s=first - admitted,
            decode_s=last - first,
            num_prefill_tokens=self.num_prefill_tokens,
            num_preemptions=self.num_preemptions,
        )


def stop_ids_of(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the ids that end an answer: with `ignore_eos` the request's own only, or none where it is not known."""
    if not params.ignore_eos:
        return frozenset(params.stop_token_ids)
    return frozenset(params.stop_token_ids) - eos_token_ids if eos_token_ids else frozenset()
