"""Which requests compute what in each step: plan, commit, discard.

There are no phases: a request has `num_tokens` and `num_computed_tokens`, and a step computes the difference, or as
much of it as there is room for. Nothing that a plan takes can be seen by others before commit, and discard gives it
back. Who is placed in a plan is decided by `placement`; what becomes of requests is done by `roster`.

With `steps_in_flight` 2 a plan may be made while the one before it runs: it goes on where that ends. Plans are
committed in their order, and with a plan the one behind it is discarded (`flights`).

The scheduler knows no clock (`now` is given), no randomness, no torch and no pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from chatd.engine.beams import BeamGroup
from chatd.engine.draft import Decision, Draft, build_plan
from chatd.engine.engine_config import EngineConfig
from chatd.engine.fairness import OUTPUT_TOKEN_COST
from chatd.engine.flights import Flight
from chatd.engine.messages import Beams as BeamsFound
from chatd.engine.messages import FinishReason, TokenDelta, Tokens
from chatd.engine.placement import Placement
from chatd.engine.plan import Plan, RequestId, StepOutput
from chatd.engine.pulse import NO_SUSPECT, NOT_KNOWN
from chatd.engine.request import Request, RequestStatus
from chatd.engine.roster import Roster
from chatd.engine.sampling import BeamSearch
from chatd.errors import EngineError, Unavailable
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.tiers import Tiers


class Scheduler:
    """Plans steps over the requests that it was given.

    Args:
        config: The engine core's.
        kv: Block tables.
        leases: Of the same manager.
        tiers: What is kept below the pool.
        log: Receives every decision.

    Attributes:
        roster: The requests; its parts have the same names here.
        on_planned: Called with the seconds that all should take which is in flight, and with the suspect in it (see
            `pulse`), each time when a plan was to be made; for whoever watches over the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        leases: LeaseTable,
        tiers: Tiers,
        log: Callable[[Decision], None] | None = None,
    ) -> None:
        self.roster = roster = Roster(config, kv, leases, tiers, log)
        self.config = config
        self.kv = kv
        self.leases = leases
        self.cost = roster.cost
        self.counters = roster.counters
        self.requests = roster.requests
        self.running = roster.running
        self.waiting = roster.waiting
        self.samples = roster.samples
        self.joins = roster.joins
        self.beams = roster.beams
        self.moves = roster.moves
        self.outbox = roster.outbox
        self.ledger = roster.ledger
        self._placement = Placement(roster)
        self.flights = roster.flights
        self.rows = roster.rows
        self._drafts = roster.drafts
        self.on_planned: Callable[[float, int], None] | None = None
        self._last_step_s = 0.0

    @property
    def step(self) -> int:
        """Plans made."""
        return self.roster.step

    @property
    def num_preemptions(self) -> int:
        """Requests that gave way, since start."""
        return self.roster.num_preemptions

    @property
    def num_swapped(self) -> int:
        """Of those, the ones whose blocks were saved below the pool."""
        return self.roster.num_swapped

    # Requests come and go.

    def submit(self, request: Request, sample_of: RequestId | None = None, beam: BeamSearch | None = None) -> None:
        """Queue a request; whoever calls has checked that it can fit.

        Args:
            request: Waits from now on.
            sample_of: Whose prompt it is another sample of.
            beam: The search that it is for.
        """
        self.roster.open(request, sample_of, beam)

    def finish(self, request: Request, length: int, now: float) -> None:
        """End a request where the front found the end of its answer; the lease keeps `length` tokens."""
        # First what is planned for it: that goes on behind the cut.
        self.flights.void(request)
        self.leases.trim(request.lease, max(length, request.num_prompt_tokens))
        self.roster.end(request, FinishReason.STOP_STRING, now)

    def cancel(self, request: Request, now: float) -> None:
        """End a request in any state; what it has computed stays in its lease."""
        self.roster.end(request, FinishReason.CANCELLED, now)

    def fail(self, request: Request, message: str, now: float) -> None:
        """End a request whose part of a step cannot be computed."""
        self.roster.end(request, FinishReason.FAILED, now, EngineError.code, message)

    def end_hopeless(self, now: float) -> None:
        """End the requests that wait for more blocks than the floors of others leave, now that those were raised."""
        for request in list(self.waiting):
            if request.status is RequestStatus.WAITING and self.roster.can_never_fit(request):
                self.roster.end(request, FinishReason.KV_EXHAUSTED, now)

    # A step.

    def plan(self, now: float, only: Collection[RequestId] | None = None) -> Plan | None:
        """Decide a step; None where nothing can run, or nothing before the plan in flight is committed.

        Args:
            now: Seconds.
            only: Running requests to choose from, with no admissions: the retry of a step that failed.
        """
        if self.flights and (self.flights.is_full or self.roster.suspects):
            self._tell_expected()
            return None  # A suspect has the device to itself.
        self.roster.preempted_now.clear()
        if self.moves.is_on:
            self.moves.poll(now)
        self._placement.fill(now, only)
        if only is None and self._drafts:
            self.joins.on_planned(self._drafts.keys())
            self.moves.store_ahead(self._last_step_s)
        return self._build()

    def plan_idle(self, now: float) -> Plan | None:
        """Decide a step that only copies blocks down, for an engine without requests; None where there is nothing."""
        assert not self.flights, "a plan is in flight"
        self.moves.poll(now)
        self.moves.store_idle()
        return self._build()

    def commit(self, plan: Plan, output: StepOutput, now: float) -> None:
        """Make the effects of a step visible: tokens, registered blocks, ends.

        Args:
            plan: The oldest in flight.
            output: What came of it.
            now: When that was.
        """
        flight = self.flights.end_oldest(plan)
        drafts = flight.drafts.values()
        if self.moves.is_on:
            self.moves.commit(flight.stores, drafts)
            if flight.stores.tables:
                self.leases.note_offer()
        self.flights.retire()
        deltas: list[TokenDelta] = []
        ended: list[tuple[Request, FinishReason, str]] = []
        complete: list[BeamGroup] = []
        sampled, failed, can_lead = output.sampled, output.failed, self.joins.has_leaders
        for draft in drafts:
            if draft.is_void:
                self.leases.note_offer()
                continue
            request = draft.request
            request_id, lease = request.request_id, request.lease
            ids = lease.token_ids
            end = draft.start + draft.num_tokens
            token_id = candidates = None
            draws = end == len(ids) and not request.compute_only
            if draws:
                token_id = sampled.get(request_id)
                if request.group is not None:
                    candidates = output.candidates.get(request_id)
            if request_id in failed or (draws and token_id is None and candidates is None):
                self.flights.void(request)
                self.kv.discard(draft.allocation)
                self.kv.poison(lease.table)
                self.moves.below.forget(lease)
                ended.append((request, FinishReason.FAILED, failed.get(request_id, "no token was drawn")))
                continue
            self.kv.commit(draft.allocation, end, ids)
            self.roster.suspects.advance(request, end)
            if not draft.is_decode:
                self._commit_prompt(draft, end)
            elif can_lead and self.joins.is_leading(request):
                self.joins.lead(request)
            if candidates is not None:
                self.counters.charge(request.tenant, OUTPUT_TOKEN_COST)
                if self.beams.take(request, candidates) and request.group is not None:
                    complete.append(request.group)
            elif token_id is not None:
                self.leases.append(lease, token_id)
                deltas.append(self.ledger.count_token(request, token_id, output, now))
                reason = request.finish_reason(token_id, self.config.max_model_len)
                if reason is not None:
                    ended.append((request, reason, ""))
            elif end == len(ids):
                ended.append((request, FinishReason.COMPUTED, ""))
        if deltas:
            self.outbox.append(Tokens(plan.step, deltas))
        for request, reason, message in ended:
            if request.status is not RequestStatus.FINISHED:  # Of a group, another beam may have failed before.
                self.roster.end(request, reason, now, EngineError.code if message else "", message)
        for group in complete:
            if group.head.group is group:
                self._advance(group, now)
        self._last_step_s = output.model_s
        self.rows.succeed()
        if flight.num_rows and self.cost.observe(flight.num_rows, flight.num_pairs, output.model_s):
            parameters = self.cost.parameters
            self.roster.note("cost", None, parameters.fixed_s, parameters.per_row_s, parameters.per_pair_s)

    def discard(self, plan: Plan) -> None:
        """Undo a step that failed, and the one behind it: who was admitted stays admitted, all else is as before."""
        is_last = False
        while not is_last:
            is_last = self.flights.newest is plan
            flight = self.flights.undo_newest()
            self.moves.discard(flight.stores, flight.drafts.values())
            self.flights.retire()
            self.roster.note("discard", None)

    # Parts.

    def _build(self) -> Plan | None:
        roster = self.roster
        planned = self.moves.take_stores()
        if not self._drafts and not planned.blocks:
            self._tell_expected()
            return None
        stores = [move for move, _ in planned.blocks]
        roster.step += 1
        if roster.is_logged:
            for draft in self._drafts.values():
                if draft.loads:
                    roster.note("load", draft.request, draft.start, len(draft.loads))
                if draft.num_tokens:
                    roster.note("run", draft.request, draft.start, draft.num_tokens)
            for move in stores:
                roster.note("store", None, move.block_id, move.slot)
        plan = build_plan(roster.step, self._drafts.values(), self.config.block_size, stores)
        self.flights.begin(Flight(plan, dict(self._drafts), planned))
        self._drafts.clear()
        self._tell_expected()
        return plan

    def _tell_expected(self) -> None:
        if self.on_planned is not None:
            step_s = self.cost.parameters.step_s
            self.on_planned(sum(step_s(flight.num_rows, flight.num_pairs) for flight in self.flights), self._alone())

    def _alone(self) -> int:
        """Return which suspect is computed alone in what is in flight."""
        if not self.roster.suspects:
            return NO_SUSPECT if self.flights else NOT_KNOWN
        requests = [draft.request for flight in self.flights for draft in flight.drafts.values()]
        if any(request.is_suspect for request in requests):
            # Nothing else is in flight then; the beams of a search have numbers of their own.
            return max(NOT_KNOWN, requests[0].request_id) if len(requests) == 1 else NOT_KNOWN
        return NO_SUSPECT if requests else NOT_KNOWN

    def _commit_prompt(self, draft: Draft, end: int) -> None:
        """Count what was loaded of a prompt, and what was computed of it."""
        request = draft.request
        if draft.loads:
            self.ledger.count_loaded(request, draft.start - len(draft.loads) * self.config.block_size, draft.start)
        if draft.num_tokens:
            self.roster.advance_prompt(request, draft.num_tokens, end)
        else:
            self.joins.lead(request)

    def _advance(self, group: BeamGroup, now: float) -> None:
        """Let the beams of a group go one token on, or end the search with what it found."""
        head = group.head
        if head.first_token_s < 0:
            head.first_token_s = now
        head.last_token_s = now
        try:
            goes_on = self.beams.advance(group)
        except Unavailable as error:
            self.roster.end(head, FinishReason.FAILED, now, error.error_code, error.message)
            return
        if goes_on:
            return
        sequences = group.sequences(self.config.max_model_len)
        self.outbox.append(BeamsFound(head.request_id, sequences))
        self.ledger.counts[head.tenant].output_tokens += sum(len(sequence.ids) for sequence in sequences)
        self.beams.settle(group)
        self.roster.end(head, sequences[0].reason, now)
