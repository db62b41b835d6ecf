"""Which requests compute what in each step: plan, commit, discard.

There are no phases: a request has `num_tokens` and `num_computed_tokens`, and a step computes the difference, or as
much of it as there is room for. Each decode gets its row first; the rest of the step goes to prefills and admissions.
Nothing that a plan takes can be seen by others before commit, and discard gives it back.

The scheduler knows no clock (`now` is given), no randomness, no torch and no pipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from chatd.engine.admission import Admission
from chatd.engine.beams import BeamGroup, Beams
from chatd.engine.block_moves import BlockMoves
from chatd.engine.cost_model import CostModel, StepRoom, num_pairs
from chatd.engine.draft import Decision, Draft, build_plan
from chatd.engine.engine_config import EngineConfig
from chatd.engine.fairness import (
    OUTPUT_TOKEN_COST,
    ClassShares,
    VirtualCounters,
    WaitingRequests,
)
from chatd.engine.joins import MAX_JOINS_PER_STEP, Joins
from chatd.engine.ledger import Ledger
from chatd.engine.messages import Beams as BeamsFound
from chatd.engine.messages import (
    Done,
    EngineMessage,
    FinishReason,
    Preempted,
    TokenDelta,
    Tokens,
    WaitReason,
)
from chatd.engine.plan import Plan, RequestId, StepOutput
from chatd.engine.preemption import choose_victim
from chatd.engine.prefill_order import PrefillOrder
from chatd.engine.request import Request, RequestStatus
from chatd.engine.samples import Samples
from chatd.engine.sampling import BeamSearch
from chatd.errors import EngineError, Unavailable
from chatd.kvcache.leases import LeaseState, LeaseTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.tiers import HostBlock, Tiers


class Scheduler:
    """Plans steps over the requests that it was given.

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
        samples: Which of those wait for another one's prompt.
        beams: The searches; each of their beams is a request here.
        joins: Which of those wait for a prefix that another one computes.
        admission: Lets them run.
        moves: Blocks that go to the tiers below the pool and come back.
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
        self.cost = CostModel(config.cost)
        self.counters = VirtualCounters({name: limits.weight for name, limits in config.tenants.items()})
        self.classes = ClassShares(config.block_size, config.max_num_batched_tokens)
        self.requests: dict[RequestId, Request] = {}
        self.running: list[Request] = []
        self.waiting = WaitingRequests(config.cost.per_row_s)
        self.samples = Samples(leases, self.waiting)
        self.joins = Joins(kv, self.waiting)
        self.beams = Beams(leases, self.requests, self.running, self.waiting)
        self.moves = BlockMoves(config, kv, leases, self.waiting, tiers, self.cost)
        self.admission = Admission(
            config, kv, leases, self.counters, self.moves, self.joins, self.running, self.beams, self._preempt
        )
        self.outbox: list[EngineMessage] = []
        self.ledger = Ledger(self.counters, self.outbox)
        self.step = 0
        self.num_preemptions = self.num_swapped = 0
        self._drafts: dict[RequestId, Draft] = {}
        self._in_flight: Plan | None = None
        self._last_step_s = 0.0
        self._preempted_now: set[RequestId] = set()
        self._num_admissions = 0
        self._log = log

    # Requests come and go.

    def submit(self, request: Request, sample_of: RequestId | None = None, beam: BeamSearch | None = None) -> None:
        """Queue a request; whoever calls has checked that it can fit.

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
        self.leases.set_state(request.lease, LeaseState.QUEUED)
        if first is not None:
            self.samples.follow(request, first)
        self._note("submit", request, request.num_tokens, request.num_computed_tokens)

    def finish(self, request: Request, length: int, now: float) -> None:
        """End a request where the front found the end of its answer; the lease keeps `length` tokens."""
        self.leases.trim(request.lease, max(length, request.num_prompt_tokens))
        self._end(request, FinishReason.STOP_STRING, now)

    def cancel(self, request: Request, now: float) -> None:
        """End a request in any state; what it has computed stays in its lease."""
        self._end(request, FinishReason.CANCELLED, now)

    def fail(self, request: Request, message: str, now: float) -> None:
        """End a request whose part of a step cannot be computed."""
        self._end(request, FinishReason.FAILED, now, EngineError.code, message)

    def end_hopeless(self, now: float) -> None:
        """End the requests that wait for more blocks than the floors of others leave, now that those were raised."""
        for request in list(self.waiting):
            if request.status is RequestStatus.WAITING and self._can_never_fit(request):
                self._end(request, FinishReason.KV_EXHAUSTED, now)

    # A step.

    def plan(self, now: float, only: Collection[RequestId] | None = None) -> Plan | None:
        """Decide a step; None where nothing can run.

        Args:
            now: Seconds.
            only: Running requests to choose from, with no admissions: the retry of a step that failed.
        """
        assert self._in_flight is None, "a plan is in flight"
        self._preempted_now.clear()
        self.moves.poll()
        decodes, prefills = self._split(only)
        for request in decodes:
            if request.status is RequestStatus.RUNNING:
                self._place(request, 1)
        if prefills or (self.waiting and only is None):
            self._place_prefills(prefills, now, admit=only is None)
        if not self._drafts:
            self._break_stall(now, only)
        if only is None and self._drafts:
            self.joins.on_planned(self._drafts.keys())
            self.moves.store_ahead(self._last_step_s)
        return self._build()

    def plan_idle(self) -> Plan | None:
        """Decide a step that only copies blocks down, for an engine without requests; None where there is nothing."""
        assert self._in_flight is None, "a plan is in flight"
        self.moves.poll()
        self.moves.store_idle()
        return self._build()

    def commit(self, plan: Plan, output: StepOutput, now: float) -> None:
        """Make the effects of a step visible: tokens, registered blocks, ends.

        Args:
            plan: The one in flight.
            output: What came of it.
            now: When that was.
        """
        drafts = self._take_drafts(plan)
        self.moves.commit(drafts)
        deltas: list[TokenDelta] = []
        ended: list[tuple[Request, FinishReason, str]] = []
        complete: list[BeamGroup] = []
        rows = pairs = 0
        for draft in drafts:
            request, num_tokens = draft.request, draft.num_tokens
            if not num_tokens:
                self.kv.commit(draft.allocation, draft.start, request.lease.token_ids)
                self._commit_loads(draft)
                self.joins.lead(request)
                continue
            rows += num_tokens
            pairs += num_pairs(draft.start, num_tokens)
            ids = request.lease.token_ids
            end = draft.start + num_tokens
            draws = end == len(ids) and not request.compute_only
            token_id = output.sampled.get(request.request_id) if draws else None
            candidates = output.candidates.get(request.request_id) if draws and request.group is not None else None
            if request.request_id in output.failed or (draws and token_id is None and candidates is None):
                self.kv.discard(draft.allocation)
                self.kv.poison(request.lease.table)
                self.moves.forget(request.lease)
                ended.append(
                    (request, FinishReason.FAILED, output.failed.get(request.request_id, "no token was drawn"))
                )
                continue
            self.kv.commit(draft.allocation, end, ids)
            self._commit_loads(draft)
            if not draft.is_decode:
                self._commit_prefill(draft, end)
            elif self.joins.is_leading(request):
                self.joins.lead(request)
            if candidates is not None:
                self.counters.charge(request.tenant, OUTPUT_TOKEN_COST)
                if self.beams.take(request, candidates) and request.group is not None:
                    complete.append(request.group)
            elif token_id is not None:
                deltas.append(self._commit_token(request, token_id, output, now))
                reason = request.finish_reason(token_id, self.config.max_model_len)
                if reason is not None:
                    ended.append((request, reason, ""))
            elif end == len(ids):
                ended.append((request, FinishReason.COMPUTED, ""))
        if deltas:
            self.outbox.append(Tokens(plan.step, deltas))
        for request, reason, message in ended:
            if request.status is not RequestStatus.FINISHED:  # Of a group, another beam may have failed before.
                self._end(request, reason, now, EngineError.code if message else "", message)
        for group in complete:
            if group.head.group is group:
                self._advance(group, now)
        self._last_step_s = output.model_s
        if rows and self.cost.observe(rows, pairs, output.model_s):
            parameters = self.cost.parameters
            self._note("cost", None, parameters.fixed_s, parameters.per_row_s, parameters.per_pair_s)

    def discard(self, plan: Plan) -> None:
        """Undo a step that failed: allocations and counters are as before; who was admitted stays admitted."""
        drafts = self._take_drafts(plan)
        for draft in drafts:
            self.kv.discard(draft.allocation)
        self.moves.discard(drafts)
        self._note("discard", None)

    @property
    def planned(self) -> Collection[Draft]:
        """What each request has in the plan that is in flight."""
        return self._drafts.values()

    # Parts of plan.

    def _split(self, only: Collection[RequestId] | None) -> tuple[list[Request], list[Request]]:
        """Return the running requests that need one row for their next token, and those with a prompt to compute."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            if only is None or request.request_id in only:
                if request.is_decode:
                    decodes.append(request)
                elif not request.is_stalled:
                    prefills.append(request)
        return decodes, prefills

    def _build(self) -> Plan | None:
        stores = self.moves.stores
        if not self._drafts and not stores:
            return None
        self.step += 1
        if self._log is not None:
            for draft in self._drafts.values():
                if draft.loads:
                    self._note("load", draft.request, draft.start, len(draft.loads))
                if draft.num_tokens:
                    self._note("run", draft.request, draft.start, draft.num_tokens)
            for move in stores:
                self._note("store", None, move.block_id, move.slot)
        self._in_flight = build_plan(self.step, self._drafts.values(), self.config.block_size, stores)
        return self._in_flight

    def _place(self, request: Request, num_tokens: int, loads: Sequence[HostBlock] = ()) -> bool:
        """Give a running request rows, and loads before them, if need be at others' cost; False: it gets nothing."""
        table = request.lease.table
        start = table.num_computed_tokens + len(loads) * self.config.block_size
        while (allocation := self.leases.allocate_slots(table, start + num_tokens)) is None:
            victim = choose_victim(self.running, request)
            if victim is not None:
                self._preempt(victim, request)
            if victim is None or victim is request:
                self.moves.release(loads)
                return False
        self._drafts[request.request_id] = Draft(request, allocation, start, num_tokens, request.is_decode, loads)
        return True

    def _place_prefill(self, request: Request, room: StepRoom, most: int | None) -> None:
        start = request.num_computed_tokens
        if request.is_overtaken:
            request.is_overtaken = False
            if self.kv.take_computed_blocks(request.lease.table, request.lease.token_ids):
                self.ledger.count_cached(request, start, request.num_computed_tokens)
                start = request.num_computed_tokens
        if self.moves.must_wait(request, start):
            return
        loads = self.moves.take_loads(request, start, room)
        start += len(loads) * self.config.block_size
        num_tokens = self.moves.rows_of(request, start, room, most, after_loads=bool(loads))
        self._place(request, num_tokens, loads)

    def _place_prefills(self, prefills: list[Request], now: float, *, admit: bool) -> None:
        """Share what the decodes leave of the step."""
        rows, seconds = len(self._drafts), math.inf
        if rows:
            pairs = sum(draft.start + 1 for draft in self._drafts.values())
            decode_s = self.cost.parameters.step_s(rows, pairs)
            seconds = max(self.config.target_step_s, self.config.itl_ratio * decode_s) - decode_s
        room = StepRoom(self.cost.parameters, self.config.max_num_batched_tokens - rows, seconds, least=1)
        order = PrefillOrder(prefills, self.waiting, self.counters, self.classes, admit=admit)
        while not room.is_full and (choice := order.next()) is not None:
            request, most = choice
            if request.status is RequestStatus.WAITING:
                self._admit(request, room, most, now)
            elif request.request_id not in self._drafts:
                self._place_prefill(request, room, most)
            draft = self._drafts.get(request.request_id)
            if draft is not None:
                if draft.num_tokens:
                    room.take(draft.start, draft.num_tokens)
                order.serve(request, draft.num_tokens)
            elif not self.waiting.is_aside(request):
                is_waiting = request.status is not RequestStatus.FINISHED
                if is_waiting and request.why is WaitReason.NO_BLOCKS and self.admission.is_under_block_share(request):
                    order.close()
                order.skip(request)
        self._pass_over(order)

    def _pass_over(self, order: PrefillOrder) -> None:
        """Say why those wait that a full step did not reach; to wait for another one's prefix takes no room in it."""
        num_joins = MAX_JOINS_PER_STEP
        for queue in order.untried():
            while num_joins and len(queue) and self.admission.join(queue.head):
                num_joins -= 1
            if len(queue):
                queue.head.why = WaitReason.FAIR_SHARE

    def _admit(self, request: Request, room: StepRoom, most: int | None, now: float) -> bool:
        """Let a waiting request run with its first chunk; False for "not now"."""
        admission = self.admission
        if admission.is_hopeless(request) or request.request_id in self._preempted_now:
            return False
        is_computed = request.compute_only and request.num_remaining_tokens == 0
        if not is_computed and not admission.find_slot(request):
            return False
        draft = admission.take_first_chunk(request, room, most)
        if draft is None:
            if request.why is WaitReason.NO_BLOCKS and self._can_never_fit(request):
                self._end(request, FinishReason.KV_EXHAUSTED, now)
            return False
        if request.admitted_s < 0:
            request.admitted_s = now
            found = draft.start - len(draft.loads) * self.config.block_size
            request.num_cached_tokens = request.num_charged_tokens = found
        if not draft.num_tokens and not draft.loads:
            self._commit_prefill(draft, draft.start)
            self._end(request, FinishReason.COMPUTED, now)
            return False
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self._num_admissions += 1
        request.admission = self._num_admissions
        self.running.append(request)
        self._drafts[request.request_id] = draft
        self.joins.begin(request)
        self._note("admit", request, draft.start, draft.num_tokens)
        return True

    def _can_never_fit(self, request: Request) -> bool:
        """Return whether the floors of others leave too little for what a request has become; nothing of it runs."""
        members = [request] if request.group is None else request.group.members
        usable = self.kv.pool.usable_blocks(request.tenant)
        return self.kv.num_blocks_of(request.num_tokens + 1) > usable and not any(
            member.request_id in self._drafts for member in members
        )

    def _break_stall(self, now: float, only: Collection[RequestId] | None) -> None:
        """Where nobody could be placed, place the oldest one whatever it costs, or end it for want of blocks."""
        if self.moves.is_waiting:
            return
        while not self._drafts:
            request = next(
                (r for r in self.running if not r.is_stalled and (only is None or r.request_id in only)), None
            )
            if request is None:
                break
            if self._place(request, min(request.num_remaining_tokens, self.config.block_size)):
                return
            if request.status is not RequestStatus.RUNNING:
                continue
            victim = choose_victim(self.running, request, safe_too=True)
            if victim is None:
                self._end(request, FinishReason.KV_EXHAUSTED, now)
            else:
                self._preempt(victim, request)
        # With nothing left to compute and no lease left to shrink, beams that wait for others of their group make room;
        # at last a lone request drops even its own shared blocks.
        while (
            not self._drafts
            and only is None
            and all(running.is_stalled for running in self.running)
            and (request := self.waiting.first()) is not None
        ):
            is_lone = not self.running
            if is_lone:
                self.leases.free(request.lease)
            else:
                self._preempt(self.running[-1], request)
            self._preempted_now.clear()
            room = StepRoom(self.cost.parameters, self.config.max_num_batched_tokens, math.inf, least=1)
            request.retry_at = (-1, -1)
            if self._admit(request, room, None, now):
                return
            if self.waiting.is_aside(request):
                continue
            if is_lone and request.status is RequestStatus.WAITING:
                self._end(request, FinishReason.KV_EXHAUSTED, now)

    # Parts of commit.

    def _take_drafts(self, plan: Plan) -> list[Draft]:
        assert plan is self._in_flight, f"plan {plan.step} is not in flight; the last one is {self.step}"
        self._in_flight = None
        drafts = list(self._drafts.values())
        self._drafts.clear()
        return drafts

    def _commit_loads(self, draft: Draft) -> None:
        if draft.loads:
            first = draft.start - len(draft.loads) * self.config.block_size
            self.ledger.count_loaded(draft.request, first, draft.start)

    def _commit_prefill(self, draft: Draft, end: int) -> None:
        request = draft.request
        self.ledger.count_prefill(request, draft.num_tokens, end)
        self.joins.lead(request)
        if end >= request.num_prompt_tokens:
            self.samples.on_computed(request)

    def _commit_token(self, request: Request, token_id: int, output: StepOutput, now: float) -> TokenDelta:
        self.leases.append(request.lease, token_id)
        return self.ledger.count_token(request, token_id, output, now)

    def _advance(self, group: BeamGroup, now: float) -> None:
        """Let the beams of a group go one token on, or end the search with what it found."""
        head = group.head
        if head.first_token_s < 0:
            head.first_token_s = now
        head.last_token_s = now
        try:
            goes_on = self.beams.advance(group)
        except Unavailable as error:
            self._end(head, FinishReason.FAILED, now, error.error_code, error.message)
            return
        if goes_on:
            return
        sequences = group.sequences(self.config.max_model_len)
        self.outbox.append(BeamsFound(head.request_id, sequences))
        self.ledger.counts[head.tenant].output_tokens += sum(len(sequence.ids) for sequence in sequences)
        self.beams.settle(group)
        self._end(head, sequences[0].reason, now)

    def _preempt(self, victim: Request, winner: Request, why: WaitReason = WaitReason.NO_BLOCKS) -> None:
        """Send a running request back to the queue for another one's sake; its lease's blocks go with it."""
        draft = self._drafts.pop(victim.request_id, None)
        if draft is not None:
            self.kv.discard(draft.allocation)
            self.moves.release(draft.loads)
        # For a slot alone the blocks are not wanted: they stay cached, where there are others to be taken before them.
        is_kept = why is WaitReason.SLOTS and self.moves.stays_cached(victim)
        num_saved = 0 if is_kept else self.moves.save(victim)
        self._note("preempt", victim, victim.num_computed_tokens, winner.request_id, num_saved)
        victim.safe_until = victim.num_computed_tokens + 1
        victim.num_preemptions += 1
        victim.is_preempted = True
        victim.status = RequestStatus.WAITING
        victim.why = WaitReason.SWAP_IN if num_saved else why
        victim.retry_at = (-1, -1)
        self._preempted_now.add(victim.request_id)
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

    def _end(
        self, request: Request, reason: FinishReason, now: float, error_code: str = "", error_message: str = ""
    ) -> None:
        """Say the one `Done`, and leave the lease idle or closed; the end of a beam is the end of its group."""
        if request.group is not None:
            group = request.group
            request = group.head
            if reason is FinishReason.FAILED:
                for member in group.members:
                    self.kv.poison(member.lease.table)
                    self.moves.forget(member.lease)
            self.beams.close(group)
        assert request.status is not RequestStatus.FINISHED, f"{request} has ended already"
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.samples.on_lost(request)
        self.joins.on_lost(request)
        del self.requests[request.request_id]
        self.counters.leave(request.tenant)
        lease, num_output = request.lease, request.num_output_tokens
        if request.keep_lease:
            self.leases.set_idle(lease)
        else:
            self.leases.close(lease)
        held, shared = self.kv.count_blocks(lease.table)
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
                held,
                shared,
            )
        )
        self._note("end", request, list(FinishReason).index(reason), num_output)

    def _note(self, verb: str, request: Request | None, *detail: float) -> None:
        if self._log is not None:
            self._log(Decision(self.step, verb, -1 if request is None else request.request_id, detail))
