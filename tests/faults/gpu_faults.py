"""Faults of what a GPU's steps are made of: staged inputs, tables that are sent in part, graphs, the pool's size."""

from __future__ import annotations

from seeded_fault import fault

RUNNER = "chatd/engine/gpu_runner.py"
SAMPLER = "chatd/engine/device_sampler.py"
SLOTS = "chatd/engine/sampling_slots.py"
TEST_RUNNER = "tests/engine/interpreted/test_gpu_runner.py::test_"
TEST_STARTUP = "tests/engine/interpreted/test_gpu_startup.py::test_"
TEST_SAMPLER = "tests/kernels/interpreted/test_device_sampler.py::test_"

GPU_FAULTS = (
    fault(
        "inputs are filled in while a step still reads them",
        "a step computes the tokens of the one that was launched after it",
        "chatd/engine/staged_arrays.py",
        "                ended.wait()",
        "                pass",
        "tests/engine/test_staged_arrays.py::test_memory_that_a_step_still_reads_is_waited_for",
    ),
    fault(
        "a table that has grown is taken for unchanged below",
        "a request that adopted a block and grew in one step attends to the block that it gave back",
        "chatd/engine/device_tables.py",
        "if num_known < num_wanted and ids == wanted[:num_known]:",
        "if num_known < num_wanted:",
        "tests/engine/test_device_tables.py::test_the_device_has_the_plans_tables_whatever_they_are",
    ),
    fault(
        "tables are not sent anew after a step that failed",
        "requests of a step that never ran attend to blocks of somebody else",
        "chatd/engine/device_tables.py",
        "            row.ids.clear()\n\n    def _row",
        "            row.ids.copy()\n\n    def _row",
        "tests/engine/test_device_tables.py::test_after_a_failed_step_everything_is_sent_anew",
    ),
    fault(
        "a full batch is given a graph that is too large",
        "no graph is left for the largest batch, and it runs kernel by kernel",
        "chatd/engine/decode_graphs.py",
        "place = bisect_left(self._sizes, num_rows)",
        "place = bisect_left(self._sizes, num_rows + 1)",
        "tests/engine/test_decode_graphs.py::test_a_batch_takes_the_next_larger_graph",
    ),
    fault(
        "what other processes hold of a GPU is not counted",
        "the pool does not fit, though the settings say that it should",
        "chatd/engine/memory.py",
        "int(total_bytes * utilization) - (total_bytes - free_bytes) - kept",
        "int(total_bytes * utilization) - kept",
        "tests/engine/test_memory.py::test_a_pool_on_a_gpu_is_what_weights_steps_and_graphs_leave_of_the_part_that_may_be"
        "_used",
    ),
    fault(
        "one filling of the inputs serves all steps",
        "no step is made ready before the one in flight has ended",
        "chatd/engine/staged_arrays.py",
        "_NUM_STAGES = 3",
        "_NUM_STAGES = 1",
        "tests/engine/test_staged_arrays.py::test_a_step_reads_what_was_staged_for_it_though_the_next_ones_are_made_ready",
    ),
    fault(
        "requests of one step lose their tables to each other",
        "two requests attend to the blocks of one",
        "chatd/engine/device_tables.py",
        "                self._rows.move_to_end(chunk.request_id)",
        "                pass",
        "tests/engine/test_device_tables.py::test_who_was_longest_away_gives_up_its_place_and_nobody_of_the_same_step",
    ),
    fault(
        "rows that fill a graph up own a slot",
        "somebody's first position is overwritten by every step that is not full",
        RUNNER,
        '("slots", -1)',
        '("slots", 0)',
        TEST_RUNNER + "a_padded_graph_writes_the_slots_of_its_requests_and_no_other",
    ),
    fault(
        "a row takes a token that another step drew",
        "an answer goes on with another one's token",
        RUNNER,
        "        sources.fill(-1)\n",
        "",
        TEST_RUNNER + "graphs_of_every_size_draw_what_single_kernels_do",
        TEST_RUNNER + "a_pending_token_is_what_the_step_before_draws",
    ),
    fault(
        "what a step draws is not kept for the next one",
        "a pending token is that of an earlier step",
        RUNNER,
        "                self._drawn[: len(specs)].copy_(sampled.tokens)\n",
        "",
        TEST_RUNNER + "a_pending_token_is_what_the_step_before_draws",
    ),
    fault(
        "a failed step's tables are taken as sent",
        "requests attend to blocks that are somebody else's",
        RUNNER,
        "        self._tables.forget()\n",
        "",
        TEST_RUNNER + "after_a_step_that_failed_tables_are_sent_anew",
    ),
    fault(
        "blocks are copied over before they are stored",
        "what is kept below the pool is another conversation's",
        RUNNER,
        "            if self._host is not None and stores:\n"
        "                store_blocks(cache, self._host.slots, stores, waits=False)\n"
        "            if copies:\n"
        "                copy_blocks(cache, copies)\n",
        "            if copies:\n"
        "                copy_blocks(cache, copies)\n"
        "            if self._host is not None and stores:\n"
        "                store_blocks(cache, self._host.slots, stores, waits=False)\n",
        TEST_RUNNER + "blocks_are_stored_before_they_are_copied_over_and_loaded_before_they_are_read",
    ),
    fault(
        "a batch with one greedy row is drawn as if all were",
        "a sampled answer is a greedy one whenever somebody beside it is greedy",
        SAMPLER,
        "        if all(spec.is_plain for",
        "        if any(spec.is_plain for",
        TEST_SAMPLER + "answers_are_those_of_the_hosts_sampler_whoever_comes_and_goes",
    ),
    fault(
        "the next step draws into what the host has not read",
        "an answer has the token of a later step",
        SAMPLER,
        "        return SampledInFlight(tokens, specs, state.vocab_size, host, self._free)\n",
        "        self._free.append(host)\n"
        "        return SampledInFlight(tokens, specs, state.vocab_size, host, self._free)\n",
        TEST_SAMPLER + "one_step_ahead_every_token_is_the_same_and_a_steady_batch_sends_nothing",
    ),
    fault(
        "a token of logits that are not finite is delivered",
        "a request goes on with token 0 where it should fail",
        SAMPLER,
        "            if num_bad[row]:",
        "            if num_bad[row] > self._vocab_size:",
        TEST_SAMPLER + "a_request_whose_logits_are_not_finite_fails_alone",
    ),
    fault(
        "a draw is repeated with the next one's number",
        "a request that was preempted has another answer than one that was not",
        SLOTS,
        "                slot.position != spec.output_position\n                or",
        "                slot.position < 0\n                or",
        TEST_SAMPLER + "a_step_that_was_discarded_is_drawn_again",
        TEST_SAMPLER + "answers_are_those_of_the_hosts_sampler_whoever_comes_and_goes",
    ),
    fault(
        "a slot keeps the parameters of its first request",
        "a request is drawn with another one's temperature",
        SLOTS,
        "                or slot.params is not spec.params\n",
        "",
        TEST_SAMPLER + "other_parameters_under_the_same_name_are_other_parameters",
    ),
    fault(
        "requests of one step lose their slots to each other",
        "two rows are drawn with one request's parameters",
        SLOTS,
        "                slots.move_to_end(request_id)\n",
        "                pass\n",
        TEST_SAMPLER + "answers_are_those_of_the_hosts_sampler_whoever_comes_and_goes",
        says="AssertionError|KeyError|row_slots|slot",
    ),
    fault(
        "a product is cut anew for every number of rows",
        "a conversation waits for seconds while a kernel is compiled that no step of the start-up has started",
        "kernels/chatd_kernels/linear/gpu.py",
        "num_tiles *= next_power_of_2(-(-num_rows // rows))",
        "num_tiles *= -(-num_rows // rows)",
        TEST_STARTUP + "every_product_is_compiled_before_it_serves",
    ),
    fault(
        "no step before a GPU serves has more rows than a context, but for one",
        "a conversation with a short context waits likewise while many others' prompts are computed",
        "chatd/engine/gpu_warm_up.py",
        "num_chunks = min(max_num_seqs, max(num_chunks, -(-number // max_model_len)))",
        "num_chunks = min(max_num_seqs, num_chunks)",
        TEST_STARTUP + "every_product_is_compiled_before_it_serves",
    ),
    fault(
        "no decodes that double are run before a GPU serves",
        "without graphs likewise, at the first step of so many decodes",
        "chatd/engine/gpu_warm_up.py",
        "for number in _doubling(_FEWEST_ROWS, max_num_seqs)",
        "for number in ()",
        TEST_STARTUP + "every_product_is_compiled_before_it_serves",
    ),
)
