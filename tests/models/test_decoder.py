"""The native decoder computes what transformers computes, from paged blocks, in chunks and in mixed batches."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chatd.models.decoder import Decoder
from chatd.models.loader import load_decoder
from chatd.models.quantization import PackedLinear

from .conftest import PagedDecoder

ROPE = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}
LLAMA, MISTRAL = transformers.LlamaConfig, transformers.MistralConfig
QWEN2, QWEN3 = transformers.Qwen2Config, transformers.Qwen3Config
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LLAMA, {"num_key_value_heads": 1}),
    "llama-tied": (LLAMA, {"num_key_value_heads": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama-biases": (LLAMA, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-wide-heads": (LLAMA, {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}),
    **{f"llama-{name}": (LLAMA, {"rope_parameters": rope}) for name, rope in ROPE.items()},
    "mistral": (MISTRAL, {"num_key_value_heads": 1, "sliding_window": None}),
    "mistral-sliding": (MISTRAL, {"num_key_value_heads": 1, "sliding_window": 21, "head_dim": 32}),
    "qwen2": (QWEN2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-sliding": (QWEN2, {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    "qwen3": (QWEN3, {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases-yarn": (QWEN3, {"attention_bias": True, "head_dim": 16, "rope_parameters": ROPE["yarn"]}),
}
VOCAB = 97


def save_random_model(folder: Path, config_class: Any, fields: dict[str, Any]) -> transformers.PreTrainedModel:
    """Save a two-layer model whose every parameter is random, norms and biases too, and return it."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 256}
    config = config_class(**(sizes | heads | fields), bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """The same weights in transformers and here."""
    folder = tmp_path_factory.mktemp("model")
    model = save_random_model(folder, *MODELS[request.param])
    return model, load_decoder(folder, quantization="fp32", max_num_batched_tokens=128)


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


def test_greedy_answers_are_those_of_generate(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    prompts = {
        "a": random_tokens(37, 1),
        "b": random_tokens(1, 2),
        "c": random_tokens(18, 3),
        "d": random_tokens(16, 4),
    }
    answers = PagedDecoder(decoder).greedy(prompts, 24, chunk=7)
    for name, prompt in prompts.items():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, use_cache=True
            )
        assert answers[name] == expected[0, len(prompt) :].tolist(), name


@pytest.mark.parametrize("sizes", [[64], [1] * 64, [15, 1, 17, 16, 5, 10], [33, 31]])
def test_logits_of_every_position_are_those_of_transformers(pair: tuple[Any, Decoder], sizes: list[int]) -> None:
    model, decoder = pair
    tokens = random_tokens(sum(sizes), 5)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    paged = PagedDecoder(decoder, seed=len(sizes))
    found, start = [], 0
    for size in sizes:
        found.append(paged.step([("a", tokens[start : start + size])], all_rows=True))
        start += size
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random_model(folder, *MODELS["llama"])
    return folder


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("quantization", ["fp32", "fp16", "int8"])
def test_a_row_is_bit_identical_whatever_its_batch_its_chunks_and_its_blocks(
    llama: Path, quantization: str, kv_dtype: torch.dtype
) -> None:
    decoder = load_decoder(llama, quantization=quantization, max_num_batched_tokens=128)
    tokens = random_tokens(50, 6)
    alone = PagedDecoder(decoder, kv_dtype=kv_dtype)
    expected = torch.cat([alone.step([("a", [token])]) for token in tokens])

    whole = PagedDecoder(decoder, kv_dtype=kv_dtype, block_size=32, seed=1).step([("a", tokens)], all_rows=True)
    assert torch.equal(whole, expected)

    crowded = PagedDecoder(decoder, kv_dtype=kv_dtype, seed=2)
    rng = random.Random(3)
    found: list[torch.Tensor] = []
    start = 0
    while start < len(tokens):
        size = rng.choice((1, 1, 2, 3, 8, 13))
        others = [(f"o{i}", random_tokens(rng.randint(1, 5), i)) for i in range(rng.randint(0, 6))]
        before = others[: len(others) // 2]
        chunk = tokens[start : start + size]
        logits = crowded.step([*before, ("a", chunk), *others[len(before) :]], all_rows=True)
        row = sum(len(other) for _, other in before)
        found.append(logits[row : row + len(chunk)])
        start += size
    assert torch.equal(torch.cat(found), expected)


def test_a_step_runs_four_linear_products_a_layer_and_one_more_whatever_it_mixes(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = PagedDecoder(load_decoder(llama, quantization="fp32", max_num_batched_tokens=128))
    paged.step([("a", random_tokens(20, 1)), ("b", random_tokens(3, 2))])
    rows: list[int] = []
    call = PackedLinear.__call__

    def counted(self: PackedLinear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(x.shape[0])
        return call(self, x, *args, **kwargs)

    monkeypatch.setattr(PackedLinear, "__call__", counted)
    paged.step([("a", [1]), ("b", [2]), ("c", random_tokens(30, 3))])
    assert rows == [32] * (4 * 2) + [3]


def test_only_rows_that_sample_have_logits(llama: Path) -> None:
    paged = PagedDecoder(load_decoder(llama, quantization="fp32", max_num_batched_tokens=128))
    assert paged.step([("a", random_tokens(20, 1)), ("b", random_tokens(3, 2))]).shape == (2, VOCAB)


def test_a_cache_of_another_shape_is_refused(llama: Path) -> None:
    from chatd_kernels.kv_cache import allocate_kv_cache

    decoder = load_decoder(llama, quantization="fp32")
    with pytest.raises(ValueError, match=r"\(2, 3, 16\) does not fit"):
        decoder.bind_kv_cache(allocate_kv_cache(4, 2, 3, 16, 16))
