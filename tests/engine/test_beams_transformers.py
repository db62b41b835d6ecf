"""Beam search in the engine gives the sequences and scores of transformers' `generate(num_beams=…)`."""

import itertools
import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chatd.engine.beam_search import BeamSearcher, num_candidates
from chatd.engine.messages import Beams, LeaseId, Submit
from chatd.engine.plan import RequestId, SampleSpec
from chatd.engine.sampler import beam_candidates
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.engine.startup import load_model

from .conftest import options_for

VOCAB = 320
EARLY = [True, False, "never"]
PENALTIES = [0.0, 1.0, -0.7, 2.5]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A Llama of random weights, and its folder."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.folder = tmp_path_factory.mktemp("models") / "beam-llama"
    model.save_pretrained(model.folder)
    return model


@pytest.fixture(scope="module")
def loaded(reference):
    return load_model(options_for(reference.folder, quantization="fp32", kv_dtype="float32"), lambda *_: None)


def a_prompt(seed, length):
    return [random.Random(seed).randrange(VOCAB) for _ in range(length)]


def some_stop_ids(seed, count=40):
    return tuple(sorted(random.Random(seed + 1000).sample(range(VOCAB), count)))


def by_transformers(model, prompt, search, params):
    """Return (ids of the answer, score) for each sequence that transformers finds."""
    return results_of(generate(model, prompt, search, params), prompt, params)


def generate(model, prompt, search, params):
    options = {}
    if params.min_tokens:
        options["min_new_tokens"] = params.min_tokens
    if params.repetition_penalty != 1.0:
        options["repetition_penalty"] = params.repetition_penalty
    if params.logit_bias:
        options["sequence_bias"] = [[[token_id], bias] for token_id, bias in params.logit_bias]
    return model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=search.width,
        num_return_sequences=search.num_returned,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **options,
    )


def results_of(found, prompt, params):
    results = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ids = row[len(prompt) :]
        end = next((i + 1 for i, token_id in enumerate(ids) if token_id in params.stop_token_ids), len(ids))
        results.append((ids[:end], score))
    return results


def search_of(width, early_stopping, penalty, num_returned=None):
    return BeamSearch(
        width=width, num_returned=num_returned or width, length_penalty=penalty, early_stopping=early_stopping
    )


def by_searcher(steps, prompt, search, params):
    """Run the searcher alone, on the logits of each step that transformers had."""
    stop_ids = params.stop_token_ids
    searcher = BeamSearcher(search, stop_ids, params.max_tokens)
    answers = [[]]
    for logits in steps:
        specs = [
            SampleSpec(params, len(answer), (), prompt, answer, num_candidates(search.width, len(stop_ids)))
            for answer in answers
        ]
        # In its first step transformers has a row for each beam to be, all the same.
        rows = [beam_candidates(row, spec) for row, spec in zip(logits, specs, strict=False)]
        children = searcher.advance(answers, rows)
        answers = [[*answers[child.parent], child.token_id] for child in children]
    assert not answers, "transformers stopped before"
    return [(list(one.ids), float(one.score)) for one in searcher.finished[: search.num_returned]]


@pytest.mark.parametrize("early_stopping", EARLY)
def test_the_searcher_gives_the_same_sequences_and_scores_to_the_bit(reference, early_stopping):
    ended = 0
    for seed, (penalty, width) in enumerate(itertools.product(PENALTIES, (1, 2, 4))):
        if width == 1:
            continue  # transformers takes that for greedy
        prompt, stop_ids = a_prompt(seed, 5 + seed), some_stop_ids(seed)
        search = search_of(width, early_stopping, penalty)
        params = SamplingParams(max_tokens=9, stop_token_ids=stop_ids)
        generated = generate(reference, prompt, search, params)
        found = by_searcher(generated.logits, prompt, search, params)
        assert found == results_of(generated, prompt, params)
        ended += any(ids[-1] in stop_ids for ids, _ in found)
    assert ended, "no sequence ended by a stop id"


