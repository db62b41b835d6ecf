import math
from collections import Counter

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from chatd.engine.plan import SampleSpec
from chatd.engine.sampler import Sampler, candidates, token_logprobs
from chatd.engine.sampling import SamplingParams

VOCAB = 5003


def params(**fields):
    return SamplingParams(max_tokens=64, **fields)


def spec(position=0, stop=(), prompt=(), output=(), **fields):
    return SampleSpec(params(**fields), position, tuple(stop), prompt, output)


def logits_of(rows, seed=0, scale=4.0, vocab=VOCAB):
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, scale, (rows, vocab)).astype(np.float32))


def draw(logits, *specs):
    return Sampler().sample(logits, list(enumerate(specs)))


def kept_ids(row, **fields):
    ids, weights = candidates(row.numpy(), params(**fields))
    ids = np.arange(len(row)) if ids is None else ids
    return set(ids[weights > 0].tolist())


def test_greedy_takes_the_likeliest_token_and_the_lowest_id_of_equal_ones():
    logits = logits_of(3)
    logits[1, 17] = logits[1, 4000] = 99.0
    out = draw(logits, spec(), spec(), spec(seed=5))
    assert out.tokens == {0: int(logits[0].argmax()), 1: 17, 2: int(logits[2].argmax())}


@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 1e-50, 5e-324])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.5}, {"top_k": 5, "min_p": 0.1}])
def test_the_coldest_draws_are_greedy(temperature, fields):
    logits = logits_of(1)
    assert draw(logits, spec(temperature=temperature, **fields)).tokens == {0: int(logits[0].argmax())}


@pytest.mark.parametrize(
    ("fields", "processors"),
    [
        ({"top_k": 40}, [theirs.TopKLogitsWarper(40)]),
        ({"top_k": 1}, [theirs.TopKLogitsWarper(1)]),
        ({"top_p": 0.9}, [theirs.TopPLogitsWarper(0.9)]),
        ({"top_p": 0.999}, [theirs.TopPLogitsWarper(0.999)]),
        ({"top_p": 0.01}, [theirs.TopPLogitsWarper(0.01)]),
        ({"min_p": 0.05}, [theirs.MinPLogitsWarper(0.05)]),
        (
            {"top_k": 200, "top_p": 0.8, "min_p": 0.02},
            [theirs.TopKLogitsWarper(200), theirs.TopPLogitsWarper(0.8), theirs.MinPLogitsWarper(0.02)],
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_the_tokens_kept_and_their_weights_are_those_of_transformers(fields, processors, temperature, scale):
    for seed in range(3):
        row = logits_of(1, seed, scale)[0]
        scores = theirs.TemperatureLogitsWarper(temperature)(None, row[None].clone())
        for processor in processors:
            scores = processor(None, scores)
        expected = torch.softmax(scores[0].double(), dim=-1).numpy()
        ids, weights = candidates(row.numpy(), params(temperature=temperature, **fields))
        assert ids.tolist() == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(weights / weights.sum(dtype=np.float64), expected[ids], rtol=2e-5)


def test_top_k_keeps_all_that_tie_with_the_last():
    row = torch.tensor([1.0, 3.0, 3.0, 5.0, 3.0, 0.0])
    assert kept_ids(row, temperature=1.0, top_k=2) == {1, 2, 3, 4}


def test_top_p_keeps_the_lowest_ids_of_equal_ones_and_always_one():
    row = torch.zeros(8)
    assert kept_ids(row, temperature=1.0, top_p=0.5) == {0, 1, 2, 3}
    assert kept_ids(row, temperature=1.0, top_p=0.0) == {0}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_temperature_near_zero_is_greedy_and_does_not_overflow(temperature):
    logits = logits_of(4)
    out = draw(logits, *(spec(temperature=temperature, seed=s) for s in range(4)))
    assert list(out.tokens.values()) == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    row = logits_of(1)[0]
    prompt, output = [3, 3, 9, 4000], [9, 77, 77, 5]
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), row[None].clone())[0]
    given = spec(prompt=prompt, output=output, repetition_penalty=penalty)
    assert np.array_equal(Sampler()._adjusted(row.numpy(), 1, given), expected.numpy())


def test_presence_and_frequency_penalties_count_the_answer_only():
    row = torch.zeros(10)
    given = spec(prompt=[1, 2], output=[2, 3, 3, 3], presence_penalty=0.5, frequency_penalty=0.25)
    adjusted = Sampler()._adjusted(row.numpy(), 1, given)
    assert adjusted.tolist() == [0, 0, -0.75, -1.25, 0, 0, 0, 0, 0, 0]


def test_the_history_remembered_between_steps_gives_what_a_fresh_one_gives():
    sampler = Sampler()
    rng = np.random.default_rng(1)
    prompt, output = rng.integers(0, 300, 80).tolist(), []
    for step in range(200):
        row = logits_of(1, step, vocab=300)[0].numpy()
        given = spec(prompt=prompt, output=output, repetition_penalty=1.2, frequency_penalty=0.1)
        assert np.array_equal(sampler._adjusted(row, 8, given), Sampler()._adjusted(row, 8, given))
        output.append(int(rng.integers(0, 300)))


def test_bias_adds_up_and_can_force_or_forbid_a_token():
    logits = logits_of(2, scale=1.0)
    best = int(logits[0].argmax())
    out = draw(logits, spec(logit_bias=((best, -100.0),)), spec(logit_bias=((12, 60.0), (12, 40.0))))
    assert out.tokens[0] == int(logits[0].topk(2).indices[1])
    assert out.tokens[1] == 12


def test_forbidden_stop_ids_are_never_drawn():
    logits = torch.zeros(2, 6)
    logits[:, 4] = 50.0
    out = draw(logits, spec(stop=[4]), spec(stop=[4, 0], temperature=1.0, seed=3))
    assert out.tokens[0] == 0
    assert out.tokens[1] in {1, 2, 3, 5}


def test_a_row_that_is_not_finite_fails_alone():
    logits = logits_of(4)
    expected = logits.argmax(dim=1).tolist()
    logits[1, 40] = math.nan
    logits[2, 41:43] = math.inf
    out = draw(logits, spec(), spec(), spec(temperature=1.0), spec())
    assert out.tokens == {0: expected[0], 3: expected[3]}
    assert out.failed == {1: "1 of 5003 logits are not finite", 2: "2 of 5003 logits are not finite"}


def test_log_probabilities_are_of_the_logits_before_temperature_and_penalties():
    logits = logits_of(1)
    out = draw(logits, spec(temperature=0.5, top_k=1, logit_bias=((7, 100.0),), logprobs=3))
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert out.tokens[0] == 7
    assert out.logprobs[0].logprob == pytest.approx(float(expected[7]), abs=1e-5)
    best = expected.topk(3)
    assert [token for token, _ in out.logprobs[0].top] == best.indices.tolist()
    assert [value for _, value in out.logprobs[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_equal_log_probabilities_are_listed_by_id():
    top = token_logprobs(np.zeros(9, dtype=np.float32), 8, 3).top
    assert [token for token, _ in top] == [0, 1, 2]


def test_zero_logprobs_report_the_drawn_token_only():
    out = draw(logits_of(1), spec(logprobs=0))
    assert out.logprobs[0].top == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12},
        {"temperature": 1.0, "min_p": 0.1},
    ],
)
def test_draws_follow_the_distribution(fields):
    row = logits_of(1, 3, scale=2.0, vocab=300)
    ids, weights = candidates(row[0].numpy(), params(**fields))
    ids = np.arange(300) if ids is None else ids
    n = 8_000
    sampler = Sampler()
    counts = Counter(sampler.sample(row, [(0, spec(i, seed=99, **fields))]).tokens[0] for i in range(n))
    assert set(counts) <= set(ids.tolist())
    expected = weights.astype(np.float64) / weights.sum(dtype=np.float64) * n
    often = expected >= 10
    observed = np.array([counts[i] for i in ids.tolist()], dtype=float)
    rest_expected, rest_observed = expected[~often].sum(), observed[~often].sum()
    chi_square = float(((observed - expected)[often] ** 2 / expected[often]).sum())
    degrees = int(often.sum()) - 1
    if rest_expected >= 10:
        chi_square += (rest_observed - rest_expected) ** 2 / rest_expected
        degrees += 1
    # Wilson and Hilferty's approximation of the quantile at p = 0.001.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < limit


