"""Faults that somebody could make, each with the tests that notice it.

Each is a few edits of the product's own source. `fault_runner` applies them to a copy, one fault at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

MANAGER = "chatd/kvcache/manager.py"
POOL = "chatd/kvcache/block_pool.py"
INDEX = "chatd/kvcache/prefix_index.py"
LEASES = "chatd/kvcache/leases.py"
SCHEDULER = "chatd/engine/scheduler.py"
ADMISSION = "chatd/engine/admission.py"
LEDGER = "chatd/engine/ledger.py"
FAIRNESS = "chatd/engine/fairness.py"
PREEMPTION = "chatd/engine/preemption.py"
CORE = "chatd/engine/core.py"
REQUEST = "chatd/engine/request.py"
MODEL_RUNNER = "chatd/engine/model_runner.py"
BLOCK_FILE = "chatd/kvcache/block_file.py"
DISK_TIER = "chatd/kvcache/disk_tier.py"
DIGESTS = "chatd/kvcache/digests.py"
TIERS = "chatd/kvcache/tiers.py"
MOVES = "chatd/engine/block_moves.py"

TEST_MANAGER = "tests/kvcache/test_manager.py::test_"
TEST_POOL = "tests/kvcache/test_block_pool.py::test_"
TEST_INDEX = "tests/kvcache/test_prefix_index.py::test_"
TEST_LEASES = "tests/kvcache/test_leases.py::test_"
TEST_SCHEDULER = "tests/engine/test_scheduler.py::test_"
TEST_FAIRNESS = "tests/engine/test_fairness.py::test_"
TEST_PREEMPTION = "tests/engine/test_preemption.py::test_"
TEST_CORE = "tests/engine/test_core.py::test_"
TEST_BLOCK_FILE = "tests/kvcache/test_block_file.py::test_"
TEST_DISK_TIER = "tests/kvcache/test_disk_tier.py::test_"
TEST_MOVES = "tests/engine/test_block_moves_on_the_model.py::test_"
TEST_DIGESTS = "tests/kvcache/test_digests.py::test_"
TEST_TIERS = "tests/kvcache/test_tiers.py::test_"
TEST_BLOCK_MOVES = "tests/engine/test_block_moves.py::test_"
SIMULATION = "tests/engine/test_simulation.py::test_every_invariant_holds_after_every_step"


@dataclass(frozen=True)
class Edit:
    """Text of one file that is replaced; `old` occurs in it exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """One thing that could be wrong.

    Attributes:
        name: What the product would do.
        why: What would come of it.
        edits: That make it so.
        tests: Each a pytest node; at least one must fail.
        says: A regular expression that the failure's text must match; "" is any assertion.
    """

    name: str
    why: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    says: str = ""


def fault(name: str, why: str, file: str, old: str, new: str, *tests: str, says: str = "") -> Fault:
    """Return a fault of one edit."""
    return Fault(name, why, (Edit(file, old, new),), tests, says)


