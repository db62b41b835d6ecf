"""An answer that goes on where another engine, or another turn, left it: the same tokens as if it had never stopped."""

import numpy as np
import pytest

from chatd.engine.messages import Finish, FinishReason, Started
from chatd.engine.sampling import BeamSearch
from chatd.testing.engine import EngineHarness, engine_config, sampling_params

PROMPT = list(range(10, 23))
SAMPLED = {"temperature": 0.9, "seed": 5}
KINDS = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4, **SAMPLED},
    "greedy with penalties": {"repetition_penalty": 1.3, "frequency_penalty": 1.0},
    "nucleus": {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 9},
}


def harness(**config):
    return EngineHarness(engine_config(**config))


def answer_of(max_tokens=12, **params):
    return harness().generate(1, PROMPT, params=sampling_params(max_tokens, **params))


def go_on(engine, answer, **options):
    engine.submit(1, PROMPT + answer, num_answered=len(answer), **options)
    engine.run()
    return answer + engine.outputs.get(1, [])


@pytest.mark.parametrize("num_answered", [0, 1, 2, 3, 4, 8, 11])
def test_an_answer_goes_on_to_the_same_end(num_answered):
    whole = answer_of()
    engine = harness()
    assert go_on(engine, whole[:num_answered], params=sampling_params(12)) == whole
    done = engine.done[1]
    assert done.reason is FinishReason.MAX_OUTPUT_TOKENS
    assert (done.num_prompt_tokens, done.num_output_tokens) == (13, 12)
    assert done.timings.num_prefill_tokens == 13 + num_answered


def test_what_there_is_of_it_counts_for_the_least_length_and_its_stop_id():
    whole = answer_of()
    stop = {"stop_token_ids": (whole[5],)}
    engine = harness()
    assert go_on(engine, whole[:3], params=sampling_params(12, **stop)) == whole[:6]
    assert engine.done[1].reason is FinishReason.STOP
    # With six tokens at least, the sixth cannot end it; the fake draws it all the same.
    engine = harness()
    assert go_on(engine, whole[:3], params=sampling_params(12, min_tokens=6, **stop)) == whole


def test_what_is_cached_of_it_is_told_as_far_as_it_is_of_the_prompt():
    whole = answer_of()
    engine = harness()
    engine.generate(9, PROMPT, lease=5, params=sampling_params(12))
    engine.submit(1, [], lease=5, base_len=13 + 8, num_answered=8, params=sampling_params(12))
    engine.run()
    assert engine.outputs[1] == whole[8:]
    started = next(m for m in engine.messages if isinstance(m, Started) and m.request == 1)
    assert (started.num_prompt_tokens, started.num_cached_tokens) == (13, 13)
    assert (engine.done[1].num_prompt_tokens, engine.done[1].num_cached_tokens) == (13, 13)
    assert engine.done[1].num_output_tokens == 12


def test_a_tenant_pays_for_what_is_computed_of_an_answer_again():
    whole = answer_of()
    paid = []
    for ids, num_answered in ((PROMPT + whole[:8], 8), (PROMPT + whole[:8], 0)):
        engine = harness()
        engine.submit(1, ids, num_answered=num_answered, params=sampling_params(8 + 4 if num_answered else 4))
        engine.run()
        paid.append(engine.core.scheduler.counters.counter("acme"))
    assert paid[0] == paid[1] > 0


def test_an_answer_that_went_on_is_cut_no_shorter_than_its_prompt():
    whole = answer_of()
    for length, kept in ((15, 15), (3, 13)):
        engine = harness()
        engine.submit(1, PROMPT + whole[:6], num_answered=6, params=sampling_params(12))
        engine.step()
        engine.send(Finish(1, 1, length))
        assert engine.length(1) == kept
        assert engine.done[1].num_output_tokens == kept - 13


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_answered": -1}, "num_answered is -1, the range is 0 to 12"),
        ({"num_answered": 13}, "num_answered is 13, the range is 0 to 12"),
        ({"num_answered": 8}, "num_answered is 8, max_tokens is 8"),
        ({"num_answered": 2, "compute_only": True}, "compute_only has no answer"),
        ({"num_answered": 2, "sample_of": 7}, "sample_of has no answer"),
        ({"num_answered": 2, "beam": BeamSearch(width=2, num_returned=1)}, "beam has no answer"),
    ],
)
def test_an_answer_that_cannot_go_on_is_refused_by_the_fields_name(fields, words):
    engine = harness()
    engine.submit(1, PROMPT, **fields)
    done = engine.done[1]
    assert (done.reason, done.error_code) == (FinishReason.FAILED, "invalid_request")
    assert words in done.error_message
    assert not engine.core.has_work


def check_model(model, real_engine, vocab_size, cuts, max_tokens, min_tokens):
    rng = np.random.default_rng(4)
    prompt = rng.integers(3, vocab_size, 37).tolist()
    for name, kind in KINDS.items():
        whole = real_engine(model)
        whole.submit(1, prompt, max_tokens=max_tokens, **kind)
        whole.run()
        ids, logprobs = whole.ids[1], whole.logprobs[1]
        # A stop id that would come too early, and one that ends it: also an answer cut there goes on alike.
        stops = {"min_tokens": min_tokens, "stop_token_ids": (ids[2], ids[min_tokens + 2])}
        ended = real_engine(model)
        ended.submit(1, prompt, max_tokens=max_tokens, **kind, **stops)
        ended.run()
        for cut in cuts:
            for expected, expected_logprobs, more in (
                (ids, logprobs, {}),
                (ended.ids[1], ended.logprobs[1], stops),
            ):
                if cut >= len(expected):
                    continue
                again = real_engine(model)
                again.submit(1, prompt + expected[:cut], num_answered=cut, max_tokens=max_tokens, **kind, **more)
                again.run()
                assert expected[:cut] + again.ids[1] == expected, f"{name}: cut at {cut}"
                assert again.logprobs[1] == expected_logprobs[cut:], f"{name}: cut at {cut}, the log probabilities"
                assert again.done[1].reason is (ended.done[1].reason if more else whole.done[1].reason)


def test_every_bit_of_an_answer_is_as_if_it_had_never_stopped(load_tiny, real_engine):
    check_model(load_tiny("fp16"), real_engine, 512, cuts=(1, 3, 11, 19), max_tokens=24, min_tokens=9)


@pytest.mark.model
def test_every_bit_of_the_real_models_answer_is_as_if_it_had_never_stopped(load_smollm2, real_engine):
    check_model(load_smollm2("fp16"), real_engine, 49152, cuts=(1, 6), max_tokens=12, min_tokens=4)
