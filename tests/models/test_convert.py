"""A GGUF file becomes the Hugging Face folder that transformers would have made of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from chatd.errors import ModelError
from chatd.models.convert import convert_gguf
from chatd.models.model_config import load_decoder_config, load_generation_defaults
from chatd.models.model_folder import check_folder

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TOKENS = ["<|endoftext|>", "<think>", *(chr(code) for code in range(33, 127)), "Ġ", "ab", "Ġa"]


def write_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", omit: str = ""
) -> dict[str, np.ndarray]:
    """Write a small Llama as llama.cpp would; return the values its tensors mean, by GGUF name."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 4] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(0)
    if omit != "eos":
        writer.add_eos_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        shapes |= {
            prefix + "attn_norm": (HIDDEN,),
            prefix + "attn_q": (HIDDEN, HIDDEN),
            prefix + "attn_k": (HIDDEN // 2, HIDDEN),
            prefix + "attn_v": (HIDDEN // 2, HIDDEN),
            prefix + "attn_output": (HIDDEN, HIDDEN),
            prefix + "ffn_norm": (HIDDEN,),
            prefix + "ffn_gate": (INTERMEDIATE, HIDDEN),
            prefix + "ffn_up": (INTERMEDIATE, HIDDEN),
            prefix + "ffn_down": (HIDDEN, INTERMEDIATE),
        }
    values = {}
    for name, shape in shapes.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        if weight.ndim == 1:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            blocks = quantize(weight, GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_1)
            weight = dequantize(blocks, GGMLQuantizationType.Q4_1)
        values[f"{name}.weight"] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    return folder


def test_weights_are_those_that_transformers_reads(gguf_path: Path, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write_gguf(gguf_path)
    convert_gguf(gguf_path, folder)
    with torch.device("meta"):
        shell = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(gguf_path))["config"]))
    expected = load_gguf_checkpoint(str(gguf_path), return_tensors=True, model_to_load=shell)["tensors"]
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], np.asarray(tensor), err_msg=name)


def test_rows_that_need_no_order_are_the_dequantized_blocks(gguf_path: Path, folder: Path) -> None:
    values = write_gguf(gguf_path)
    convert_gguf(gguf_path, folder)
    found = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(found["model.layers.1.mlp.down_proj.weight"], values["blk.1.ffn_down.weight"])
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], values["token_embd.weight"])
    # Rows 0, 1, 2, … of a head of 16 pair neighbors; the converted order holds the even ones, then the odd ones.
    head = values["blk.0.attn_k.weight"][:16]
    np.testing.assert_array_equal(
        found["model.layers.0.self_attn.k_proj.weight"][:16], np.concatenate((head[::2], head[1::2]))
    )


def test_the_folder_passes_the_checks_of_any_model_folder(gguf_path: Path, folder: Path) -> None:
    write_gguf(gguf_path)
    fractions: list[float] = []
    generation = {"eos_token_id": [0, 1], "do_sample": True, "temperature": 0.5}
    convert_gguf(gguf_path, folder, generation=generation, progress=lambda _, fraction: fractions.append(fraction))
    check_folder(folder)
    config = load_decoder_config(folder)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (LAYERS, HEADS, KV_HEADS, 16)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50_000.0}
    assert config.tie_word_embeddings
    assert config.max_context == 128
    defaults = load_generation_defaults(folder)
    assert (defaults.stop_token_ids, defaults.temperature, defaults.top_p) == ((0, 1), 0.5, 1.0)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_tokenizer_has_the_files_added_tokens_and_splits_digits(gguf_path: Path, folder: Path) -> None:
    write_gguf(gguf_path)
    convert_gguf(gguf_path, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|endoftext|><think>ab ac12").tokens == [
        "<|endoftext|>",
        "<think>",
        "ab",
        "Ġa",
        "c",
        "1",
        "2",
    ]
    added = tokenizer.get_added_tokens_decoder()
    assert {token_id: (token.content, token.special) for token_id, token in added.items()} == {
        0: ("<|endoftext|>", True),
        1: ("<think>", False),
    }
    assert tokenizer.decode(tokenizer.encode(" ab 12").ids) == " ab 12"
    raw = json.loads((folder / "tokenizer.json").read_text())
    assert raw["pre_tokenizer"]["pretokenizers"][0] == {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"architecture": "gemma"}, "model_unsupported"),
        ({"pre": "llama-bpe"}, "model_unsupported"),
        ({"omit": "eos"}, "model_corrupt"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(
    changes: dict[str, str], code: str, gguf_path: Path, folder: Path
) -> None:
    write_gguf(gguf_path, **changes)
    with pytest.raises(ModelError) as caught:
        convert_gguf(gguf_path, folder)
    assert caught.value.error_code == code
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 3, 40, 2000])
def test_a_truncated_gguf_file_is_refused(keep: int, gguf_path: Path, folder: Path) -> None:
    write_gguf(gguf_path)
    gguf_path.write_bytes(gguf_path.read_bytes()[:keep])
    with pytest.raises(ModelError) as caught:
        convert_gguf(gguf_path, folder)
    assert caught.value.error_code == "model_corrupt"