CACHE = (
    fault(
        "hits never match everything",
        "with all of a prompt cached there are no logits to draw the first token from",
        MANAGER,
        "end = (len(token_ids) - (not last_too)) // size",
        "end = len(token_ids) // size",
        TEST_MANAGER + "hits_are_whole_blocks_and_never_the_last_token",
    ),
    fault(
        "a block is registered at plan",
        "others read a block before its KV is written, and a step that fails leaves it findable",
        SCHEDULER,
        "        self._drafts[request.request_id] = draft\n",
        "        self._drafts[request.request_id] = draft\n"
        "        end = draft.start + draft.num_tokens\n"
        "        self.kv._register(request.lease.table, end // self.config.block_size, request.lease.token_ids)\n",
        SIMULATION + "[0-xxh3]",
    ),
    fault(
        "the key forgets the namespace",
        "eight tenants with the same system prompt fill its key, and the ninth finds nothing",
        INDEX,
        "_pack_parent(namespace, 0 if parent is None else parent.serial)",
        "_pack_parent(0, 0 if parent is None else parent.serial)",
        TEST_INDEX + "one_content_in_many_namespaces_leaves_room_for_each",
    ),
    fault(
        "the comparison forgets the namespace",
        "a collision of keys, which can be made on purpose, reads another tenant's KV",
        INDEX,
        "entry.namespace == namespace and entry.parent is parent",
        "entry.parent is parent",
        TEST_INDEX + "other_tokens_another_parent_or_another_namespace_is_no_hit[constant]",
    ),
    fault(
        "the comparison forgets the tokens",
        "a collision of keys answers with another prompt's KV",
        INDEX,
        "entry.parent is parent and entry.tokens == tokens",
        "entry.parent is parent",
        TEST_INDEX + "other_tokens_another_parent_or_another_namespace_is_no_hit[constant]",
    ),
    fault(
        "the comparison forgets the parent",
        "a collision of keys answers with the KV of the same words after another prefix",
        INDEX,
        "entry.namespace == namespace and entry.parent is parent and entry.tokens == tokens",
        "entry.namespace == namespace and entry.tokens == tokens",
        TEST_INDEX + "other_tokens_another_parent_or_another_namespace_is_no_hit[constant]",
    ),
    fault(
        "a serial is used again",
        "a key that names a parent comes to mean another parent",
        INDEX,
        "        self.num_entries -= 1\n",
        "        self.num_entries -= 1\n        self._next_serial = entry.serial\n",
        TEST_INDEX + "a_parent_that_was_registered_again_is_another_parent",
    ),
    fault(
        "an entry leaves its siblings linked to it",
        "the subtree of a parent names blocks that were given to others",
        INDEX,
        "            entry.next_sibling.previous_sibling = entry.previous_sibling",
        "            pass",
        TEST_INDEX + "entries_leave_in_any_order_and_the_rest_stays_linked",
    ),
    fault(
        "a freed block is freed twice",
        "the pool has a block twice, and two conversations write to it",
        MANAGER,
        "        del table.block_ids[num_blocks:]\n        table.num_computed_tokens = num_tokens\n",
        "        table.num_computed_tokens = num_tokens\n",
        TEST_MANAGER + "free_is_idempotent",
    ),
    fault(
        "a released block is freed though it is shared",
        "the other holder's history is overwritten",
        POOL,
        "            block.ref_count -= 1\n",
        "            block.ref_count = 0\n",
        TEST_POOL + "a_block_with_two_holders_is_shared_until_one_lets_go",
    ),
    fault(
        "parents are evicted before their children",
        "children stay behind that nobody can find or free",
        POOL,
        "for block_id in reversed(block_ids):",
        "for block_id in block_ids:",
        TEST_POOL + "tails_are_evicted_before_the_prefixes_they_hang_on",
    ),
    fault(
        "the most recently used block is evicted first",
        "the hottest prefix is computed again and again",
        POOL,
        "account.cached.append(block)",
        "account.cached.appendleft(block)",
        TEST_POOL + "the_least_recently_used_is_evicted_first",
    ),
    fault(
        "a subtree outlives its root",
        "blocks hang on a parent that is gone, under a serial that never comes back",
        POOL,
        "for removed in reversed(list(entry.subtree())):",
        "for removed in [entry] if entry.first_child is None else [e for e in entry.subtree() if not e.first_child]:",
        TEST_POOL + "unregistering_a_block_takes_its_subtree_and_leaves_holders_alone",
        TEST_POOL + "what_hangs_on_an_evicted_public_block_goes_with_it",
    ),
    fault(
        "a floor is counted twice",
        "a tenant is told that there is no room where there is",
        POOL,
        "self._num_protected += num_protected - account.num_protected",
        "self._num_protected += num_protected",
        TEST_POOL + "a_floor_protects_against_other_tenants",
    ),
    fault(
        "a floor is ignored",
        "a tenant loses what it was promised",
        POOL,
        "elif candidate is account or candidate.num_resident > candidate.floor:",
        "elif candidate is not None:",
        TEST_POOL + "a_tenant_at_its_floor_is_passed_over_though_it_is_most_over_its_share",
    ),
    fault(
        "a floor holds against its own tenant",
        "a tenant is refused room that only it may use",
        POOL,
        "- (self._num_protected - account.num_protected)",
        "- self._num_protected",
        TEST_POOL + "a_floor_does_not_protect_a_tenant_against_itself",
    ),
    fault(
        "what is held does not count towards a floor",
        "a tenant that holds its floor keeps as much again in the cache",
        POOL,
        "max(0, account.floor - account.num_active)",
        "account.floor",
        TEST_POOL + "blocks_that_are_held_count_towards_the_floor",
    ),
    fault(
        "the tenant least over its share loses a block",
        "who uses little pays for who uses much",
        POOL,
        "return self.num_resident / self.weight",
        "return -self.num_resident / self.weight",
        TEST_POOL + "the_tenant_most_over_its_share_loses_a_block_first",
    ),
    fault(
        "the copy is skipped",
        "a fork writes into the conversation that it came from",
        MANAGER,
        "return block.ref_count > 1 or block.entry is not None",
        "return False",
        TEST_MANAGER + "a_fork_shares_every_block_and_its_first_append_copies_at_most_one",
    ),
    fault(
        "a registered block is written in place",
        "others find a block whose last slots are not what it was registered for",
        MANAGER,
        "return block.ref_count > 1 or block.entry is not None",
        "return block.ref_count > 1",
        TEST_MANAGER + "a_registered_block_that_was_trimmed_is_copied_before_it_is_written",
    ),
    fault(
        "a fork holds no reference to a partial block",
        "the partial block loses its owner, and goes to somebody else while the fork still reads it",
        MANAGER,
        "self.pool.hold(fork.block_ids)",
        "self.pool.hold(fork.block_ids[: fork.num_computed_tokens // self.block_size])",
        TEST_MANAGER + "a_fork_shares_every_block_and_its_first_append_copies_at_most_one",
        says="AssertionError|has no holder to release",
    ),
    fault(
        "a fork holds no reference at all",
        "the end of the source frees what the fork reads",
        MANAGER,
        "        self.pool.hold(fork.block_ids)\n",
        "",
        TEST_MANAGER + "a_fork_shares_every_block_and_its_first_append_copies_at_most_one",
        says="AssertionError|has no holder to release",
    ),
    fault(
        "a fork is one token too long",
        "an edit goes on after the token that it was to replace",
        MANAGER,
        "fork.num_computed_tokens = min(num_tokens, table.num_computed_tokens)",
        "fork.num_computed_tokens = min(num_tokens + 1, table.num_computed_tokens)",
        TEST_MANAGER + "a_fork_shares_every_block_and_its_first_append_copies_at_most_one",
    ),
    fault(
        "the source of a copy is let go before the step",
        "the copy reads a block that the same step gave to somebody else",
        MANAGER,
        "            allocation.copy_source, allocation.copy_target = block_ids[-1], fresh[0]\n",
        "            allocation.copy_source, allocation.copy_target = block_ids[-1], fresh[0]\n"
        "            pool.release((block_ids[-1],))\n",
        TEST_MANAGER + "the_source_of_a_copy_stays_until_commit",
    ),
    fault(
        "the source of a copy is never let go",
        "each edit loses a block for ever",
        MANAGER,
        "            self.pool.release((allocation.copy_source,))\n",
        "            pass\n",
        TEST_MANAGER + "the_source_of_a_copy_stays_until_commit",
    ),
    fault(
        "discard forgets the copy",
        "after a failed step a table goes on with a block that was never filled",
        MANAGER,
        "            fresh.insert(0, block_ids[-1])\n            block_ids[-1] = allocation.copy_source\n",
        "            pass\n",
        TEST_MANAGER + "discard_undoes_a_copy",
    ),
    fault(
        "discard forgets the new blocks",
        "each failed step loses blocks for ever",
        MANAGER,
        "        self.pool.release(fresh)\n",
        "",
        TEST_MANAGER + "discard_gives_back_what_the_plan_took",
    ),
    fault(
        "trim keeps the count of registered blocks",
        "blocks after an edit are never registered, so nothing after it is ever shared",
        MANAGER,
        "        table.num_registered_blocks = min(table.num_registered_blocks, num_tokens // self.block_size)\n",
        "",
        TEST_CORE + "a_shorter_base_trims_the_lease",
    ),
    fault(
        "a duplicate is never given back",
        "each prompt that is computed twice at once keeps its blocks for ever",
        MANAGER,
        "            self.pool.release((duplicate,))\n",
        "            pass\n",
        TEST_MANAGER + "equal_content_computed_twice_at_once_becomes_one_block",
    ),
    fault(
        "poisoned blocks can still be found",
        "KV that is not finite is read by the next request with the same prompt",
        MANAGER,
        "                self.pool.unregister(block_id)\n",
        "                pass\n",
        TEST_MANAGER + "blocks_of_a_poisoned_table_cannot_be_found_but_public_ones_can",
    ),
    fault(
        "private blocks are found under public ones by everybody",
        "a tenant finds another one's continuation of the public system prompt",
        MANAGER,
        "        return self.index.find(namespace, parent, tokens)",
        "        child = parent.first_child if parent is not None else None\n"
        "        while child is not None and child.tokens != tokens:\n"
        "            child = child.next_sibling\n"
        "        return child or self.index.find(namespace, parent, tokens)",
        TEST_MANAGER + "public_blocks_are_found_by_everybody_and_what_follows_is_private",
    ),
)

