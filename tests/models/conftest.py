import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
TINY_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A model folder that is right in every part, for tests that break one part."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    write_json(folder / "config.json", TINY_CONFIG)
    write_json(folder / "tokenizer.json", TINY_TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}", "eos_token": "<end>"})
    save_file({"model.norm.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
