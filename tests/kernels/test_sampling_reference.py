"""The reference of sampling against transformers, the engine's sampler and its random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from chatd.engine.philox import uniforms
from chatd.engine.plan import RequestId, SampleSpec
from chatd.engine.sampler import Sampler, candidates
from chatd.engine.sampling import SamplingParams
from chatd_kernels.sampling import reference
from chatd_kernels.sampling.state import ADJUSTS, COUNTS, IS_GREEDY, allocate_sampling_state, pack_slot

VOCAB = 5003


def logits_of(seed: int, scale: float, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, scale, vocab).astype(np.float32))


def kept(row: torch.Tensor, **fields: Any) -> list[int]:
    return reference.kept_units(row.numpy(), pack_slot(flags=0, **fields))


@pytest.mark.parametrize(
    ("fields", "processors"),
    [
        ({}, []),
        ({"top_k": 40}, [theirs.TopKLogitsWarper(40)]),
        ({"top_k": 1}, [theirs.TopKLogitsWarper(1)]),
        ({"top_k": VOCAB + 1}, [theirs.TopKLogitsWarper(VOCAB + 1)]),
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
def test_the_tokens_kept_and_their_weights_are_those_of_transformers(
    fields: dict[str, Any], processors: list[Any], temperature: float, scale: float
) -> None:
    row = logits_of(1, scale)
    scores = theirs.TemperatureLogitsWarper(temperature)(None, row[None].clone())
    for processor in processors:
        scores = processor(None, scores)
    expected = torch.softmax(scores[0].double(), dim=-1).numpy()
    units = np.array(kept(row, temperature=temperature, **fields), dtype=np.float64)
    # What weighs less than 2^-44 of the likeliest token weighs nothing.
    is_kept = expected >= expected.max() * 2.0**-44
    assert np.flatnonzero(units).tolist() == np.flatnonzero(is_kept).tolist()
    np.testing.assert_allclose(units / units.sum(), np.where(is_kept, expected, 0.0), rtol=2e-5, atol=2.0**-44)


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 2}, {"top_k": 3, "top_p": 0.7}, {"top_p": 0.0}, {"top_p": 0.5}, {"top_p": 0.75}, {"min_p": 1.0}],
)
def test_of_equal_ones_those_are_kept_that_the_engines_sampler_keeps(fields: dict[str, Any]) -> None:
    for row in (torch.tensor([1.0, 3.0, 3.0, 5.0, 3.0, 0.0]), torch.zeros(8), torch.tensor([0.0, -0.0, -2.0, 0.0])):
        ids, weights = candidates(row.numpy(), SamplingParams(max_tokens=1, temperature=1.0, **fields))
        expected = list(range(len(row))) if ids is None else ids[weights > 0].tolist()
        assert np.flatnonzero(kept(row, temperature=1.0, **fields)).tolist() == expected


def test_numbers_are_those_of_the_engine() -> None:
    seeds, positions = [0, 7, 2**63 - 1, 1234567890123], [0, 2**33 + 5, 3, 2**32 - 1]
    numbers = [(reference.philox(s, p) >> 11) * 2.0**-53 for s, p in zip(seeds, positions, strict=True)]
    assert numbers == uniforms(seeds, positions).tolist()


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_a_penalized_greedy_answer_is_that_of_transformers_and_of_the_engine(penalty: float) -> None:
    state = allocate_sampling_state(50, 1, 1, "cpu")
    state.row_slots[0] = 0
    fields = {"repetition_penalty": penalty, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    state.table[0] = torch.from_numpy(pack_slot(flags=IS_GREEDY | ADJUSTS | COUNTS, **fields))
    answer: list[int] = []
    sampler = Sampler()
    for step in range(20):
        row = logits_of(step, 1.0, 50)
        spec = SampleSpec(SamplingParams(max_tokens=99, **fields), step, output_ids=answer)
        expected = sampler.sample(row[None], [(RequestId(0), spec)]).tokens[RequestId(0)]
        scores = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([answer]), row[None].clone())[0]
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=50)
        scores -= (counts > 0) * 0.3 + counts * 0.2
        reference.sample_rows(row[None], state, 1)
        assert state.drawn.tolist() == [[expected], [0]]
        assert expected == int(scores.argmax())
        answer.append(expected)
