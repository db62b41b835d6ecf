"""Limits and sampling defaults of the served model."""

import json
from pathlib import Path

import pytest

from chatd.engine.messages import Ready
from chatd.engine.sampling import SamplingParams
from chatd.errors import ContextLengthExceeded, InvalidRequest, ModelError
from chatd.protocol import Params
from chatd.sessions.model_profile import SEED_BITS, ModelProfile, draw_seed, sampling_defaults


def profile(**fields) -> ModelProfile:
    return ModelProfile(**{"id": "m", "context": 100, "vocab_size": 50, "stop_token_ids": frozenset({7}), **fields})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Params()),
        ({"do_sample": False, "temperature": 0.7}, Params(temperature=0.0)),
        ({"do_sample": True}, Params(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            Params(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
        ),
        ({"temperature": 0.6, "min_p": 0.1}, Params(temperature=0.6, min_p=0.1)),
        ({"temperature": "hot", "top_p": 7, "top_k": True, "top_p_other": 1}, Params()),
    ],
)
def test_generation_config_gives_the_defaults(config: dict, expected: Params) -> None:
    assert sampling_defaults(config) == expected


def test_a_folder_gives_a_profile(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.5}))
    made = ModelProfile.from_folder(tmp_path, model_id="m", context=100, vocab_size=50, stop_token_ids=[7, 7])
    assert made == profile(defaults=Params(temperature=0.5))
    (tmp_path / "generation_config.json").unlink()
    bare = ModelProfile.from_folder(tmp_path, model_id="m", context=100, vocab_size=50, stop_token_ids=[7])
    assert bare == profile()


@pytest.mark.parametrize("text", ["[]", "{", "\x00"])
def test_a_broken_generation_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError) as refused:
        ModelProfile.from_folder(tmp_path, model_id="m", context=100, vocab_size=50, stop_token_ids=[])
    assert refused.value.error_code == "model_corrupt"


def test_text_that_cannot_fit_is_refused_with_the_numbers() -> None:
    profile().check_text(["x" * 400, "é" * 200])
    profile().check_text(["\ud800"])
    for contents in (["x" * 400, "é" * 201], ["x" * 801], ["東" * 267]):
        with pytest.raises(ContextLengthExceeded, match=r"80[12] bytes of new text, the limit is 800 \(8 for each"):
            profile().check_text(contents)


def test_nothing_is_left_to_a_default() -> None:
    assert profile().resolve(Params(), 40, draw=lambda: 5) == SamplingParams(max_tokens=60, seed=5, stop_token_ids=(7,))


@pytest.mark.parametrize(
    ("configured", "asked", "prompt", "expected"),
    [
        (None, None, 40, 60),
        (16, None, 40, 16),
        (16, 8, 40, 8),
        (16, 32, 40, 16),
        (None, 1000, 40, 60),
        (16, None, 95, 5),
    ],
)
def test_max_tokens_is_the_least_of_what_is_asked_configured_and_left(
    configured: int | None, asked: int | None, prompt: int, expected: int
) -> None:
    assert profile(max_tokens=configured).resolve(Params(max_tokens=asked), prompt).max_tokens == expected


def test_a_floor_that_only_the_context_forbids_is_lowered_to_it() -> None:
    assert profile().resolve(Params(min_tokens=80), 40).min_tokens == 60
    with pytest.raises(InvalidRequest) as refused:
        profile().resolve(Params(min_tokens=20, max_tokens=10), 40)
    assert refused.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("configured", "asked", "num_output", "by_context"),
    [
        (None, None, 60, True),
        (None, 60, 60, False),
        (None, 61, 60, True),
        (60, None, 60, False),
        (None, None, 59, False),
    ],
)
def test_who_set_the_limit_is_told(
    configured: int | None, asked: int | None, num_output: int, by_context: bool
) -> None:
    params = Params(max_tokens=asked)
    assert profile(max_tokens=configured).ends_by_context(params, 40, num_output) is by_context


def test_the_ready_engine_lowers_the_context_and_brings_the_pool() -> None:
    ready = profile().with_ready(Ready(4, 16, 80, 49, 0, "fp16", []))
    assert (ready.context, ready.vocab_size, ready.blocks, ready.block_size) == (80, 49, 4, 16)
    assert ready.longest_prompt == 63
    ready.check_prompt(63)
    with pytest.raises(ContextLengthExceeded) as refused:
        ready.check_prompt(64)
    assert refused.value.message == "prompt has 64 tokens, the limit is 63 (max_model_len 80)"


def test_a_bias_is_named_by_a_token_id() -> None:
    assert profile().resolve(Params(logit_bias={"3": 1.5, "4": -2}), 1).logit_bias == ((3, 1.5), (4, -2.0))
    for name in ("", "x", "-1", "1.5", "٣", "9" * 30):
        with pytest.raises(InvalidRequest) as refused:
            profile().resolve(Params(logit_bias={name: 1.0}), 1)
        assert refused.value.param == "logit_bias"


def test_seeds_are_in_the_range_that_a_client_may_name() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)


def test_a_client_is_told_what_holds_where_nobody_names_a_parameter() -> None:
    profile = ModelProfile(
        id="m", context=100, vocab_size=10, defaults=Params(temperature=0.6, top_k=20), max_tokens=50
    )
    told = profile.info().params
    assert (told.temperature, told.top_k, told.top_p, told.max_tokens, told.seed) == (0.6, 20, 1.0, 50, None)
    resolved = profile.resolve(Params(), 10, draw=lambda: 7)
    for name in Params.__struct_fields__:
        if getattr(told, name) not in (None, ()):
            assert getattr(resolved, name) == getattr(told, name), name