def test_a_row_is_drawn_alike_whatever_is_beside_it():
    kinds = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_p": 0.9, "seed": 2},
        {"temperature": 1.5, "top_k": 50, "min_p": 0.01, "seed": 3},
        {"temperature": 0.6, "repetition_penalty": 1.2, "seed": 4, "logprobs": 2},
    ]
    rows = 40
    logits = logits_of(rows, 5)
    specs = [spec(i, prompt=[i, 1], output=[5, i], **kinds[i % len(kinds)]) for i in range(rows)]
    together = Sampler().sample(logits, list(enumerate(specs)))
    order = np.random.default_rng(0).permutation(rows)
    shuffled = Sampler().sample(logits[order], [(int(i), specs[i]) for i in order])
    alone = {i: Sampler().sample(logits[i : i + 1].clone(), [(i, specs[i])]).tokens[i] for i in range(rows)}
    assert together.tokens == alone == shuffled.tokens
    assert together.logprobs == shuffled.logprobs


def test_a_seed_gives_other_tokens_at_other_positions_and_the_same_again():
    logits = logits_of(1, scale=0.5)
    first = [draw(logits, spec(i, temperature=1.0, seed=42)).tokens[0] for i in range(20)]
    assert first == [draw(logits, spec(i, temperature=1.0, seed=42)).tokens[0] for i in range(20)]
    assert len(set(first)) == 20


def test_no_rows_give_nothing():
    assert Sampler().sample(torch.empty(0, VOCAB), []).tokens == {}


def test_candidates_of_a_beam_are_log_softmax_and_equal_ones_come_by_their_id():
    logits = logits_of(2)
    logits[0, [4000, 17, 900]] = 30.0
    out = draw(
        logits, SampleSpec(params(), 0, num_candidates=5), SampleSpec(params(), 0, (3,), num_candidates=VOCAB + 9)
    )
    assert out.tokens == {}
    expected = torch.log_softmax(logits, dim=-1)
    assert [token_id for token_id, _ in out.candidates[0]][:3] == [17, 900, 4000]
    assert all(value == float(expected[0, token_id]) for token_id, value in out.candidates[0])
    assert len(out.candidates[0]) == 5
    assert len(out.candidates[1]) == VOCAB
    assert out.candidates[1][-1] == (3, -math.inf)


def test_a_beam_whose_logits_are_not_finite_fails_alone():
    logits = logits_of(2)
    logits[1, 7] = math.nan
    out = draw(logits, SampleSpec(params(), 0, num_candidates=3), SampleSpec(params(), 0, num_candidates=3))
    assert (list(out.candidates), list(out.failed)) == ([0], [1])
