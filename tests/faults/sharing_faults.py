"""Faults of what several requests share: samples, beams, joins, and prompts that are only computed."""

from __future__ import annotations

from seeded_fault import SIMULATION, Edit, Fault, fault

SAMPLES = "chatd/engine/samples.py"
BEAMS = "chatd/engine/beams.py"
JOINS = "chatd/engine/joins.py"

TEST_JOINS = "tests/engine/test_joins.py::test_"
TEST_SAMPLES = "tests/engine/test_samples.py::test_"
TEST_BEAMS = "tests/engine/test_beams.py::test_"
TEST_COMPUTE = "tests/engine/test_compute_only.py::test_"

SHARING_FAULTS = (
    fault(
        "a sample forks one token too early",
        "each sample computes a token again that is there",
        SAMPLES,
        "first.num_prompt_tokens - 1)",
        "max(0, first.num_prompt_tokens - 2))",
        TEST_SAMPLES + "samples_of_a_prompt_compute_it_once_and_a_row_each",
    ),
    fault(
        "samples are not let go when the first one is lost",
        "they wait for ever",
        SAMPLES,
        "        for other in self._take_others(request):\n            self._put_back(other)\n",
        "",
        TEST_SAMPLES + "samples_outlive_the_first_one_in_any_state",
        says="AssertionError|does not come to an end|KeyError",
    ),
    fault(
        "a sample may be of another tenant's prompt",
        "whoever guesses a request's number shares its KV",
        SAMPLES,
        "if first.tenant != request.tenant or first.num_prompt_tokens != length:",
        "if first.num_prompt_tokens != length:",
        TEST_SAMPLES + "a_sample_of_another_tenants_prompt_shares_nothing",
    ),
    fault(
        "a sample may be of another prompt",
        "an answer to another question",
        SAMPLES,
        "        if first.lease.token_ids[:length] != request.lease.token_ids:\n            return\n",
        "",
        TEST_SAMPLES + "a_sample_of_another_prompt_is_any_request",
    ),
    fault(
        "the beams of a search that is over are not released",
        "each search loses blocks for ever",
        BEAMS,
        "                self._leases.close(member.lease)\n",
        "",
        TEST_BEAMS + "an_ended_search_gives_all_back_at_once",
    ),
    fault(
        "a beam that is given up keeps its history",
        "two beams are of one parent, and one of them goes on with another's KV",
        BEAMS,
        "                self._leases.become(chosen[-1].lease, parent.lease)\n",
        "",
        TEST_BEAMS + "a_search_finds_what_it_finds_without_an_engine",
    ),
    fault(
        "a prompt that is only computed draws a token",
        "work ahead of a message ends in an answer that nobody asked for",
        "chatd/engine/draft.py",
        "if end == len(ids) and not request.compute_only else None",
        "if end == len(ids) else None",
        TEST_COMPUTE + "the_whole_prompt_is_computed_and_nothing_is_drawn",
        SIMULATION + "[0-xxh3]",
    ),
    fault(
        "a prompt that is only computed stops before its last token",
        "the turn after it computes a block again",
        "chatd/kvcache/manager.py",
        "end = (len(token_ids) - (not last_too)) // size",
        "end = (len(token_ids) - 1) // size",
        TEST_COMPUTE + "what_another_lease_has_computed_is_found_whole",
    ),
    Fault(
        "tenants join each other",
        "how soon an answer comes tells what another tenant asks",
        (
            Edit(
                "chatd/kvcache/manager.py",
                "return (table.namespace, 0 if parent is None else parent.serial, tokens)",
                "return (self._public, 0 if parent is None else parent.serial, tokens)",
            ),
            Edit(
                JOINS,
                "return request.num_leads_seen != self._num_leads.get(request.lease.table.namespace, 0)",
                "return True",
            ),
        ),
        (TEST_JOINS + "tenants_never_join",),
    ),
    fault(
        "nobody leads where the leader has ended",
        "those who joined it wait for ever",
        JOINS,
        "        if group is not None:\n            self._replace_leader(group)\n        group = self._group_of",
        "        group = self._group_of",
        TEST_JOINS + "the_first_joiner_leads_where_the_leader_is_cancelled",
        says="AssertionError|does not come to an end|KeyError",
    ),
    fault(
        "a leader that lost its blocks leads on",
        "those who joined it wait for what nobody computes",
        "chatd/engine/roster.py",
        "        self.joins.on_lost(victim)\n",
        "",
        TEST_JOINS + "a_leader_that_is_preempted_is_followed_by_the_first_joiner_and_joins_it",
        SIMULATION + "[1-xxh3]",
    ),
    fault(
        "a joiner waits for a block more than it shares",
        "it goes on when its leader has ended, and not when it could",
        JOINS,
        "        group.add(request, num_shared)\n",
        "        group.add(request, num_shared + size)\n",
        TEST_JOINS + "a_joiner_goes_on_as_soon_as_its_leader_is_past_what_they_share",
    ),
    fault(
        "a leader keeps its own class",
        "a person waits behind a batch job whose prefix is the same",
        JOINS,
        "        self._waiting.set_class(group.leader, group.highest_class())\n",
        "",
        TEST_JOINS + "a_leader_inherits_the_highest_class_of_its_joiners",
    ),
)