LEASE_FAULTS = (
    fault(
        "a lease is reclaimed while its request runs",
        "a running request's blocks are given away under it",
        LEASES,
        "                holders.pop(lease.lease_id, None)\n",
        "                pass\n",
        TEST_LEASES + "an_active_lease_is_never_reclaimed",
    ),
    fault(
        "the partial block of a lease is dropped after its turn",
        "each turn computes the end of the last one again",
        LEASES,
        "        self.used[lease.lease_id] = lease\n",
        "        self.used[lease.lease_id] = lease\n"
        "        size = self._manager.block_size\n"
        "        self._manager.trim(lease.table, lease.table.num_computed_tokens // size * size)\n",
        TEST_LEASES + "the_partial_block_stays_with_an_idle_lease",
    ),
    fault(
        "the lease used last shrinks first",
        "who just spoke waits longest for the next answer",
        LEASES,
        "((d, False) for d in tenants[tenant].values())",
        "((d, False) for d in reversed(tenants[tenant].values()))",
        TEST_LEASES + "the_longest_idle_lease_shrinks_first_and_from_its_tail",
    ),
    fault(
        "queued turns are reclaimed before idle leases",
        "whoever waits for an answer loses what it has before those who do not",
        LEASES,
        "for states in ((LeaseState.IDLE, LeaseState.ATTACHED), (LeaseState.QUEUED,)):",
        "for states in ((LeaseState.QUEUED,), (LeaseState.IDLE, LeaseState.ATTACHED)):",
        TEST_LEASES + "a_queued_turn_goes_after_everything_idle_shared_blocks_included",
    ),
    fault(
        "a floor does not protect leases",
        "other tenants' prompts take the conversations that a floor was to keep",
        LEASES,
        "return other is account or other.cached.length < other.num_resident - other.floor",
        "return True",
        TEST_LEASES + "a_lease_below_its_tenants_floor_is_not_shrunk_for_others_at_all",
    ),
    fault(
        "a trim during a turn is forgotten",
        "a conversation goes on with what was cut off",
        LEASES,
        "            self.trim(lease, lease.trim_to)\n",
        "            pass\n",
        TEST_CORE + "trim_cuts_an_idle_lease_at_once_and_a_busy_one_at_the_end_of_its_turn",
    ),
    fault(
        "a closed lease keeps its blocks",
        "each conversation that is closed loses memory for ever",
        LEASES,
        "        self._manager.free(lease.table)\n        self.num_tokens -=",
        "        self.num_tokens -=",
        TEST_LEASES + "closing_gives_everything_back_and_closing_again_changes_nothing",
    ),
)

