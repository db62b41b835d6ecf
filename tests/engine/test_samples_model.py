"""Samples and beams on a real model are, bit for bit, what each would be alone."""

import pytest

from chatd.engine.messages import Beams, LeaseId, Submit
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, SamplingParams

PROMPT = [(7 * i) % 500 + 3 for i in range(45)]


def sample(engine, count):
    for number in range(1, count + 1):
        params = SamplingParams(max_tokens=20, temperature=1.2, seed=number, logprobs=0)
        first = RequestId(1) if number > 1 else None
        engine.send(Submit(RequestId(number), LeaseId(number), "acme", 0, PROMPT, params, sample_of=first))


@pytest.mark.parametrize("quantization", ["fp16", "int8"])
def test_samples_that_share_a_prompt_draw_what_each_draws_alone(load_tiny, real_engine, quantization):
    model = load_tiny(quantization)
    together = real_engine(model)
    sample(together, 5)
    together.run()
    for number in range(1, 6):
        alone = real_engine(model)
        params = {"max_tokens": 20, "temperature": 1.2, "seed": number}
        alone.submit(number, PROMPT, **params)
        alone.run()
        assert alone.ids[number] == together.ids[number]
        assert alone.logprobs[number] == together.logprobs[number]
    assert len({tuple(ids) for ids in together.ids.values()}) == 5


def test_samples_and_beams_in_too_small_a_pool_are_the_same_to_the_bit(load_tiny, real_engine):
    model = load_tiny("fp16")
    search = BeamSearch(width=4, num_returned=4)
    params = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(0, 512, 40)))
    results = []
    for num_blocks in (400, 11):
        engine = real_engine(model, {"num_blocks": num_blocks, "max_model_len": 120})
        sample(engine, 4)
        for number in (11, 12):
            prompt = PROMPT[number:]
            engine.send(Submit(RequestId(number), LeaseId(number), "acme", 0, prompt, params, beam=search))
        engine.run()
        beams = {message.request: message.sequences for message in engine.messages if isinstance(message, Beams)}
        results.append((engine.ids, engine.logprobs, beams))
        preempted = engine.core.scheduler.num_preemptions
    assert preempted > 0
    assert results[0] == results[1]
    assert len(results[0][2]) == 2
