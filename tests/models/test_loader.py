"""A folder whose tensors do not fit its configuration is refused by the tensor's name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chatd.errors import ConfigError, ModelError
from chatd.models.loader import load_decoder

from .conftest import PagedDecoder

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=33,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refused(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_decoder(folder, quantization="fp32")
    return caught.value


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(K_PROJ))
    error = refused(folder)
    assert error.error_code == "model_corrupt"
    assert K_PROJ in error.message


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}))
    error = refused(folder)
    assert error.error_code == "model_corrupt"
    assert "model.layers.2.mlp.up_proj.weight" in error.message


def test_a_bias_that_the_config_does_not_call_for_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(48)}))
    assert "model.layers.0.mlp.up_proj.bias" in refused(folder).message


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({K_PROJ: torch.zeros(8, 32)}))
    assert refused(folder).message == f"{K_PROJ} has the shape [8, 32], config.json calls for [16, 32]"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_read_is_named(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to(dtype)}))
    error = refused(folder)
    assert error.error_code == "model_unsupported"
    assert K_PROJ in error.message


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1." in name])
    assert "and 6 more" in refused(folder).message


def test_buffers_of_old_checkpoints_and_a_tied_output_are_ignored(folder: Path) -> None:
    expected = PagedDecoder(load_decoder(folder, quantization="fp32")).step([("a", [1, 2, 3])])
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert torch.equal(PagedDecoder(load_decoder(folder, quantization="fp32")).step([("a", [1, 2, 3])]), expected)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    tied = PagedDecoder(load_decoder(folder, quantization="fp32")).step([("a", [1, 2, 3])])
    assert not torch.equal(tied, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_give_what_their_values_give(folder: Path, dtype: torch.dtype) -> None:
    def round_all(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)

    def widen(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.float()

    rewrite(folder, round_all)
    found = PagedDecoder(load_decoder(folder, quantization="fp32")).step([("a", [1, 2, 3])])
    rewrite(folder, widen)
    expected = PagedDecoder(load_decoder(folder, quantization="fp32")).step([("a", [1, 2, 3])])
    assert torch.equal(found, expected)


def test_shards_load_like_one_file(folder: Path) -> None:
    expected = PagedDecoder(load_decoder(folder, quantization="fp32")).step([("a", [1, 2, 3])])
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(PagedDecoder(load_decoder(folder, quantization="fp32")).step([("a", [1, 2, 3])]), expected)


def test_progress_rises_to_one(folder: Path) -> None:
    reports: list[tuple[str, float]] = []
    load_decoder(folder, quantization="fp32", progress=lambda phase, fraction: reports.append((phase, fraction)))
    fractions = [fraction for _, fraction in reports]
    assert {phase for phase, _ in reports} == {"loading weights"}
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_a_context_beyond_the_models_is_refused_with_the_limit(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_decoder(folder, quantization="fp32", max_model_len=129)
    assert caught.value.message == "max_model_len is 129, the model's context has 128 tokens"
    assert load_decoder(folder, quantization="fp32", max_model_len=100).max_model_len == 100


def test_a_size_that_the_kernels_cannot_run_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=33, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert error.error_code == "model_unsupported"
    assert "intermediate_size is 40" in error.message