SCHEDULE_FAULTS = (
    fault(
        "a failed row is committed",
        "NaN stays in the cache for whoever has the same prompt",
        SCHEDULER,
        "                self.kv.discard(draft.allocation)\n                self.kv.poison(request.lease.table)\n",
        "                self.kv.commit(draft.allocation, end, ids)\n",
        TEST_CORE + "logits_that_are_not_finite_fail_their_request_only_and_its_blocks_leave_the_cache",
    ),
    fault(
        "output tokens are not charged",
        "a tenant with long answers gets more than its weight",
        LEDGER,
        "        self.counters.charge(request.tenant, OUTPUT_TOKEN_COST)\n",
        "",
        TEST_SCHEDULER + "an_answers_tokens_are_service_as_a_prompts_are",
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
        "self.counter(tenant) + cost / self.weight(tenant)",
        "self.counter(tenant) + cost",
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
        "a preempted request keeps its blocks",
        "preemption frees nothing, and the step cannot run",
        SCHEDULER,
        "        self.leases.free(victim.lease)\n        self.running.remove(victim)\n",
        "        self.running.remove(victim)\n",
        SIMULATION + "[4-xxh3]",
    ),
    fault(
        "a preempted request keeps its rows in the step",
        "the step computes what it has no blocks for",
        SCHEDULER,
        "        if draft is not None:\n            self.kv.discard(draft.allocation)\n",
        "        if draft is not None:\n            self._drafts[victim.request_id] = draft\n",
        SIMULATION + "[1-xxh3]",
    ),
    fault(
        "decodes do not count as rows of the step",
        "a step has more rows than its budget",
        SCHEDULER,
        "self.config.max_num_batched_tokens - rows, seconds, least=1",
        "self.config.max_num_batched_tokens, seconds, least=1",
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
        "        self.leases.append(request.lease, token_id)\n",
        "        if token_id not in request.stop_ids:\n            self.leases.append(request.lease, token_id)\n",
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
        SCHEDULER,
        "            self.kv.discard(draft.allocation)\n        self.moves.discard(drafts)\n",
        "            pass\n        self.moves.discard(drafts)\n",
        SIMULATION + "[0-xxh3]",
    ),
    fault(
        "a release leaves its request running",
        "a conversation that was deleted goes on and keeps its blocks",
        CORE,
        "        self.leases.close(lease)\n\n    def _request_on",
        "\n    def _request_on",
        TEST_CORE + "release_ends_what_runs_on_the_lease",
    ),
)

