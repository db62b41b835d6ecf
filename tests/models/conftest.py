import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from chatd.models.attention import ForwardInput
from chatd.models.decoder import Decoder
from chatd.models.registry import ModelFiles, resolve
from chatd_kernels.kv_cache import allocate_kv_cache
from chatd_kernels.paged_attention import build_metadata

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


class PagedDecoder:
    """A decoder with sequences whose blocks lie in random order in its pool.

    Slots that no sequence has written are NaN, so that reading one shows.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.block_size = block_size
        self.cache = allocate_kv_cache(
            num_blocks, config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype=kv_dtype
        )
        self.cache.data.fill_(float("nan"))
        decoder.bind_kv_cache(self.cache)
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, chunks: Sequence[tuple[str, Sequence[int]]], *, all_rows: bool = False) -> torch.Tensor:
        """Run one forward over chunks (sequence, its next tokens); return logits of each chunk's last row, or all."""
        bounds, before, tables, positions, slots, rows = [0], [], [], [], [], []
        for name, tokens in chunks:
            start = self._lengths.get(name, 0)
            table = self._tables.setdefault(name, [])
            while len(table) * self.block_size < start + len(tokens):
                table.append(self._free.pop())
            for position in range(start, start + len(tokens)):
                positions.append(position)
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
            self._lengths[name] = start + len(tokens)
            bounds.append(bounds[-1] + len(tokens))
            before.append(start)
            tables.append(table)
            rows.append(bounds[-1] - 1)
        metadata = build_metadata(
            bounds, before, tables, layout=self.cache.layout, num_q_heads=self.decoder.config.num_heads
        )
        inputs = ForwardInput(
            token_ids=torch.tensor([token for _, tokens in chunks for token in tokens]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            attention=metadata,
            logits_rows=torch.arange(bounds[-1]) if all_rows else torch.tensor(rows),
        )
        return self.decoder.forward(inputs).clone()

    def greedy(self, prompts: dict[str, list[int]], num_tokens: int, *, chunk: int) -> dict[str, list[int]]:
        """Return each prompt's greedy continuation; prompts join one after the other, `chunk` tokens of them a step."""
        pending = {name: list(tokens) for name, tokens in prompts.items()}
        answers: dict[str, list[int]] = {name: [] for name in prompts}
        joined = 0
        while any(len(answer) < num_tokens for answer in answers.values()):
            joined += 1
            chunks = [
                (name, pending[name][:chunk] or answers[name][-1:])
                for name in list(prompts)[:joined]
                if len(answers[name]) < num_tokens
            ]
            if not chunks:
                continue
            for (name, tokens), row in zip(chunks, self.step(chunks), strict=True):
                prefilling = bool(pending[name])
                pending[name] = pending[name][len(tokens) if prefilling else 0 :]
                if not pending[name]:
                    answers[name].append(int(row.argmax()))
        return answers


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The small real model, fetched if need be."""
    return resolve("smollm2-135m")
