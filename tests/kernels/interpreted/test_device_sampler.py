"""The sampler of GPUs against that of the host, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from chatd.engine.plan import RequestId, SampleSpec
from chatd.engine.sampler import Sampled, Sampler
from chatd.engine.sampling import SamplingParams
from chatd_kernels.dispatch import use_backend
from chatd_kernels.stream import InterpretedStream

pytest.importorskip("triton")

from chatd.engine.device_sampler import DeviceSampler

VOCAB = 523
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2, "logprobs": 0},
    {"temperature": 1.5, "top_k": 50, "min_p": 0.01, "seed": 2**63 - 1},
    {"temperature": 0.6, "repetition_penalty": 1.2, "seed": 4, "logprobs": 3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": ((7, 3.0), (9, -100.0), (7, 0.25)), "temperature": 1.0, "top_k": 9},
]
PARAMS = [SamplingParams(max_tokens=64, **kind) for kind in KINDS]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with use_backend("gpu"):
        yield


class CountingStream(InterpretedStream):
    """Counts copies to the device.

    Attributes:
        num_uploads: So far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_uploads = 0

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        self.num_uploads += 1
        return super().upload(array)


def make_sampler(max_num_rows: int, vocab_size: int = VOCAB) -> DeviceSampler:
    return DeviceSampler(vocab_size, max_num_rows, InterpretedStream())


def logits_of(num_rows: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, scale, (num_rows, VOCAB)).astype(np.float32))


class Answers:
    """Requests whose answers grow; each has a kind of parameters."""

    def __init__(self, params: list[SamplingParams]) -> None:
        self.params = params
        self.ids: list[list[int]] = [[] for _ in params]

    def specs(self, rows: list[int], num_pending: int = 0, stop: tuple[int, ...] = ()) -> list[tuple[RequestId, Any]]:
        return [
            (
                RequestId(row),
                SampleSpec(self.params[row], len(self.ids[row]) + num_pending, stop, [row, 3, 3], list(self.ids[row])),
            )
            for row in rows
        ]

    def append(self, sampled: Sampled) -> None:
        for request_id, token in sampled.tokens.items():
            self.ids[request_id].append(token)


def check_like(given: Sampled, expected: Sampled) -> None:
    assert (given.tokens, given.failed) == (expected.tokens, expected.failed)
    for ours, theirs in ((given.candidates, expected.candidates), (given.logprobs, expected.logprobs)):
        assert list(ours) == list(theirs)
    for request_id, theirs in expected.logprobs.items():
        ours = given.logprobs[request_id]
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        values = [theirs.logprob, *(value for _, value in theirs.top)]
        assert [ours.logprob, *(value for _, value in ours.top)] == pytest.approx(values, abs=1e-5)
    for request_id, theirs in expected.candidates.items():
        ours = given.candidates[request_id]
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-5)


def test_answers_are_those_of_the_hosts_sampler_whoever_comes_and_goes() -> None:
    """Four slots for seven requests: the one that was drawn longest ago loses its own, and gets another."""
    rng = np.random.default_rng(0)
    device, host, answers = make_sampler(4), Sampler(), Answers(PARAMS)
    for step in range(8):
        rows = rng.permutation(len(PARAMS))[: rng.integers(1, 5)].tolist()
        logits = logits_of(len(rows), step)
        specs = answers.specs(rows, stop=(0, 1, 2) if step < 3 else ())
        flight = device.sample(logits, specs)
        expected = host.sample(logits, specs)
        assert flight.tokens.tolist() == [expected.tokens[RequestId(row)] for row in rows]
        check_like(flight.result(), expected)
        assert flight.result() is flight.result()
        answers.append(expected)