MODEL_FAULTS = (
    fault(
        "a draw does not count its position",
        "a sampled answer repeats one random number at every token",
        "chatd/engine/philox.py",
        "counters[:, 0] = position_words & _LOW_WORD",
        "counters[:, 0] = 0",
        "tests/engine/test_sampler.py::test_a_seed_gives_other_tokens_at_other_positions_and_the_same_again",
    ),
    fault(
        "a row does not see its own token",
        "attention's causal limit is off by one at every chunk boundary",
        "kernels/chatd_kernels/paged_attention/schedule.py",
        "np.arange(1, num_tokens + 1) - bounds[sequence_of]",
        "np.arange(1, num_tokens + 1) - bounds[sequence_of] - (np.arange(num_tokens) > bounds[sequence_of])",
        "tests/engine/test_input_batch.py::test_rows_of_prefills_and_decodes_lie_in_the_order_of_the_plan",
    ),
    fault(
        "attention reads one slot past the length",
        "an answer depends on what a block held before",
        "kernels/chatd_kernels/paged_attention/schedule.py",
        "np.arange(1, num_tokens + 1) - bounds[sequence_of]",
        "np.arange(2, num_tokens + 2) - bounds[sequence_of]",
        "tests/kernels/test_paged_attention.py::test_one_row_at_the_edges_of_blocks_and_segments_matches_torch",
    ),
    fault(
        "KV is written to the wrong slot at a block's edge",
        "the first token of each block overwrites the last block's first one",
        "chatd/engine/input_batch.py",
        "attention.block_tables[attention.sequence_of, positions // block_size]",
        "attention.block_tables[attention.sequence_of, np.maximum(positions - 1, 0) // block_size]",
        "tests/engine/test_input_batch.py::test_rows_of_prefills_and_decodes_lie_in_the_order_of_the_plan",
    ),
    fault(
        "slots have 32 bits",
        "in a large pool the number of a slot overflows, and KV is written anywhere",
        "chatd/engine/input_batch.py",
        ".astype(np.int64)\n        slot_mapping = blocks * block_size + positions % block_size",
        ".astype(np.int32)\n"
        "        slot_mapping = (blocks * np.int32(block_size)).astype(np.int64) + positions % block_size",
        "tests/engine/test_input_batch.py::test_slots_of_a_large_pool_have_more_than_32_bits",
    ),
)