@pytest.mark.parametrize("early_stopping", EARLY)
def test_searches_in_one_batch_beside_other_requests_are_exact(reference, loaded, real_engine, early_stopping):
    engine = real_engine(loaded, {"max_num_seqs": 64, "max_num_batched_tokens": 64})
    wanted = {}
    for seed, (penalty, width) in enumerate(itertools.product(PENALTIES, (2, 3, 5))):
        prompt = a_prompt(seed, 3 + 4 * seed)
        search = search_of(width, early_stopping, penalty, 1 + seed % width)
        params = SamplingParams(max_tokens=6 + seed, stop_token_ids=some_stop_ids(seed, 30 if seed % 3 else 1))
        wanted[seed] = (prompt, search, params)
        message = Submit(RequestId(seed), LeaseId(seed), "acme", 0, prompt, params, beam=search)
        engine.send(message)
        engine.submit(100 + seed, a_prompt(seed, 9), max_tokens=20)
    engine.run()
    alone = real_engine(loaded)
    for seed in wanted:
        alone.submit(100 + seed, a_prompt(seed, 9), max_tokens=20)
    alone.run()
    assert {n: ids for n, ids in engine.ids.items() if n >= 100} == alone.ids
    beams = {message.request: message.sequences for message in engine.messages if isinstance(message, Beams)}
    for seed, (prompt, search, params) in wanted.items():
        expected = by_transformers(reference, prompt, search, params)
        assert [list(one.ids) for one in beams[seed]] == [ids for ids, _ in expected]
        np.testing.assert_allclose([one.score for one in beams[seed]], [s for _, s in expected], rtol=1e-5, atol=1e-6)
        done = engine.done[seed]
        assert done.num_output_tokens == len(beams[seed][0].ids)
        assert list(engine.core.leases.get(seed).token_ids) == prompt + list(beams[seed][0].ids)
    assert len(engine.core.leases) == 2 * len(wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 5},
        {"repetition_penalty": 1.7},
        {"logit_bias": tuple((token_id, 3.0 - token_id % 7) for token_id in range(60))},
        {"min_tokens": 3, "repetition_penalty": 0.8, "logit_bias": ((5, 9.5), (77, -4.0))},
    ],
    ids=["min_tokens", "repetition", "bias", "all"],
)
def test_processors_come_in_the_order_of_transformers(reference, loaded, real_engine, changes):
    engine = real_engine(loaded, {"max_num_seqs": 64})
    wanted = {}
    for seed in range(3):
        prompt, search = a_prompt(seed, 11), search_of(4, EARLY[seed], 1.0)
        params = SamplingParams(max_tokens=8, stop_token_ids=some_stop_ids(seed), **changes)
        wanted[seed] = (prompt, search, params)
        engine.send(Submit(RequestId(seed), LeaseId(seed), "acme", 0, prompt, params, beam=search))
    engine.run()
    beams = {message.request: message.sequences for message in engine.messages if isinstance(message, Beams)}
    for seed, (prompt, search, params) in wanted.items():
        expected = by_transformers(reference, prompt, search, params)
        assert [list(one.ids) for one in beams[seed]] == [ids for ids, _ in expected]
        np.testing.assert_allclose([one.score for one in beams[seed]], [s for _, s in expected], rtol=1e-5, atol=1e-6)


def test_a_search_of_width_one_is_greedy(loaded, real_engine):
    engine = real_engine(loaded)
    prompt = a_prompt(3, 12)
    engine.send(
        Submit(RequestId(1), LeaseId(1), "acme", 0, prompt, SamplingParams(max_tokens=9), beam=search_of(1, False, 1.0))
    )
    engine.submit(2, prompt, max_tokens=9)
    engine.run()
    (found,) = [message for message in engine.messages if isinstance(message, Beams)]
    assert list(found.sequences[0].ids) == engine.ids[2]
    np.testing.assert_allclose(found.sequences[0].score, sum(engine.logprobs[2]) / 9, rtol=1e-5)
