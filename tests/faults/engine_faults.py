"""Faults of the schedule, of fairness and of what the engine promises its front."""

from __future__ import annotations

from seeded_fault import SIMULATION, fault

SCHEDULER = "chatd/engine/scheduler.py"
PLACEMENT = "chatd/engine/placement.py"
FLIGHTS = "chatd/engine/flights.py"
ROSTER = "chatd/engine/roster.py"
ADMISSION = "chatd/engine/admission.py"
LEDGER = "chatd/engine/ledger.py"
FAIRNESS = "chatd/engine/fairness.py"
PREEMPTION = "chatd/engine/preemption.py"
CORE = "chatd/engine/core.py"
REQUEST = "chatd/engine/request.py"
TEST_SCHEDULER = "tests/engine/test_scheduler.py::test_"
TEST_FAIRNESS = "tests/engine/test_fairness.py::test_"
TEST_PREEMPTION = "tests/engine/test_preemption.py::test_"
TEST_SET_TENANT = "tests/engine/test_set_tenant.py::test_"
TEST_CORE = "tests/engine/test_core.py::test_"

SCHEDULE_FAULTS = (
    fault(
        "a failed row is committed",
        "NaN stays in the cache for whoever has the same prompt",
        SCHEDULER,
        "                self.kv.discard(draft.allocation)\n                self.kv.poison(lease.table)\n",
        "                self.kv.commit(draft.allocation, end, ids)\n",
        TEST_CORE + "logits_that_are_not_finite_fail_their_request_only_and_its_blocks_leave_the_cache",
    ),
    fault(
        "output tokens are not charged",
        "a tenant with long answers gets more than its weight",
        LEDGER,
        "        self.counters.charge(tenant, OUTPUT_TOKEN_COST)\n        self.counts[",
        "        self.counts[",
        TEST_SCHEDULER + "an_answers_tokens_are_service_as_a_prompts_are",
    ),
    fault(
        "nothing is charged",
        "who asks for much gets much, whatever others pay",
        FAIRNESS,
        "        self._counters[tenant] = self._counters.get(tenant, 0.0) + cost / self.weight(tenant)\n",
        "",
        "tests/engine/test_simulation.py::test_tenants_that_wait_all_the_time_are_served_by_their_weights",
        says="I15",
    ),
    fault(
        "a tenant that returns is not lifted",
        "who was away takes the whole machine until it has caught up",
        FAIRNESS,
        "self._counters[tenant] = max(self.counter(tenant), floor)",
        "self._counters[tenant] = self.counter(tenant)",
        TEST_FAIRNESS + "a_tenant_that_returns_is_lifted_to_the_smallest_active_counter",
    ),
    fault(
        "a tenant's weight is ignored",
        "who pays for three shares gets one",
        FAIRNESS,
        "self._counters.get(tenant, 0.0) + cost / self.weight(tenant)",
        "self._counters.get(tenant, 0.0) + cost",
        TEST_FAIRNESS + "service_counts_by_weight",
    ),
    fault(
        "classes have no least share",
        "batch work never runs while people type",
        FAIRNESS,
        "            if tokens >= self._quantum:\n",
        "            if tokens < 0:\n",
        TEST_FAIRNESS + "each_class_that_waits_has_its_least_share_and_the_highest_has_the_rest",
    ),
    fault(
        "the oldest request is the victim",
        "the answer that is nearly done is thrown away for one that began just now",
        PREEMPTION,
        "return (account.num_active / account.weight, request.admission)",
        "return (account.num_active / account.weight, -request.admission)",
        TEST_PREEMPTION + "the_youngest_gives_way_even_if_it_is_the_one_in_need",
    ),
    fault(
        "nobody is safe from preemption",
        "two requests take turns at destroying each other's work",
        PREEMPTION,
        "return request.num_computed_tokens < request.safe_until",
        "return False",
        TEST_PREEMPTION + "a_victim_is_safe_until_it_has_advanced_by_what_it_lost",
    ),
    fault(
        "blocks are taken from who was served less",
        "in a pool of few large requests one tenant is served by what the others lose, without bound",
        PREEMPTION,
        "        and counters.counter(tenant) >= behind\n",
        "",
        "tests/engine/test_fairness_bound.py::test_in_a_pool_of_two_large_requests_no_tenant_is_served_by_what_others_lose",
    ),
    fault(
        "a preempted request keeps its blocks",
        "preemption frees nothing, and the step cannot run",
        ROSTER,
        "        self.leases.free(victim.lease)\n        self.running.remove(victim)\n",
        "        self.running.remove(victim)\n",
        SIMULATION + "[4-xxh3]",
    ),
    fault(
        "a preempted request keeps its rows in the step",
        "the step computes what it has no blocks for",
        ROSTER,
        "        if draft is not None:\n            self.kv.discard(draft.allocation)\n",
        "        if draft is not None:\n            self.drafts[victim.request_id] = draft\n",
        SIMULATION + "[1-xxh3]",
    ),
    fault(
        "decodes do not count as rows of the step",
        "a step has more rows than its budget",
        PLACEMENT,
        "self._rows.limit - rows, seconds, least=1",
        "self._rows.limit, seconds, least=1",
        SIMULATION + "[6-xxh3]",
        says="I12",
    ),
    fault(
        "a prompt is admitted without room for all of it",
        "long prompts preempt each other halfway",
        ADMISSION,
        "        if self._running:\n            wanted",
        "        if False:\n            wanted",
        TEST_SCHEDULER + "a_prompt_with_no_room_waits_for_blocks_and_nothing_of_its_tenant_passes_it",
    ),
    fault(
        "somebody else's lease is used",
        "a tenant goes on with another one's conversation",
        CORE,
        "elif lease is not None and lease.tenant != tenant:",
        "elif lease is not None and lease.tenant != lease.tenant:",
        TEST_CORE + "somebody_elses_lease_is_not_known",
        says="AssertionError|KeyError",
    ),
    fault(
        "two requests run on one lease",
        "two answers are written into one conversation",
        CORE,
        "if lease is not None and lease.tenant == tenant and self._request_on(lease) is not None:",
        "if lease is None and self.leases.get(message.lease) is not None:",
        TEST_CORE + "a_second_request_on_a_lease_is_a_conflict_and_the_first_goes_on",
        says="AssertionError|assert|KeyError",
    ),
    fault(
        "a lease that is lost is taken for whole",
        "an answer goes on from a history with a hole in it",
        CORE,
        "elif held < message.base_len:",
        "elif held < 0:",
        TEST_CORE + "a_longer_base_than_the_engine_holds_is_a_lost_lease",
        says="AssertionError|assert|KeyError",
    ),
    fault(
        "what can never fit waits",
        "a request waits for ever, and everything of its tenant behind it",
        REQUEST,
        "    if num_tokens + 1 > limit:\n",
        "    if num_tokens > 2 * limit:\n",
        "tests/engine/test_request.py::test_a_prompt_that_the_pool_can_never_hold_is_refused_with_the_numbers",
    ),
    fault(
        "a stop id is cut off",
        "the next turn's history is not what was computed",
        SCHEDULER,
        "                self.leases.append(lease, token_id)\n",
        "                if token_id not in request.stop_ids:\n"
        "                    self.leases.append(lease, token_id)\n",
        SIMULATION + "[0-xxh3]",
    ),
    fault(
        "min_tokens is off by one",
        "an answer may stop a token too early",
        REQUEST,
        "if token_id in self.stop_ids and num_output > self.params.min_tokens:",
        "if token_id in self.stop_ids and num_output >= self.params.min_tokens:",
        SIMULATION + "[0-xxh3]",
    ),
    fault(
        "a failed step is not discarded",
        "its blocks are lost, and what it wrote counts",
        FLIGHTS,
        "                self._kv.discard(draft.allocation)\n        return flight\n",
        "                pass\n        return flight\n",
        SIMULATION + "[0-xxh3]",
    ),
    fault(
        "a release leaves its request running",
        "a conversation that was deleted goes on and keeps its blocks",
        CORE,
        "            self.scheduler.cancel(request, now)\n        self.leases.close(lease)\n",
        "            pass\n        self.leases.close(lease)\n",
        TEST_CORE + "release_ends_what_runs_on_the_lease",
        says="AssertionError|KeyError",
    ),
    fault(
        "a new floor is ignored",
        "an operator's promise is not kept",
        CORE,
        "        self.pool.set_limits(tenant, weight, floor)\n",
        "        self.pool.set_limits(tenant, weight, 0)\n",
        TEST_SET_TENANT + "a_floor_protects_from_now_on_and_is_given_up_again",
    ),
    fault(
        "floors may take the whole pool",
        "a tenant without a floor is never answered",
        CORE,
        "floor = max(0, min(wanted, self.pool.num_blocks // 2 - others))",
        "floor = wanted",
        TEST_SET_TENANT + "floors_are_cut_to_half_of_the_pool_and_the_log_says_so",
    ),
    fault(
        "a new weight is ignored",
        "an operator's promise is not kept",
        CORE,
        "        self.scheduler.counters.set_weight(tenant, weight)\n",
        "",
        TEST_SET_TENANT + "backlogged_tenants_change_their_shares_with_their_weights",
    ),
)