def test_one_step_ahead_every_token_is_the_same_and_a_steady_batch_sends_nothing() -> None:
    stream = CountingStream()
    device, host, answers = DeviceSampler(VOCAB, 8, stream), Sampler(), Answers(PARAMS)
    rows = list(range(len(PARAMS)))
    flight = device.sample(logits_of(len(rows), 0), answers.specs(rows))
    num_uploads = stream.num_uploads
    assert num_uploads > 0
    for step in range(3):
        ahead = device.sample(logits_of(len(rows), step + 1), answers.specs(rows, num_pending=1))
        expected = host.sample(logits_of(len(rows), step), answers.specs(rows))
        check_like(flight.result(), expected)
        answers.append(expected)
        flight = ahead
    assert stream.num_uploads == num_uploads


def test_a_step_that_was_discarded_is_drawn_again() -> None:
    device, host, answers = make_sampler(8), Sampler(), Answers(PARAMS[3:])
    rows = list(range(len(answers.params)))
    for step in range(2):
        specs = answers.specs(rows)
        for other in (50, step):
            flight = device.sample(logits_of(len(rows), other), specs)
        expected = host.sample(logits_of(len(rows), step), specs)
        check_like(flight.result(), expected)
        answers.append(expected)
        device.forget()


def test_other_parameters_under_the_same_name_are_other_parameters() -> None:
    device = make_sampler(2)
    logits = logits_of(1, 5)
    for position, params in enumerate((*PARAMS, *reversed(PARAMS))):
        # It comes at the very position at which its slot is.
        answers = Answers([params])
        answers.ids[0] = [3] * position
        specs = answers.specs([0])
        check_like(device.sample(logits, specs).result(), Sampler().sample(logits, specs))


def test_a_greedy_batch_looks_at_no_parameters() -> None:
    stream = CountingStream()
    device = DeviceSampler(VOCAB, 4, stream)
    logits = logits_of(4, 1).half()
    logits[1, [9, 400]] = 90.0
    logits[2, 0] = float("nan")
    specs = Answers([PARAMS[0]] * 3).specs([0, 1, 2])
    flight = device.sample(logits, specs)
    assert flight.tokens.tolist() == [int(logits[0].argmax()), 9, 0]
    assert flight.result() == Sampler().sample(logits[:3].float(), specs)
    assert stream.num_uploads == 0


def test_a_request_whose_logits_are_not_finite_fails_alone() -> None:
    device, answers = make_sampler(8), Answers(PARAMS)
    rows = list(range(len(PARAMS)))
    logits = logits_of(len(rows), 3)
    logits[1, 40] = float("nan")
    logits[4, 41:43] = float("inf")
    flight = device.sample(logits, answers.specs(rows))
    check_like(flight.result(), Sampler().sample(logits, answers.specs(rows)))
    assert flight.tokens[[1, 4]].tolist() == [0, 0]


def test_candidates_of_beams_are_those_of_the_hosts_sampler() -> None:
    device, host = make_sampler(4), Sampler()
    plain = SamplingParams(max_tokens=9)
    changed = SamplingParams(max_tokens=9, repetition_penalty=1.4, logit_bias=((5, 2.0), (11, -3.0)))
    for step in range(3):
        logits = logits_of(3, step)
        logits[0, [400, 17, 90]] = 30.0
        # The next beam of a name may be another's child: its ids are looked at anew.
        ids = [step, 5, 9][: step + 1]
        specs = [
            (RequestId(0), SampleSpec(plain, step, num_candidates=5)),
            (RequestId(1), SampleSpec(changed, step, (3, 4), [5, 6], ids, num_candidates=20)),
            (RequestId(2), SampleSpec(PARAMS[1], step)),
        ]
        check_like(device.sample(logits, specs).result(), host.sample(logits, specs))


def test_all_of_a_small_vocabulary_may_be_candidates() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    specs = [(RequestId(0), SampleSpec(SamplingParams(max_tokens=9), 0, (1,), num_candidates=30))]
    flight = make_sampler(1, vocab_size=4).sample(logits, specs)
    check_like(flight.result(), Sampler().sample(logits, specs))


def test_no_rows_give_nothing() -> None:
    flight = make_sampler(4).sample(torch.empty(0, VOCAB), [])
    assert flight.tokens.tolist() == []
    assert flight.result() == Sampled()
