"""Faults of one step ahead: what is planned, kept, undone and waited for while a plan is in flight."""

from __future__ import annotations

from seeded_fault import fault

FLIGHTS = "chatd/engine/flights.py"
MANAGER = "chatd/kvcache/manager.py"
PIPELINE = "chatd/engine/pipeline.py"
REQUEST = "chatd/engine/request.py"
ROSTER = "chatd/engine/roster.py"
SCHEDULER = "chatd/engine/scheduler.py"
TEST_AHEAD = "tests/engine/test_one_step_ahead.py::test_"
SIMULATION_AHEAD = "tests/engine/test_simulation_ahead.py::test_every_invariant_holds_after_every_step_one_step_ahead"

AHEAD_FAULTS = (
    fault(
        "a row behind a stop id is committed",
        "the answer goes on after its end",
        SCHEDULER,
        "            if draft.is_void:\n                self.leases.note_offer()\n                continue\n",
        "",
        TEST_AHEAD + "a_row_behind_a_stop_id_is_void",
    ),
    fault(
        "blocks of a plan in flight are freed before its commit",
        "a row that nobody wants any more writes into somebody else's block",
        MANAGER,
        "        if table.last_plan > self._last_retired:\n            if block_ids:",
        "        if table.last_plan < 0:\n            if block_ids:",
        TEST_AHEAD + "blocks_of_a_void_row_stay_until_its_step_has_ended",
        SIMULATION_AHEAD + "[0-late]",
    ),
    fault(
        "what a plan in flight held is never let go",
        "each cancelled answer costs the pool its blocks",
        FLIGHTS,
        "            self._kv.retire(self._flights[0].plan.step - 1 if self._flights else self._last_step)\n",
        "            pass\n",
        TEST_AHEAD + "what_ends_in_flight_is_back_within_two_steps",
    ),
    fault(
        "a failed step leaves the one behind it in flight",
        "tokens are drawn from a prefix that was never computed",
        SCHEDULER,
        "            is_last = self.flights.newest is plan\n",
        "            is_last = True\n",
        TEST_AHEAD + "a_step_that_fails_takes_the_one_behind_it_along",
        says="AssertionError|is not the oldest in flight",
    ),
    fault(
        "what the next step computes is registered by this one's commit",
        "another request reads slots that are not written yet",
        MANAGER,
        "        if num_tokens // self.block_size > table.num_registered_blocks:\n"
        "            self._register(table, num_tokens // self.block_size, token_ids)\n",
        "        num_full = min(table.num_planned_tokens, len(token_ids)) // self.block_size\n"
        "        if num_full > table.num_registered_blocks:\n"
        "            self._register(table, num_full, token_ids)\n",
        TEST_AHEAD + "a_prefix_in_flight_is_found_by_nobody",
    ),
    fault(
        "a launch that fails forgets what the step in flight computes",
        "the next plan computes it again, into slots that are written meanwhile",
        MANAGER,
        "        allocation = Allocation(table, kept, table.num_planned_tokens)\n",
        "        allocation = Allocation(table, kept, table.num_computed_tokens)\n",
        TEST_AHEAD + "a_launch_that_fails_costs_the_step_in_flight_nothing",
    ),
    fault(
        "a fork shares the target of a copy in flight",
        "the step fails, and the fork has a block that was never filled",
        MANAGER,
        "            fork.block_ids[-1] = table.copying[0]\n",
        "            pass\n",
        TEST_AHEAD + "a_fork_during_a_copy_survives_the_copys_failure",
    ),
    fault(
        "somebody gives way to a plan that is made ahead",
        "what the step in flight computes for him is lost, or counts twice",
        ROSTER,
        "        return not self.flights.must_settle\n",
        "        return True\n",
        TEST_AHEAD + "nobody_gives_way_to_a_plan_that_is_made_ahead",
    ),
    fault(
        "an answer has one row too many",
        "every answer that ends by its length costs a row for nothing",
        REQUEST,
        "        return num_tokens - self.num_prompt_tokens < self.params.max_tokens and num_tokens < max_model_len\n",
        "        return num_tokens - self.num_prompt_tokens <= self.params.max_tokens and num_tokens < max_model_len\n",
        TEST_AHEAD + "an_answer_has_no_row_that_its_length_makes_needless",
    ),
    fault(
        "beams do not wait for their candidates",
        "a beam goes on with a token that nobody chose",
        REQUEST,
        "        if self.group is not None or self.compute_only:\n",
        "        if self.compute_only:\n",
        TEST_AHEAD + "beams_wait_for_their_candidates",
    ),
    fault(
        "a draw does not count the pending token",
        "two tokens of an answer are drawn with one random number",
        REQUEST,
        "- self.num_prompt_tokens + num_pending\n",
        "- self.num_prompt_tokens\n",
        TEST_AHEAD + "a_draw_knows_its_number_and_what_min_tokens_still_forbids",
    ),
    fault(
        "a failed request keeps its row in the next step",
        "what is drawn from NaN is delivered",
        SCHEDULER,
        "                self.flights.void(request)\n                self.kv.discard",
        "                self.kv.discard",
        TEST_AHEAD + "logits_that_are_not_finite_fail_their_request_and_void_its_next_row",
    ),
    fault(
        "a finish leaves the row in flight in the table",
        "the session goes on after a slot that belongs to nobody",
        SCHEDULER,
        "        self.flights.void(request)\n        self.leases.trim",
        "        self.leases.trim",
        TEST_AHEAD + "a_finish_in_flight_cuts_the_lease_where_the_front_says",
    ),
    fault(
        "blocks that are copied down in flight are freed by a release",
        "what is kept below the pool is another conversation's",
        FLIGHTS,
        "                table.last_plan = step\n        self._flights",
        "                pass\n        self._flights",
        SIMULATION_AHEAD + "[7-late]",
        SIMULATION_AHEAD + "[8-late]",
    ),
    fault(
        "the step behind a failed one is not waited for",
        "it still writes to blocks that the retry was given",
        PIPELINE,
        "                _wait_for(self._launched.popleft().step)\n            self._scheduler.discard",
        "                self._launched.popleft()\n            self._scheduler.discard",
        TEST_AHEAD + "a_step_that_fails_takes_the_one_behind_it_along",
    ),
    fault(
        "a step is taken for the retry of a launch that failed behind it",
        "a request fails for the first error that its step has",
        PIPELINE,
        "            self._isolate(plan, error, now, is_retry=is_retry)\n",
        "            self._isolate(plan, error, now, is_retry=bool(self._apart))\n",
        TEST_AHEAD + "a_step_that_fails_after_the_launch_behind_it_failed_is_tried_again_as_any",
    ),
    fault(
        "a request fails when its row is too large once",
        "an answer is lost because of those beside it",
        PIPELINE,
        "            if self._lone_failures[culprit] >= MAX_LONE_FAILURES:\n",
        "            if self._lone_failures[culprit]:\n",
        TEST_AHEAD + "a_single_row_that_is_too_large_again_and_again_fails_its_request",
    ),
    fault(
        "a step that was too large is tried again as it was",
        "the engine does nothing else any more",
        PIPELINE,
        "        rows.cut(num_rows)\n",
        "",
        TEST_AHEAD + "a_step_that_is_too_large_is_tried_again_with_half_as_many_rows",
    ),
    fault(
        "a suspect is launched beside others",
        "an engine that dies takes an innocent answer with it",
        SCHEDULER,
        "if self.flights and (self.flights.is_full or self.roster.suspects):",
        "if self.flights.is_full:",
        TEST_AHEAD + "a_suspect_is_never_in_flight_beside_others",
    ),
    fault(
        "a failed launch undoes the step before it",
        "what that step computes is lost, and its blocks are freed while it writes to them",
        FLIGHTS,
        "        flight = self._flights.pop()\n",
        "        flight = self._flights.pop(0)\n",
        TEST_AHEAD + "a_launch_that_fails_costs_the_step_in_flight_nothing",
        says="AssertionError|in flight",
    ),
    fault(
        "a step that was too large cuts nothing",
        "it is tried again as it was, for ever",
        "chatd/engine/row_limit.py",
        "self.limit = max(1, min(self.limit, num_rows // 2))",
        "self.limit = max(1, min(self.limit, num_rows))",
        TEST_AHEAD + "the_rows_of_a_step_grow_back_slowly",
    ),
    fault(
        "a limit of rows grows back at once",
        "every few steps one runs out of memory",
        "chatd/engine/row_limit.py",
        "min(self._most, self.limit + -(-self.limit // _GROW_PART))",
        "self._most",
        TEST_AHEAD + "the_rows_of_a_step_grow_back_slowly",
    ),
)
