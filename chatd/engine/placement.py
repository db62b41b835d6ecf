"""Who gets rows in the step that is being planned, and at whose cost.

Each decode gets its row first. What they leave of the step goes to prompts, those that run and those that wait alike,
in the order of `prefill_order`. Where nobody could be placed, the stall is broken: somebody gives way, or ends.

Where there are suspects (`suspects`), every second step is for one of them alone.

With a plan in flight each goes on where that ends, if it is sure to; nobody gives way and no stall is broken then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from chatd.engine.admission import Admission
from chatd.engine.cost_model import StepRoom
from chatd.engine.draft import Draft
from chatd.engine.fairness import ClassShares
from chatd.engine.joins import MAX_JOINS_PER_STEP
from chatd.engine.messages import FinishReason, WaitReason
from chatd.engine.plan import RequestId
from chatd.engine.preemption import choose_victim
from chatd.engine.prefill_order import PrefillOrder
from chatd.engine.request import Request, RequestStatus
from chatd.engine.roster import Roster
from chatd.kvcache.host_block import HostBlock


class Placement:
    """Fills the roster's drafts.

    Args:
        roster: Of which requests are placed.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._config = roster.config
        self._rows = roster.rows
        self._flights = roster.flights
        self._drafts = roster.drafts
        self._running = roster.running
        self._waiting = roster.waiting
        self._moves = roster.moves
        self._suspects = roster.suspects
        self._was_alone = False
        self._admission = Admission(roster)
        self._classes = ClassShares(self._config.block_size, self._config.max_num_batched_tokens)
        self._first_decode = 0

    def fill(self, now: float, only: Collection[RequestId] | None) -> None:
        """Place whom there is room for.

        Args:
            now: Seconds.
            only: Running requests to choose from, with no admissions; None is all.
        """
        if only is None and not self._was_alone and self._fill_alone(now):
            return
        self._was_alone = False
        decodes, prefills = self._split(only)
        if len(decodes) > self._rows.limit:
            decodes = self._take_turns(decodes, self._rows.limit)
        for request in decodes:
            if request.status is RequestStatus.RUNNING:
                self._place(request, 1, is_decode=True)
        if prefills or (self._waiting and only is None):
            self._place_prefills(prefills, now, admit=only is None)
        if not self._drafts and only is None and self._fill_alone(now):
            return
        if not self._drafts and not self._flights and not self._moves.is_waiting:
            self._break_stall(now, only)

    def _fill_alone(self, now: float) -> bool:
        """Give the step to the next suspect, if there is one that can have it."""
        request = self._suspects.next() if self._suspects else None
        if request is None:
            return False
        room = StepRoom(self._roster.cost.parameters, self._rows.limit, math.inf, least=1)
        if request.status is RequestStatus.WAITING:
            self._admit(request, room, None, now)
        elif request.is_decode:
            self._place(request, 1, is_decode=True)
        else:
            self._place_prefill(request, room, None)
        self._was_alone = bool(self._drafts)
        return self._was_alone

    def _split(self, only: Collection[RequestId] | None) -> tuple[list[Request], list[Request]]:
        """Return the running requests that need one row for their next token, and those with a prompt to compute."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running:
            if (not request.is_suspect) if only is None else request.request_id in only:
                if request.is_decode:
                    decodes.append(request)
                elif request.num_planned_tokens == request.num_tokens:
                    # The step in flight draws its next token, or it waits for other beams.
                    if request.outlives_pending(self._config.max_model_len):
                        decodes.append(request)
                elif not request.is_stalled:
                    prefills.append(request)
        return decodes, prefills

    def _take_turns(self, decodes: list[Request], num_rows: int) -> list[Request]:
        """Return as many as a step may have, beginning where the last one ended."""
        first = self._first_decode % len(decodes)
        self._first_decode = first + num_rows
        return (decodes[first:] + decodes[:first])[:num_rows]

    def _place(self, request: Request, num_tokens: int, loads: Sequence[HostBlock] = (), *, is_decode: bool) -> bool:
        """Give a running request rows, and loads before them, if need be at others' cost; False: it gets nothing."""
        roster, table = self._roster, request.lease.table
        start = table.num_planned_tokens
        if loads:
            start += len(loads) * self._config.block_size
        while (allocation := roster.leases.allocate_slots(table, start + num_tokens)) is None:
            victim = choose_victim(self._running, request)
            can_give_way = victim is not None and roster.may_preempt()
            if victim is not None and can_give_way:
                roster.preempt(victim, request)
            if not can_give_way or victim is request:
                self._moves.release(loads)
                return False
        self._drafts[request.request_id] = Draft(request, allocation, start, num_tokens, is_decode, loads)
        return True

    def _place_prefills(self, prefills: list[Request], now: float, *, admit: bool) -> None:
        """Share what the decodes leave of the step."""
        rows, seconds = len(self._drafts), math.inf
        parameters = self._roster.cost.parameters
        if rows:
            pairs = sum(draft.start + 1 for draft in self._drafts.values())
            decode_s = parameters.step_s(rows, pairs)
            seconds = max(self._config.target_step_s, self._config.itl_ratio * decode_s) - decode_s
        room = StepRoom(parameters, self._rows.limit - rows, seconds, least=1)
        order = PrefillOrder(prefills, self._waiting, self._roster.counters, self._classes, admit=admit)
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
            elif not self._waiting.is_aside(request):
                is_waiting = request.status is not RequestStatus.FINISHED
                if is_waiting and request.why is WaitReason.NO_BLOCKS and self._admission.is_under_block_share(request):
                    order.close()
                order.skip(request)
        self._pass_over(order)

    def _place_prefill(self, request: Request, room: StepRoom, most: int | None) -> None:
        start = request.num_planned_tokens
        if request.is_overtaken and start == request.num_computed_tokens:
            request.is_overtaken = False
            if self._roster.kv.take_computed_blocks(request.lease.table, request.lease.token_ids):
                self._roster.ledger.count_cached(request, start, request.num_computed_tokens)
                start = request.num_computed_tokens
        if self._moves.must_wait(request, start):
            return
        loads = self._moves.take_loads(request, start, room)
        start += len(loads) * self._config.block_size
        num_tokens = self._moves.rows_of(request, start, room, most, after_loads=bool(loads))
        self._place(request, num_tokens, loads, is_decode=request.is_decode)

    def _pass_over(self, order: PrefillOrder) -> None:
        """Say why those wait that a full step did not reach; to wait for another one's prefix takes no room in it."""
        num_joins = MAX_JOINS_PER_STEP
        for queue in order.untried():
            while num_joins and len(queue) and self._admission.join(queue.head):
                num_joins -= 1
            if len(queue):
                queue.head.why = WaitReason.FAIR_SHARE

    def _admit(self, request: Request, room: StepRoom, most: int | None, now: float) -> bool:
        """Let a waiting request run with its first chunk; False for "not now"."""
        admission = self._admission
        if admission.is_hopeless(request) or request.request_id in self._roster.preempted_now:
            return False
        is_computed = request.compute_only and request.num_remaining_tokens == 0
        if not is_computed and not admission.find_slot(request):
            return False
        draft = admission.take_first_chunk(request, room, most)
        if draft is None:
            if request.why is WaitReason.NO_BLOCKS and self._roster.can_never_fit(request):
                self._roster.end(request, FinishReason.KV_EXHAUSTED, now)
            return False
        if request.admitted_s < 0:
            request.admitted_s = now
            found = draft.start - len(draft.loads) * self._config.block_size
            request.num_charged_tokens = found
            request.num_cached_tokens = min(found, request.num_prompt_tokens)
        if not draft.num_tokens and not draft.loads:
            self._roster.advance_prompt(request, 0, draft.start)
            self._roster.end(request, FinishReason.COMPUTED, now)
            return False
        self._roster.admit(draft)
        return True

    def _break_stall(self, now: float, only: Collection[RequestId] | None) -> None:
        """Where nobody could be placed, place the oldest one whatever it costs, or end it for want of blocks."""
        roster = self._roster
        while not self._drafts:
            request = next(
                (r for r in self._running if not r.is_stalled and (only is None or r.request_id in only)), None
            )
            if request is None:
                break
            num_rows = min(request.num_remaining_tokens, self._config.block_size, self._rows.limit)
            if self._place(request, num_rows, is_decode=request.is_decode):
                return
            if request.status is not RequestStatus.RUNNING:
                continue
            victim = choose_victim(self._running, request, safe_too=True)
            if victim is None:
                roster.end(request, FinishReason.KV_EXHAUSTED, now)
            else:
                roster.preempt(victim, request)
        if only is None:
            self._admit_at_any_cost(now)

    def _admit_at_any_cost(self, now: float) -> None:
        """Where all that run wait for others of their group, have them make room for one that waits.

        At last a lone request drops even its own shared blocks.
        """
        roster = self._roster
        while (
            not self._drafts
            and all(running.is_stalled for running in self._running)
            and (request := self._waiting.first() or self._suspects.next_waiting()) is not None
        ):
            is_lone = not self._running
            if is_lone:
                roster.leases.free(request.lease)
            else:
                roster.preempt(self._running[-1], request)
            roster.preempted_now.clear()
            room = StepRoom(roster.cost.parameters, self._rows.limit, math.inf, least=1)
            request.retry_at = (-1, -1)
            if self._admit(request, room, None, now):
                return
            is_held_up = self._suspects.is_held_up if request.is_suspect else self._waiting.is_aside
            if is_held_up(request):
                continue
            if is_lone and request.status is RequestStatus.WAITING:
                roster.end(request, FinishReason.KV_EXHAUSTED, now)