SESSION_FAULTS = (
    fault(
        "half a character is sent",
        "a client shows U+FFFD where the answer has an emoji",
        "chatd/sessions/detokenizer.py",
        "            return self._decoder.decode(token_bytes[ids[0]])",
        "            return self._decoder.decode(token_bytes[ids[0]], final=True)",
        "tests/sessions/test_detokenizer.py::test_a_character_is_sent_once_its_last_byte_is_there",
    ),
    fault(
        "the beginning of a stop string is sent",
        "a client sees what it asked never to see",
        "chatd/sessions/stop_strings.py",
        "num_held = max((automaton.state for automaton in self._automatons), default=0)",
        "num_held = 0",
        "tests/sessions/test_stop_strings.py::test_no_part_of_a_stop_string_that_comes_to_be_matched_is_ever_sent",
    ),
    fault(
        "an event is missing after a reconnect",
        "a client's answer has a hole",
        "chatd/sessions/events.py",
        "start = len(self._events) - missed",
        "start = len(self._events) - missed + 1",
        "tests/sessions/test_events.py::test_what_was_missed_is_given_exactly",
    ),
    fault(
        "what the ring no longer has is not missed",
        "a client that was away long goes on with a hole and is not told",
        "chatd/sessions/events.py",
        "if missed < 0 or missed > len(self._events):",
        "if missed < 0:",
        "tests/sessions/test_events.py::test_what_the_ring_no_longer_has_is_not_guessed",
        says="AssertionError|assert|IndexError",
    ),
    fault(
        "events come before the answer to attach",
        "a client sees deltas of a session that it does not know yet, and again in the snapshot",
        "chatd/sessions/events.py",
        "        self._waiting: list[Event] | None = list(replay)",
        "        self._waiting: list[Event] | None = None",
        "tests/sessions/test_events.py::test_a_held_subscription_keeps_the_order",
    ),
    fault(
        "a command that comes twice is done twice",
        "a client that reconnects asks its question again",
        "chatd/server/idempotency.py",
        "            known = answers.by_id.get(command.id)\n",
        "            known = None\n",
        "tests/server/test_idempotency.py::test_the_first_answer_is_given_again_to_the_same_user_only",
    ),
    fault(
        "a foreign session can be named",
        "who guesses an id reads somebody else's conversation",
        "chatd/sessions/store.py",
        "session = self._by_owner.get(owner, {}).get(session_id)",
        "session = next((s[session_id] for s in self._by_owner.values() if session_id in s), None)",
        "tests/sessions/test_isolation.py::test_a_foreign_session_and_an_unknown_one_are_refused_in_the_same_words",
    ),
    fault(
        "a second turn begins beside the first",
        "two answers are written into one conversation",
        "chatd/sessions/turns.py",
        "    if session.turn is not None:\n        raise Conflict(",
        "    if session.turn is not None and session.closed:\n        raise Conflict(",
        "tests/sessions/test_manager.py::test_a_second_turn_is_refused_while_one_runs",
    ),
    fault(
        "a refused turn leaves the session busy",
        "a session that once was refused something never answers again",
        "chatd/sessions/turns.py",
        "        except BaseException:\n            self._free(turn)\n            raise\n        return turn",
        "        except BaseException:\n            raise\n        return turn",
        "tests/sessions/test_manager.py::test_whatever_the_encoder_raises_the_session_is_free_again",
    ),
    fault(
        "a failed turn stays in the history",
        "the next prompt has a question that was never answered",
        "chatd/sessions/turns.py",
        "            session.conversation.remove_from(turn.first_node, turn.previous_head)\n        finally:",
        "            pass\n        finally:",
        "tests/sessions/test_manager.py::test_a_turn_that_fails_leaves_the_session_as_it_was",
    ),
)

SAVE = """        if plan.stores:
            store_blocks(cache, self._slots, _pairs(plan.stores))
"""

