"""Sampling on GPUs against its reference, bit for bit, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from chatd_kernels.sampling import reference
from chatd_kernels.sampling.state import (
    ADJUSTS,
    BIAS_SHIFT,
    COUNTS,
    FLAGS,
    FORBIDS,
    HAS_LOGPROBS,
    IS_BEAM,
    IS_GREEDY,
    MAX_CANDIDATES,
    MAX_VOCAB,
    NUM_LIKELIEST,
    PROMPT_BIT,
    STOP_BIT,
    SamplingState,
    allocate_sampling_state,
    pack_slot,
)

pytest.importorskip("triton")

from chatd_kernels.sampling import gpu

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = [HALF, BFLOAT, FLOAT]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.1}
ALL = ADJUSTS | COUNTS | FORBIDS
KINDS: list[dict[str, Any]] = [
    {"flags": IS_GREEDY},
    {"flags": 0, "temperature": 1.0},
    {"flags": 0, "temperature": 1.0, "min_p": 0.05},
    {"flags": 0, "temperature": 0.7, "top_p": 0.9},
    {"flags": 0, "temperature": 1.5, "top_k": 40},
    {"flags": HAS_LOGPROBS, "temperature": 1.3, "top_k": 200, "top_p": 0.8, "min_p": 0.02, "num_likeliest": 5},
    {"flags": IS_GREEDY | ALL | HAS_LOGPROBS, **PENALTIES},
    {"flags": ALL, "temperature": 0.9, "top_p": 0.5, **PENALTIES},
    {"flags": ALL & ~FORBIDS, "temperature": 1.0, **PENALTIES, "repetition_penalty": 0.8},
    {"flags": IS_BEAM | IS_GREEDY | ALL & ~COUNTS, "repetition_penalty": 1.3, "num_likeliest": 12},
    {"flags": 0, "temperature": 1e-30, "top_p": 0.3},
    {"flags": 0, "temperature": 2.0, "top_p": 1e-300},
    {"flags": 0, "temperature": 5.0, "top_k": 1 << 20, "top_p": 0.99},
]


def state_of(vocab: int, kinds: list[dict[str, Any]], seed: int = 0) -> SamplingState:
    """Row i has the i-th of the kinds, in a slot of another number; outputs and what lies between are poisoned."""
    rng = np.random.default_rng(seed)
    num_rows = len(kinds) + 2
    state = allocate_sampling_state(vocab, num_rows, num_rows, "cpu")
    for field in fields(state):
        tensor = getattr(state, field.name)
        tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
    state.row_slots.fill_(-1)
    words = rng.integers(0, 3, (num_rows, vocab)) * rng.integers(0, 2, (num_rows, vocab))
    words |= rng.integers(0, 2, (num_rows, vocab)) * PROMPT_BIT | (rng.random((num_rows, vocab)) < 0.1) * STOP_BIT
    places = np.zeros((num_rows, vocab), dtype=np.int64)
    places[:, : min(vocab, 1000)] = np.arange(min(vocab, 1000)) % 1025
    words |= places << BIAS_SHIFT
    state.words[:] = torch.from_numpy(words.astype(np.uint32).view(np.int32))
    state.biases[:] = torch.from_numpy(rng.normal(0, 1, state.biases.shape).astype(np.float32))
    for row, kind in enumerate(kinds):
        slot = num_rows - 1 - row
        state.row_slots[row] = slot
        drawn = {"seed": int(rng.integers(0, 2**63)), "position": int(rng.integers(0, 2**40))}
        state.table[slot] = torch.from_numpy(pack_slot(**(drawn | kind)))
    return state


def copy_of(state: SamplingState) -> SamplingState:
    return replace(state, **{field.name: getattr(state, field.name).clone() for field in fields(state)})


def logits_of(num_rows: int, vocab: int, scale: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, scale, (num_rows, vocab))).to(dtype)


def sample(logits: torch.Tensor, state: SamplingState, num_rows: int) -> None:
    slots = state.row_slots[state.row_slots >= 0].long()
    has_lists = bool((state.table[slots, FLAGS] & (HAS_LOGPROBS | IS_BEAM)).any())
    gpu.sample_rows(logits, state, num_rows, num_likeliest=12 if has_lists else 0)


def check(logits: torch.Tensor, state: SamplingState) -> SamplingState:
    """Draw once with each, and return the kernels' state."""
    expected = copy_of(state)
    before = logits.clone()
    reference.sample_rows(logits, expected, len(logits))
    sample(logits, state, len(logits))
    for name in ("drawn", "table", "words", "biases", "row_slots", "likeliest"):
        assert torch.equal(getattr(state, name), getattr(expected, name)), name
    # Logarithms of sums in another order; of numbers up to some tens.
    torch.testing.assert_close(state.logprobs, expected.logprobs, atol=1e-5, rtol=1e-6, equal_nan=True)
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
    return state


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_row_is_drawn_as_by_the_reference(dtype: torch.dtype) -> None:
    state = state_of(4999, KINDS)
    check(logits_of(len(KINDS), 4999, 1.0, dtype), state)
    # The rows beyond are left alone.
    assert state.drawn[:, len(KINDS) :].tolist() == [[-77, -77], [-77, -77]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_rows_are_the_likeliest_tokens(dtype: torch.dtype) -> None:
    logits = logits_of(5, 4999, 3.0, dtype)
    logits[1, [4998, 17, 4097]] = 99.0
    logits[2] = -0.0
    logits[2, 3:] = 0.0
    logits[3, 4998] = float("inf")
    logits[4] = -3.0
    state = state_of(4999, KINDS)
    gpu.sample_rows(logits, state, 5, is_plain=True)
    assert state.drawn[0, :5].tolist() == [int(logits[0].argmax()), 17, 0, 0, 0]
    assert state.drawn[1, :5].tolist() == [0, 0, 0, 1, 0]
    expected = copy_of(state)
    reference.sample_rows(logits, expected, 5, is_plain=True)
    assert torch.equal(state.drawn, expected.drawn)


EDGES: list[dict[str, Any]] = [
    {"flags": 0, "temperature": 1.0},
    {"flags": 0, "temperature": 1.0, "top_k": 3},
    {"flags": 0, "temperature": 1.0, "top_p": 0.5},
    {"flags": 0, "temperature": 1.0, "top_k": 100, "top_p": 0.5, "min_p": 0.1},
    {"flags": 0, "temperature": 1.0, "top_p": 0.0},
]


def test_rows_of_equal_logits_are_drawn_as_by_the_reference() -> None:
    """Of the last vocabulary too many tokens tie to be listed as candidates: the row itself is searched."""
    for vocab in (1, 2, 97, MAX_CANDIDATES + 9):
        edges = EDGES if vocab < 100 else EDGES[3:4]
        state = state_of(vocab, edges)
        check(torch.full((len(edges), vocab), -1.5), state)
        tied = torch.zeros(len(edges), vocab)
        tied[:, ::2] = 1.0
        check(tied, state)


def test_forbidding_all_but_one_token_leaves_it() -> None:
    state = state_of(300, [{**kind, "flags": ADJUSTS | FORBIDS} for kind in EDGES])
    state.words.fill_(STOP_BIT)
    state.words[:, 123] = 0
    check(logits_of(len(EDGES), 300, 2.0, FLOAT), state)
    assert state.drawn[0, : len(EDGES)].tolist() == [123] * len(EDGES)


def test_a_row_that_is_not_finite_has_no_token_and_nothing_else_changes() -> None:
    logits = logits_of(len(KINDS), 4999, 3.0, FLOAT)
    expected = check(logits.clone(), state_of(4999, KINDS))
    logits[1, 40] = float("nan")
    logits[3, 4990:] = float("-inf")
    logits[6, 0] = float("inf")
    state, before = state_of(4999, KINDS), state_of(4999, KINDS)
    sample(logits, state, len(KINDS))
    bad = {1: 1, 3: 9, 6: 1}
    for row in range(len(KINDS)):
        assert state.drawn[:, row].tolist() == ([0, bad[row]] if row in bad else expected.drawn[:, row].tolist())
        slot = int(state.row_slots[row])
        assert torch.equal(state.table[slot], (before if row in bad else expected).table[slot])


def test_a_row_is_drawn_alike_whatever_is_beside_it() -> None:
    kinds = KINDS[3:9:2]
    logits = logits_of(len(kinds), 4999, 1.0, BFLOAT)
    together = state_of(4999, kinds)
    sample(logits, together, len(kinds))
    for row in range(len(kinds)):
        alone = state_of(4999, kinds)
        alone.row_slots[0] = alone.row_slots[row].clone()
        sample(logits[row : row + 1].clone(), alone, 1)
        slot = int(together.row_slots[row])
        assert alone.drawn[:, 0].tolist() == together.drawn[:, row].tolist()
        assert torch.equal(alone.table[slot], together.table[slot])
        assert torch.equal(alone.logprobs[0].nan_to_num(), together.logprobs[row].nan_to_num())


def test_a_count_that_has_no_more_bits_stays() -> None:
    state = state_of(64, [{"flags": IS_GREEDY | ADJUSTS | COUNTS}])
    state.words.fill_(PROMPT_BIT | STOP_BIT - 1)
    check(logits_of(1, 64, 1.0, FLOAT), state)
    assert (state.words == PROMPT_BIT | STOP_BIT - 1).all()


def test_what_does_not_fit_is_refused() -> None:
    state = allocate_sampling_state(64, 2, 2, "cpu")
    with pytest.raises(ValueError, match="expected contiguous rows of floats"):
        gpu.sample_rows(torch.zeros(1, 64).double(), state, 1)
    with pytest.raises(ValueError, match="expected contiguous rows of floats"):
        gpu.sample_rows(torch.zeros(1, 128)[:, ::2], state, 1)
    with pytest.raises(ValueError, match="logits have 63 columns, the state has 64"):
        gpu.sample_rows(torch.zeros(1, 63), state, 1)
    with pytest.raises(ValueError, match="3 rows are to be drawn, there are 4 and room for 2"):
        gpu.sample_rows(torch.zeros(4, 64), state, 3)
    with pytest.raises(ValueError, match="129 of the likeliest tokens are wanted, the limit is 128"):
        gpu.sample_rows(torch.zeros(1, 64), state, 1, num_likeliest=129)
    with pytest.raises(ValueError, match=f"vocabulary of {MAX_VOCAB} tokens, the limit is {MAX_VOCAB - 1}"):
        allocate_sampling_state(MAX_VOCAB, 1, 1, "meta")
    gpu.sample_rows(torch.zeros(0, 64), state, 0)


@pytest.mark.night
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.05, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 2, 31, 1024, 4095, 4096, 4097, 12289, 49152, 151936])
def test_every_vocabulary_is_drawn_as_by_the_reference(vocab: int, scale: float, dtype: torch.dtype) -> None:
    state = state_of(vocab, KINDS[: 2 if vocab == 1 else len(KINDS)], vocab)
    state.table[:, NUM_LIKELIEST].clamp_(max=vocab)
    check(logits_of(len(state.row_slots) - 2, vocab, scale, dtype, vocab), state)
