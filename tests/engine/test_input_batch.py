import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.engine.input_batch import InputBatch, _BlockRow
from chatd.engine.plan import Chunk, Plan, SampleSpec
from chatd.engine.sampling import SamplingParams
from chatd_kernels.kv_cache import KVCacheLayout

LAYOUT = KVCacheLayout(num_layers=1, num_kv_heads=1, block_size=16, head_dim=16, dtype=torch.float16)
SAMPLE = SampleSpec(SamplingParams(max_tokens=4), 0)


def batch():
    return InputBatch(LAYOUT, 2)


def plan(*chunks):
    return Plan(0, chunks, (), 16)


def test_rows_of_prefills_and_decodes_lie_in_the_order_of_the_plan():
    inputs = batch().build(
        plan(
            Chunk(7, 14, [5, 6, 7, 8], [40, 41], None),
            Chunk(8, 33, [9], [10, 11, 12], SAMPLE),
            Chunk(9, 0, [1, 2], [3], SAMPLE),
        )
    )
    assert inputs.token_ids.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert inputs.positions.tolist() == [14, 15, 16, 17, 33, 0, 1]
    assert inputs.slot_mapping.tolist() == [40 * 16 + 14, 40 * 16 + 15, 41 * 16, 41 * 16 + 1, 12 * 16 + 1, 48, 49]
    assert inputs.logits_rows.tolist() == [4, 6]
    assert inputs.attention.sequence_of.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert inputs.attention.lengths.tolist() == [15, 16, 17, 18, 34, 1, 2]
    assert inputs.attention.block_tables.tolist() == [[40, 41, -1], [10, 11, 12], [3, -1, -1]]
    assert inputs.token_ids.dtype == inputs.positions.dtype == inputs.slot_mapping.dtype == torch.int64


def test_slots_of_a_large_pool_have_more_than_32_bits():
    block_id = 2**31 - 1
    inputs = batch().build(plan(Chunk(1, 15, [5, 6], [block_id - 1, block_id], SAMPLE)))
    assert inputs.slot_mapping.tolist() == [block_id * 16 - 1, block_id * 16]


def test_a_plan_of_another_block_size_is_a_fault():
    with pytest.raises(AssertionError, match="a plan of 32-token blocks"):
        batch().build(Plan(0, (Chunk(1, 0, [1], [0], None),), (), 32))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["append", "trim", "replace", "other"]), st.integers(0, 80)), max_size=30))
def test_a_table_follows_the_plan_whatever_changed_between_steps(changes):
    row = _BlockRow()
    ids = [3]
    fresh = iter(range(100, 100_000))
    for kind, number in changes:
        match kind:
            case "append":
                ids += [next(fresh) for _ in range(number)]
            case "trim":
                del ids[max(1, number) :]
            case "replace":
                ids[number % len(ids)] = next(fresh)
            case "other":
                ids = [next(fresh) for _ in range(number + 1)]
        assert row.update(ids).tolist() == ids


def test_tables_of_requests_that_are_gone_are_dropped():
    one = batch()
    for request in range(1000):
        one.build(plan(Chunk(request, 0, [1], [request], None)))
    assert len(one._rows) < 100
    assert np.array_equal(one.build(plan(Chunk(5, 0, [1], [9], None))).attention.block_tables, [[9]])