DISK_FAULTS = (
    fault(
        "the checksum is not compared",
        "a bit that flipped on the disk becomes somebody's answer",
        BLOCK_FILE,
        "if not is_whole or found[_CHECKSUM] != _checksum(found, payload):",
        "if not is_whole:",
        TEST_BLOCK_FILE + "a_flipped_bit_is_refused_wherever_it_is",
        says="DID NOT RAISE",
    ),
    fault(
        "a file is served for its name alone",
        "a file of another tenant that was moved under this name is read",
        BLOCK_FILE,
        "        if found != expected:",
        "        if not found.startswith(_MAGIC):",
        TEST_BLOCK_FILE + "a_whole_file_of_another_content_is_refused",
        says="DID NOT RAISE",
    ),
    fault(
        "a refused payload stays in its slot",
        "bytes that nobody vouches for are where a block is expected",
        BLOCK_FILE,
        "            payload[:] = bytes(len(payload))\n",
        "",
        TEST_BLOCK_FILE + "a_flipped_bit_is_refused_wherever_it_is",
    ),
    fault(
        "others can read the files",
        "every user of the machine reads everybody's conversations",
        BLOCK_FILE,
        "os.open(path, _WRITE_FLAGS, 0o600)",
        "os.open(path, _WRITE_FLAGS, 0o644)",
        TEST_BLOCK_FILE + "only_the_user_can_read_a_file",
    ),
    fault(
        "the disk drops what was used last",
        "the disk is full of what nobody comes back to",
        DISK_TIER,
        "oldest, _ = self._stored.popitem(last=False)",
        "oldest, _ = self._stored.popitem()",
        TEST_DISK_TIER + "what_was_not_used_for_longest_goes_first",
    ),
    fault(
        "a read from the disk is no use",
        "what is needed again and again is dropped like what is not",
        DISK_TIER,
        "            self._stored.move_to_end(digest)\n            self._reads.append",
        "            self._reads.append",
        TEST_DISK_TIER + "what_was_not_used_for_longest_goes_first",
    ),
    fault(
        "a forgotten block keeps its file",
        "what was erased is still on the disk",
        DISK_TIER,
        "            del self._stored[digest]\n            self._unwanted[digest] = None\n",
        "            del self._stored[digest]\n",
        TEST_DISK_TIER + "forgetting_removes_the_file",
    ),
    fault(
        "a block that is forgotten while it is written is kept",
        "what was erased comes back a moment later",
        DISK_TIER,
        '            if job.is_forgotten:\n                return "forgotten"  # and',
        '            if job is None:\n                return "forgotten"  # and',
        TEST_DISK_TIER + "what_is_forgotten_while_it_is_written_is_removed",
    ),
    fault(
        "files that cannot be removed take no room",
        "the disk fills beyond what it was given",
        DISK_TIER,
        "return len(self._stored) + len(self._unwanted | self._undeletable)",
        "return len(self._stored)",
        TEST_DISK_TIER + "files_that_cannot_be_removed_are_counted_until_they_are",
    ),
    fault(
        "two daemons share a directory",
        "each removes files that the other counts on",
        "chatd/kvcache/block_directory.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "tests/kvcache/test_block_directory.py::test_a_second_user_is_refused_until_the_first_is_gone",
        says="DID NOT RAISE",
    ),
    fault(
        "neighbors on one side are moved as one",
        "the host gets another block than the one that was saved",
        "kernels/chatd_kernels/swap_blocks/__init__.py",
        "(runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (block, slot)",
        "runs[-1][0] + runs[-1][2] == block",
        "tests/kernels/test_swap_blocks.py::test_moves_are_those_of_the_reference_bit_for_bit",
    ),
    Fault(
        "blocks are saved after the step's copies",
        "what is saved is what the plan has just written over it",
        (
            Edit(MODEL_RUNNER, SAVE + "        stored =", "        stored ="),
            Edit(MODEL_RUNNER, "        copied =", SAVE + "        copied ="),
        ),
        (TEST_MOVES + "stores_come_before_copies_and_loads_and_these_before_the_forward",),
    ),
)

