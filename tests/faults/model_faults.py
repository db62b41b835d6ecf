"""Faults of drawing, of attention, and of where KV is written."""

from __future__ import annotations

from seeded_fault import fault

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
        "kernels/chatd_kernels/paged_attention/batch.py",
        "np.arange(1, int(bounds[-1]) + 1) - bounds[sequence_of]",
        "np.arange(1, int(bounds[-1]) + 1) - bounds[sequence_of] - (np.arange(int(bounds[-1])) > bounds[sequence_of])",
        "tests/engine/test_input_batch.py::test_rows_of_prefills_and_decodes_lie_in_the_order_of_the_plan",
    ),
    fault(
        "attention reads one slot past the length",
        "an answer depends on what a block held before",
        "kernels/chatd_kernels/paged_attention/batch.py",
        "np.arange(1, int(bounds[-1]) + 1) - bounds[sequence_of]",
        "np.arange(2, int(bounds[-1]) + 2) - bounds[sequence_of]",
        "tests/kernels/test_paged_attention.py::test_one_row_at_the_edges_of_blocks_and_segments_matches_torch",
    ),
    fault(
        "attention reads to the end of a group of positions",
        "what a slot beyond the length holds decides an answer, where it is not zero by chance",
        "kernels/chatd_kernels/paged_attention/items.py",
        "min(256, length - segment * 256)",
        "min(256, (length - segment * 256 + 15) // 16 * 16)",
        "tests/engine/test_poison.py::test_no_unowned_slot_is_read[fp16-NaN]",
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
