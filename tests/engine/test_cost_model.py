"""The cost model: prediction, inversion, fit."""

import math
import random

import pytest

from chatd.engine.cost_model import CostModel, CostParameters, StepRoom, num_pairs

TRUE = CostParameters(5e-3, 1.5e-3, 8e-6)


def test_pairs_of_a_chunk_are_the_keys_that_its_rows_read():
    assert num_pairs(0, 1) == 1
    assert num_pairs(10, 1) == 11
    assert num_pairs(4, 3) == 5 + 6 + 7


@pytest.mark.parametrize("context", [0, 1, 100, 8000])
@pytest.mark.parametrize("seconds", [1e-3, 0.02, 0.5])
def test_rows_within_is_the_largest_chunk_that_fits(context, seconds):
    rows = TRUE.rows_within(seconds, context)

    def took(n):
        return TRUE.per_row_s * n + TRUE.per_pair_s * num_pairs(context, n)

    assert took(rows) <= seconds < took(rows + 1)


def test_no_rows_fit_into_no_time():
    assert TRUE.rows_within(0.0, 0) == 0
    assert TRUE.rows_within(-1.0, 0) == 0


def observe(model, rng, number, noise=0.0):
    for _ in range(number):
        rows = rng.choice([1, 2, 8, 16, 64, 256])
        pairs = rows * rng.randrange(1, 4000)
        model.observe(rows, pairs, TRUE.step_s(rows, pairs) * (1 + noise * rng.uniform(-1, 1)))


@pytest.mark.parametrize("start", [CostParameters(), CostParameters(1e-4, 1e-5, 1e-8), CostParameters(0.1, 0.02, 1e-4)])
def test_the_fit_predicts_steps_within_a_few_percent(start):
    model = CostModel(start)
    observe(model, random.Random(1), 1500, noise=0.05)
    for rows, pairs in [(1, 500), (8, 4000), (16, 16 * 2000), (256, 256 * 300), (64, 64 * 3000)]:
        assert model.parameters.step_s(rows, pairs) == pytest.approx(TRUE.step_s(rows, pairs), rel=0.1)


def test_one_stalled_step_changes_little():
    model = CostModel(TRUE)
    observe(model, random.Random(1), 320)
    before = model.parameters.step_s(8, 8000)
    model.observe(8, 8000, 30.0)
    observe(model, random.Random(2), 31)
    assert model.parameters.step_s(8, 8000) == pytest.approx(before, rel=0.25)


def test_steps_that_are_all_alike_leave_the_rest_at_its_prior():
    model = CostModel(TRUE)
    for _ in range(320):
        model.observe(8, 8000, 2 * TRUE.step_s(8, 8000))
    assert model.parameters.step_s(8, 8000) == pytest.approx(2 * TRUE.step_s(8, 8000), rel=0.05)
    assert all(value > 0 for value in (model.parameters.per_row_s, model.parameters.per_pair_s))


def test_parameters_change_at_known_steps_only_and_a_time_of_zero_is_no_step():
    model = CostModel(CostParameters(), refit_steps=4)
    changes = [model.observe(1, 100, 0.5) for _ in range(8)]
    assert changes == [False, False, False, True, False, False, False, True]
    assert not model.observe(1, 100, 0.0)
    assert not model.observe(1, 100, math.nan)


def test_equal_observations_give_equal_parameters():
    models = [CostModel(CostParameters()) for _ in range(2)]
    for model in models:
        observe(model, random.Random(3), 200, noise=0.3)
    assert models[0].parameters == models[1].parameters


def test_room_counts_rows_and_seconds_and_lets_the_first_chunk_have_its_least():
    room = StepRoom(TRUE, 100, 0.0, least=16)
    assert room.rows_after(0) == 16
    room.take(0, 16)
    assert room.is_full
    room = StepRoom(TRUE, 100, math.inf, least=16)
    assert room.rows_after(5000) == 100
    room.take(0, 60)
    assert room.rows_after(0) == 40
    assert not room.is_full
    room.take(0, 40)
    assert room.is_full