TIER_FAULTS = (
    fault(
        "a block below the pool is named without its tenant",
        "a tenant loads another one's KV",
        DIGESTS,
        "self._of(tenant)[1].copy()",
        "self._of(None)[1].copy()",
        TEST_DIGESTS + "nothing_of_another_tenant_model_or_key_has_the_same_name",
        TEST_BLOCK_MOVES + "a_turn_in_another_tenants_name_finds_nothing",
    ),
    fault(
        "a block below the pool is named by its own tokens alone",
        "the same words after another prefix are loaded",
        DIGESTS,
        "self._link(parent + token_ids[place * size : (place + 1) * size].tobytes())",
        "self._link(token_ids[place * size : (place + 1) * size].tobytes())",
        TEST_DIGESTS + "a_digest_names_the_whole_prefix",
    ),
    fault(
        "names outlive the ids that they are of",
        "a session that was cut and went on otherwise loads what it said before",
        LEASES,
        "            del lease.chain[num_full:]\n            del lease.digests[num_full:]\n",
        "",
        TEST_LEASES + "digests_are_cut_with_the_ids_and_shared_by_forks",
    ),
    fault(
        "a stored block is found at plan",
        "a slot is loaded, or written to the disk, before anything is in it",
        TIERS,
        "        block.entry = entry\n        self._blocks[digest] = block\n",
        "        block.entry = entry\n        self._blocks[digest] = block\n        self._make_ready(block)\n",
        TEST_TIERS + "a_stored_block_is_found_when_it_is_settled_and_not_before",
    ),
    fault(
        "what a failed step stored is kept",
        "a slot is loaded that nothing was written to",
        MOVES,
        "            self.tiers.cancel(block)\n",
        "            self.tiers.settle(block)\n",
        TEST_BLOCK_MOVES + "a_stored_block_is_not_found_before_its_plan_is_committed",
    ),
    fault(
        "a slot that is read can be given up",
        "what is loaded, or written to the disk, changes meanwhile",
        TIERS,
        "        block.num_pins += 1\n        if block.num_pins == 1:\n            self._dequeue(block)\n",
        "        block.num_pins += 1\n",
        TEST_TIERS + "a_pinned_slot_stays_and_comes_back_as_the_one_used_last",
        says="pop from empty list",
    ),
    fault(
        "a fetched block is found before the disk has read it",
        "a request loads what the slot held before",
        TIERS,
        "        self._blocks[digest] = self._reading[slot] = HostBlock(digest, origin, slot, tenant, lease_id)\n",
        "        self._blocks[digest] = self._reading[slot] = HostBlock(digest, origin, slot, tenant, lease_id)\n"
        "        self._make_ready(self._blocks[digest])\n",
        TEST_TIERS + "a_fetched_block_is_found_when_the_disk_says_that_it_is_whole",
    ),
    fault(
        "a block that cannot be read is asked for again and again",
        "a damaged file keeps a session waiting at every turn",
        TIERS,
        "                    self.disk.forget(block.digest)\n",
        "                    pass\n",
        TEST_TIERS + "a_block_that_cannot_be_read_is_forgotten[checksum]",
    ),
    fault(
        "the last token is loaded too",
        "there are no logits to draw the next token from",
        MOVES,
        "(len(lease.token_ids) - 1) // self._config.block_size",
        "len(lease.token_ids) // self._config.block_size",
        TEST_BLOCK_MOVES + "the_last_token_is_computed_although_its_block_could_be_loaded",
    ),
    fault(
        "what may hold NaN stays below the pool",
        "a turn that failed fails again whenever its KV is loaded",
        SCHEDULER,
        "                self.moves.forget(request.lease)\n",
        "",
        TEST_BLOCK_MOVES + "what_may_hold_nan_is_forgotten_below_the_pool_too",
    ),
    fault(
        "a victim is swapped whatever that costs",
        "where the model computes sooner than the system copies, preemption takes longer than it must",
        PREEMPTION,
        "self._swap_s(request.num_computed_tokens, num_own, num_missing) < self._recompute_s(request)",
        "self._swap_s(request.num_computed_tokens, num_own, num_missing) < 1e9",
        TEST_PREEMPTION + "swapping_is_cheaper_or_not_by_what_copies_and_rows_take",
    ),
)

FAULTS = CACHE + LEASE_FAULTS + SCHEDULE_FAULTS + MODEL_FAULTS + SESSION_FAULTS + DISK_FAULTS + TIER_FAULTS
