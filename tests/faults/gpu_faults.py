"""Faults of what a GPU's steps are made of: staged inputs, tables that are sent in part, graphs, the pool's size."""

from __future__ import annotations

from seeded_fault import fault

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
)
