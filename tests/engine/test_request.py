"""A request: what fits, how it ends, how its next token is drawn."""

import pytest

from chatd.engine.messages import FinishReason, RequestClass
from chatd.engine.plan import RequestId
from chatd.engine.request import Request, check_fits, stop_ids_of
from chatd.engine.sampling import SamplingParams
from chatd.errors import ContextLengthExceeded
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.prefix_index import PrefixIndex
from chatd.testing.engine import NAMESPACE


def make_request(num_prompt=3, num_output=0, **params):
    kv = KVCacheManager(BlockPool(8, PrefixIndex()), 4, NAMESPACE)
    leases = LeaseTable(kv, 4, 100)
    lease = leases.open(1, "acme")
    leases.extend(lease, range(10, 10 + num_prompt))
    sampling = SamplingParams(**({"max_tokens": 5} | params))
    stop_ids = stop_ids_of(sampling, frozenset())
    request = Request(
        RequestId(1), lease, sampling, RequestClass.BATCH, keep_lease=True, stop_ids=stop_ids, arrival_s=1.0
    )
    leases.extend(lease, range(100, 100 + num_output))
    return request


@pytest.mark.parametrize("num_tokens", [1, 62, 63])
def test_a_prompt_with_room_for_one_token_of_answer_fits(num_tokens):
    check_fits(num_tokens, max_model_len=64, usable_blocks=16, block_size=4)


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers():
    with pytest.raises(ContextLengthExceeded, match="prompt has 64 tokens, the limit is 63"):
        check_fits(64, max_model_len=64, usable_blocks=100, block_size=4)


def test_a_prompt_that_the_pool_can_never_hold_is_refused_with_the_numbers():
    with pytest.raises(ContextLengthExceeded, match="prompt has 40 tokens, the KV pool has room for 39"):
        check_fits(40, max_model_len=1000, usable_blocks=10, block_size=4)
    check_fits(39, max_model_len=1000, usable_blocks=10, block_size=4)


def test_a_stop_id_ends_an_answer_once_it_has_its_least_tokens():
    assert make_request(num_output=1, stop_token_ids=(100,)).finish_reason(100, 64) is FinishReason.STOP
    assert make_request(num_output=1, stop_token_ids=(100,), min_tokens=1).finish_reason(100, 64) is None
    request = make_request(num_output=2, stop_token_ids=(101,), min_tokens=1)
    assert request.finish_reason(101, 64) is FinishReason.STOP


def test_the_stop_id_goes_before_the_limit_and_the_limit_before_the_context():
    request = make_request(num_prompt=3, num_output=5, stop_token_ids=(104,))
    assert request.finish_reason(104, 8) is FinishReason.STOP
    assert request.finish_reason(7, 8) is FinishReason.MAX_OUTPUT_TOKENS
    request = make_request(num_prompt=3, num_output=4)
    assert request.finish_reason(7, 7) is FinishReason.CONTEXT
    assert request.finish_reason(7, 8) is None


def test_ignore_eos_keeps_the_stop_ids_that_are_not_the_models():
    params = SamplingParams(max_tokens=1, stop_token_ids=(2, 7), ignore_eos=True)
    assert stop_ids_of(params, frozenset({2})) == {7}
    assert stop_ids_of(params, frozenset()) == frozenset()
    assert stop_ids_of(SamplingParams(max_tokens=1, stop_token_ids=(2, 7)), frozenset({2})) == {2, 7}


def test_stop_ids_are_forbidden_while_the_answer_is_too_short():
    assert make_request(stop_token_ids=(9, 2), min_tokens=1).sample_spec().stop_token_ids == (2, 9)
    assert make_request(num_output=1, stop_token_ids=(9, 2), min_tokens=1).sample_spec().stop_token_ids == ()


def test_the_draw_is_numbered_by_its_place_in_the_answer():
    assert make_request(num_output=0).sample_spec().output_position == 0
    assert make_request(num_output=3).sample_spec().output_position == 3


def test_history_is_handed_over_only_where_the_parameters_need_it():
    assert make_request(num_output=2).sample_spec().prompt_ids == ()
    spec = make_request(num_output=2, frequency_penalty=0.5).sample_spec()
    assert list(spec.prompt_ids) == [10, 11, 12]
    assert list(spec.output_ids) == [100, 101]


def test_timings_of_a_request_that_never_ran_are_all_queue():
    timings = make_request().timings(4.0)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (3.0, 0.0, 0.0)
