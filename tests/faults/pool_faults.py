"""Faults of what the pool tells: of single blocks, of bills, of what was evicted, and to whom."""

from __future__ import annotations

from seeded_fault import fault

CELLS = "chatd/server/pool_cells.py"
VIEW = "chatd/server/pool_view.py"
INSPECTION = "chatd/engine/inspection.py"
HOLDINGS = "chatd/kvcache/holdings.py"
MANAGER = "chatd/kvcache/manager.py"
TEST_TENANTS = "tests/server/test_pool_tenants.py::test_"
TEST_CELLS = "tests/server/test_pool_cells.py::test_"
TEST_VIEW = "tests/server/test_pool_view.py::test_"
TEST_INSPECTION = "tests/engine/test_inspection.py::test_"

POOL_FAULTS = (
    fault(
        "a cell names everybody who holds it",
        "a user reads the ids of another user's conversations",
        CELLS,
        "        if is_own or sees_all:\n",
        "        if True:\n",
        TEST_TENANTS + "nobody_is_told_of_others_but_the_operator_and_nobody_s_words_are_told",
        TEST_CELLS + "a_user_is_told_its_own_sessions_and_how_many_others_hold_the_block",
    ),
    fault(
        "a cell tells the operator others' titles",
        "an operator reads what other people wrote",
        CELLS,
        'title=holder.title if is_own else "",',
        "title=holder.title,",
        TEST_TENANTS + "nobody_is_told_of_others_but_the_operator_and_nobody_s_words_are_told",
        TEST_CELLS + "the_operator_is_told_whose_a_block_is_and_no_titles_but_its_own",
    ),
    fault(
        "a tenant points at blocks where they lie",
        "one tenant learns of another's blocks, by their places and one by one",
        CELLS,
        "tenant = None if is_everything else self._principal.tenant",
        "tenant = None",
        TEST_TENANTS + "what_a_tenant_is_told_stays_the_same_when_another_one_comes",
        TEST_CELLS + "a_tenant_s_answers_are_the_same_bytes_whatever_others_do",
    ),
    fault(
        "a tenant's blocks are numbered with everybody's",
        "what a tenant is told of its cells depends on what others have",
        INSPECTION,
        "                if pool.owners[block_id] == account.index:\n",
        "                if True:\n",
        TEST_INSPECTION + "public_blocks_are_in_no_tenant_s_numbers",
    ),
    fault(
        "a shared block is billed to each of its holders in full",
        "the bills are more than there is",
        HOLDINGS,
        "parts += 1.0 / blocks[block_id].ref_count",
        "parts += 1.0",
        TEST_INSPECTION + "a_shared_block_is_split_among_those_who_hold_it",
        TEST_VIEW + "the_bills_of_all_sessions_and_the_public_blocks_are_the_active_ones",
    ),
    fault(
        "a public block is billed by how many hold it",
        "a bill tells a tenant how many others have the same system prompt",
        HOLDINGS,
        "        if owners[block_id] == NOBODY:\n            num_shared += 1\n        elif states",
        "        if states",
        TEST_INSPECTION + "public_blocks_are_nobody_s_and_a_bill_does_not_say_who_else_holds_them",
    ),
    fault(
        "what was evicted is missed at every try",
        "a request that waits counts the same loss at each step",
        "chatd/kvcache/recently_evicted.py",
        "find = self._serials.pop if forget else self._serials.get",
        "find = self._serials.get",
        "tests/kvcache/test_recently_evicted.py::test_a_sequence_is_followed_from_block_to_block_and_each_is_taken_once",
        TEST_INSPECTION + "nothing_of_a_sequence_that_is_forgotten_is_remembered_as_evicted",
    ),
    fault(
        "an erased tenant's evictions are remembered",
        "a trace of what an erased tenant had stays",
        MANAGER,
        "        account.evicted.clear()\n",
        "",
        TEST_INSPECTION + "nothing_of_a_tenant_that_is_erased_is_remembered_as_evicted",
    ),
    fault(
        "a tenant is told its share of the pool",
        "a share tells how many others there are",
        VIEW,
        "return _View(totals, [_tenant_row(row)], counts, [])",
        "return _View(totals, [_tenant_row(row, share=1.0 / len(frame.tenants))], counts, [])",
        TEST_VIEW + "a_tenant_sees_its_own_floor_and_losses_and_no_share_that_tells_who_else_is_there",
    ),
)
