"""Faults of the tiers below the pool, and of preemption that saves to them."""

from __future__ import annotations

from seeded_fault import SIMULATION, fault

LEASES = "chatd/kvcache/leases.py"
SCHEDULER = "chatd/engine/scheduler.py"
PREEMPTION = "chatd/engine/preemption.py"
DIGESTS = "chatd/kvcache/digests.py"
TIERS = "chatd/kvcache/tiers.py"
MOVES = "chatd/engine/block_moves.py"
TEST_LEASES = "tests/kvcache/test_leases.py::test_"
TEST_PREEMPTION = "tests/engine/test_preemption.py::test_"
TEST_DIGESTS = "tests/kvcache/test_digests.py::test_"
TEST_TIERS = "tests/kvcache/test_tiers.py::test_"
TEST_BLOCK_MOVES = "tests/engine/test_block_moves.py::test_"

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
        "        self._blocks[digest] = self._storing[slot] = block\n",
        "        self._blocks[digest] = self._storing[slot] = block\n        self._make_ready(block)\n",
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
        "self._blocks[digest] = self._reading[slot] = HostBlock(digest, origin, slot, tenant, lease_id)\n",
        "self._blocks[digest] = self._reading[slot] = HostBlock(digest, origin, slot, tenant, lease_id)\n"
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
        "                self.moves.below.forget(lease)\n",
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
    fault(
        "a pin is never dropped",
        "the host's buffer fills with blocks that nobody can give up",
        MOVES,
        "        for block in reversed(loads):\n            self.tiers.unpin(block)\n",
        "        pass\n",
        SIMULATION + "[7-xxh3]",
    ),
    fault(
        "what is forgotten frees its slot while the disk is on it",
        "the disk writes another session's bytes under this one's name",
        TIERS,
        "            block.is_dropped = True\n        else:\n",
        "            self._free.append(block.slot)\n        else:\n",
        TEST_TIERS + "what_is_forgotten_while_the_disk_is_on_it_frees_its_slot_only_then",
    ),
    fault(
        "swapping saves the unfinished block as a full one",
        "what is loaded back ends in slots that were never written",
        MOVES,
        "        num_full = computed // size\n        if not self.is_on or mode",
        "        num_full = -(-computed // size)\n        if not self.is_on or mode",
        SIMULATION + "[8-xxh3]",
    ),
    fault(
        "what is loaded counts one token more",
        "the first token after it is never computed, and swapping loses the tail",
        "chatd/engine/placement.py",
        "            start += len(loads) * self._config.block_size\n",
        "            start += len(loads) * self._config.block_size + 1\n",
        SIMULATION + "[7-xxh3]",
    ),
)
