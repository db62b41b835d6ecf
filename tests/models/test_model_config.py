"""Configurations mean here what they mean to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from chatd.models.model_config import DecoderConfig, load_decoder_config, load_generation_defaults

BASE = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}


def load(folder: Path, architecture: str, **fields: object) -> tuple[DecoderConfig, Any]:
    """Return what chatd and what transformers read from the same config.json."""
    model_type = architecture.removesuffix("ForCausalLM").lower()
    content = BASE | {"architectures": [architecture], "model_type": model_type} | fields
    (folder / "config.json").write_text(json.dumps(content))
    return load_decoder_config(folder), AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2, "head_dim": 16}])
def test_what_a_config_leaves_out_is_what_transformers_takes(
    architecture: str, fields: dict[str, object], tmp_path: Path
) -> None:
    if "num_key_value_heads" not in fields:
        # The defaults of three architectures do not divide a small model's heads.
        fields = fields | {"num_attention_heads": 32, "hidden_size": 1024}
    ours, theirs = load(tmp_path, architecture, **fields)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert dict(ours.rope_parameters) == theirs.rope_parameters


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
)
def test_rotary_parameters_are_brought_into_the_present_spelling(fields: dict[str, object], tmp_path: Path) -> None:
    ours, theirs = load(tmp_path, "LlamaForCausalLM", **fields)
    expected = {name: value for name, value in theirs.rope_parameters.items() if name != "type"}
    assert dict(ours.rope_parameters) == expected


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 512),
    ],
)
def test_the_context_ends_where_cached_keys_would_change(
    fields: dict[str, object], context: int, tmp_path: Path
) -> None:
    assert load(tmp_path, "LlamaForCausalLM", **fields)[0].max_context == context


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (0.0, 0, 1.0, 1.0)),
        ({"do_sample": True}, (1.0, 0, 1.0, 1.0)),
        ({"temperature": 0.6, "top_p": 0.95}, (0.6, 0, 0.95, 1.0)),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
            (0.7, 20, 0.8, 1.05),
        ),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}, (0.0, 0, 1.0, 1.1)),
        ({"do_sample": True, "temperature": None, "top_k": None}, (1.0, 0, 1.0, 1.0)),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(
    generation: dict[str, object], expected: tuple[float, ...], tiny_folder: Path
) -> None:
    (tiny_folder / "generation_config.json").write_text(json.dumps(generation))
    found = load_generation_defaults(tiny_folder)
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2, 3)),
        ({"eos_token_id": [5, 1]}, 2, (1, 2, 3, 5)),
        ({"eos_token_id": 4}, [2, 6], (2, 3, 4, 6)),
        ({"eos_token_id": [5, 8, -1, True]}, None, (3, 5)),
    ],
)
def test_stop_ids_are_those_of_all_three_files_that_are_in_the_vocabulary(
    generation: dict[str, object] | None, config: object, expected: tuple[int, ...], tiny_folder: Path
) -> None:
    if generation is not None:
        (tiny_folder / "generation_config.json").write_text(json.dumps(generation))
    content = json.loads((tiny_folder / "config.json").read_text()) | {"eos_token_id": config}
    (tiny_folder / "config.json").write_text(json.dumps(content))
    assert load_generation_defaults(tiny_folder).stop_token_ids == expected
