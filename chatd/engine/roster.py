"""The requests that have not ended: how they come, run, give way and end, and all who must hear of it.

What waits for a request, follows it or is charged for it is told here, so that no two callers tell different things.
Which request that happens to is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from chatd.engine.beams import Beams
from chatd.engine.block_moves import BlockMoves
from chatd.engine.cost_model import CostModel
from chatd.engine.draft import Decision, Draft
from chatd.engine.engine_config import EngineConfig
from chatd.engine.fairness import VirtualCounters, WaitingRequests
from chatd.engine.flights import Flights
from chatd.engine.joins import Joins
from chatd.engine.ledger import Ledger
from chatd.engine.messages import Done, EngineMessage, FinishReason, Preempted, WaitReason
from chatd.engine.plan import RequestId
from chatd.engine.request import Request, RequestStatus
from chatd.engine.row_limit import RowLimit
from chatd.engine.samples import Samples
from chatd.engine.sampling import BeamSearch
from chatd.engine.suspects import Suspects
from chatd.kvcache.holdings import holdings_of
from chatd.kvcache.lease import LeaseState
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.tiers import Tiers


class Roster:
    """All requests of an engine, and what they are in.

    Args:
        config: The engine core's.
        kv: Block tables.
        leases: Of the same manager.
        tiers: What is kept below the pool.
        log: Receives every decision.

    Attributes:
        requests: All that have not ended.
        running: Of those, the admitted ones, in the order of admission.
        waiting: The others.
        drafts: What each request has in the plan that is being made.
        flights: The plans that were made and are not committed.
        rows: How many a step may have.
        preempted_now: Lost their blocks to the plan that is being made.
        cost: What steps take.
        counters: What tenants were served.
        samples: Which requests wait for another one's prompt.
        joins: Which requests wait for a prefix that another one computes.
        beams: The searches; each of their beams is a request here.
        moves: Blocks that go to the tiers below the pool and come back.
        suspects: Which requests are computed alone.
        outbox: Messages for the front, in order; whoever sends them clears it.
        ledger: What tenants are charged, and what is told of prompts and tokens.
        step: Plans made.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        leases: LeaseTable,
        tiers: Tiers,
        log: Callable[[Decision], None] | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.leases = leases
        self.requests: dict[RequestId, Request] = {}
        self.running: list[Request] = []
        self.waiting = WaitingRequests(config.cost.per_row_s)
        self.drafts: dict[RequestId, Draft] = {}
        self.flights = Flights(kv, config.steps_in_flight)
        self.rows = RowLimit(config.max_num_batched_tokens)
        self.preempted_now: set[RequestId] = set()
        self.cost = CostModel(config.cost)
        self.counters = VirtualCounters({name: limits.weight for name, limits in config.tenants.items()})
        self.samples = Samples(leases, self.waiting)
        self.joins = Joins(kv, self.waiting)
        self.beams = Beams(leases, self.requests, self.running, self.waiting)
        self.moves = BlockMoves(config, kv, leases, self.waiting, tiers, self.cost)
        self.suspects = Suspects(self.samples, self.joins, self.moves)
        self.outbox: list[EngineMessage] = []
        self.ledger = Ledger(self.counters, self.outbox)
        self.step = 0
        self.num_preemptions = self.num_swapped = 0
        self.is_logged = log is not None
        self._log = log
        self._num_admissions = 0

    def open(self, request: Request, sample_of: RequestId | None, beam: BeamSearch | None) -> None:
        """Queue a request.

        Args:
            request: Waits from now on.
            sample_of: Whose prompt it is another sample of.
            beam: The search that it is for.
        """
        # Looked up before this one is there: nobody waits for himself.
        first = None if sample_of is None else self.requests.get(sample_of)
        if beam is not None:
            self.beams.open(request, beam, self.config.max_model_len)
        self.requests[request.request_id] = request
        self.counters.enter(request.tenant)
        self.ledger.open(request.tenant)
        self.waiting.add(request)
        self.suspects.open(request)
        self.leases.set_state(request.lease, LeaseState.QUEUED)
        if first is not None:
            self.samples.follow(request, first)
        self.note("submit", request, request.num_tokens, request.num_computed_tokens)

    def admit(self, draft: Draft) -> None:
        """Let a waiting request run with its first chunk."""
        request = draft.request
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self._num_admissions += 1
        request.admission = self._num_admissions
        self.running.append(request)
        self.drafts[request.request_id] = draft
        self.joins.begin(request)
        self.note("admit", request, draft.start, draft.num_tokens)

    def can_never_fit(self, request: Request) -> bool:
        """Return whether the floors of others leave too little for what a request has become; nothing of it runs."""
        members = [request] if request.group is None else request.group.members
        usable = self.kv.pool.usable_blocks(request.tenant)
        return self.kv.num_blocks_of(request.num_tokens + 1) > usable and not any(
            member.request_id in self.drafts or self.flights.is_planned(member.request_id) for member in members
        )

    def advance_prompt(self, request: Request, num_rows: int, end: int) -> None:
        """Count rows of a prompt, which is computed up to `end` now, and let those go on who waited for that."""
        self.ledger.count_prefill(request, num_rows, end)
        self.joins.lead(request)
        if end >= request.num_prompt_tokens:
            self.samples.on_computed(request)

    def may_preempt(self) -> bool:
        """Return whether somebody can give way now; if not, nothing more is planned until it can be.

        What a victim gives back stays in use for as long as a plan in flight has a part for it, so nobody could be
        given it before.
        """
        self.flights.must_settle = bool(self.flights)
        return not self.flights.must_settle

    def preempt(self, victim: Request, winner: Request, why: WaitReason = WaitReason.NO_BLOCKS) -> None:
        """Send a running request back to the queue for another one's sake; its lease's blocks go with it."""
        assert not self.flights, "somebody gives way to a plan that is made one step ahead"
        draft = self.drafts.pop(victim.request_id, None)
        if draft is not None:
            self.kv.discard(draft.allocation)
            self.moves.release(draft.loads)
        # For a slot alone the blocks are not wanted: they stay cached, where there are others to be taken before them.
        is_kept = why is WaitReason.SLOTS and self.moves.stays_cached(victim)
        num_saved = 0 if is_kept else self.moves.save(victim)
        self.note("preempt", victim, victim.num_computed_tokens, winner.request_id, num_saved)
        victim.safe_until = victim.num_computed_tokens + 1
        victim.num_preemptions += 1
        victim.is_preempted = True
        victim.status = RequestStatus.WAITING
        victim.why = WaitReason.SWAP_IN if num_saved else why
        victim.retry_at = (-1, -1)
        self.preempted_now.add(victim.request_id)
        self.num_preemptions += 1
        self.num_swapped += num_saved > 0
        self.leases.free(victim.lease)
        self.running.remove(victim)
        self.waiting.add(victim)
        self.leases.set_state(victim.lease, LeaseState.QUEUED)
        self.samples.on_lost(victim)
        self.joins.on_lost(victim)
        if victim.is_stalled:
            self.waiting.set_aside(victim)  # What it has to say is known already.
        if victim.is_told:
            self.outbox.append(Preempted(victim.request_id, resumed=False))

    def end(
        self, request: Request, reason: FinishReason, now: float, error_code: str = "", error_message: str = ""
    ) -> None:
        """Say the one `Done`, and leave the lease idle or closed; the end of a beam is the end of its group."""
        for member in [request] if request.group is None else request.group.members:
            self.flights.void(member)
        if request.group is not None:
            group = request.group
            request = group.head
            if reason is FinishReason.FAILED:
                for member in group.members:
                    self.kv.poison(member.lease.table)
                    self.moves.below.forget(member.lease)
            self.beams.close(group)
        assert request.status is not RequestStatus.FINISHED, f"{request} has ended already"
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.suspects.close(request)
        self.samples.on_lost(request)
        self.joins.on_lost(request)
        del self.requests[request.request_id]
        self.counters.leave(request.tenant)
        lease, num_output = request.lease, request.num_output_tokens
        if request.keep_lease:
            self.leases.set_idle(lease)
        else:
            self.leases.close(lease)
        holdings = holdings_of(lease.table, self.kv.pool)
        self.outbox.append(
            Done(
                request.request_id,
                reason,
                request.num_prompt_tokens,
                request.num_cached_tokens,
                num_output,
                request.timings(now),
                error_code,
                error_message,
                holdings.num_blocks,
                holdings.num_shared,
            )
        )
        self.note("end", request, list(FinishReason).index(reason), num_output)

    def note(self, verb: str, request: Request | None, *detail: float) -> None:
        """Write a line of the decision log."""
        if self._log is not None:
            self._log(Decision(self.step, verb, -1 if request is None else request.request_id, detail))
