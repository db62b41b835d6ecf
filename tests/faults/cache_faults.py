"""Faults of the cache: index, pool, block tables, leases."""

from __future__ import annotations

from seeded_fault import SIMULATION, fault

MANAGER = "chatd/kvcache/manager.py"
POOL = "chatd/kvcache/block_pool.py"
INDEX = "chatd/kvcache/prefix_index.py"
LEASES = "chatd/kvcache/leases.py"
ROSTER = "chatd/engine/roster.py"
TEST_MANAGER = "tests/kvcache/test_manager.py::test_"
TEST_POOL = "tests/kvcache/test_block_pool.py::test_"
TEST_INDEX = "tests/kvcache/test_prefix_index.py::test_"
TEST_LEASES = "tests/kvcache/test_leases.py::test_"
TEST_CORE = "tests/engine/test_core.py::test_"

CACHE_FAULTS = (
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
        ROSTER,
        "        self.drafts[request.request_id] = draft\n",
        "        self.drafts[request.request_id] = draft\n"
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
        "        del table.block_ids[num_blocks:]\n        table.num_computed_tokens = table",
        "        table.num_computed_tokens = table",
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
        "for removed in reversed(subtree):",
        "for removed in [entry] if entry.first_child is None else [e for e in subtree if not e.first_child]:",
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
        "fork.num_planned_tokens = min(num_tokens, table.num_computed_tokens)",
        "fork.num_planned_tokens = min(num_tokens + 1, table.num_computed_tokens)",
        TEST_MANAGER + "a_fork_shares_every_block_and_its_first_append_copies_at_most_one",
    ),
    fault(
        "the source of a copy is let go before the step",
        "the copy reads a block that the same step gave to somebody else",
        MANAGER,
        "            allocation.copy_source, allocation.copy_target = table.copying = block_ids[-1], fresh[0]\n",
        "            allocation.copy_source, allocation.copy_target = table.copying = block_ids[-1], fresh[0]\n"
        "            pool.release((block_ids[-1],))\n",
        TEST_MANAGER + "the_source_of_a_copy_stays_until_commit",
    ),
    fault(
        "the source of a copy is never let go",
        "each edit loses a block for ever",
        MANAGER,
        "            self._release(table, [allocation.copy_source])\n",
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
        "        self._release(table, fresh)\n",
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
        "            self._release(table, [duplicate])\n",
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
        "        self._manager.free(lease.table)\n        self._count_tokens(lease, -len",
        "        self._count_tokens(lease, -len",
        TEST_LEASES + "closing_gives_everything_back_and_closing_again_changes_nothing",
    ),
)
