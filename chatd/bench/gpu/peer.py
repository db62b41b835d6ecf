"""The same prompts on the same card by transformers' continuous batching, with weights of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from chatd.bench.gpu.engine import prompts, served_row
from chatd.bench.gpu.models import QWEN3_8B, RawConfig
from chatd.bench.gpu.parts import Bench, NotHere, Row, Rows, free_memory
from chatd_kernels.stream import Stream

_WARM_UP_TOKENS = 4


def peer_rows(
    bench: Bench,
    raw: RawConfig = QWEN3_8B,
    *,
    batch: int = 64,
    prompt: int = 128,
    max_tokens: int = 128,
    max_num_batched_tokens: int = 2048,
    options: Mapping[str, Any] | None = None,
) -> Rows:
    """Yield how fast each answers so many prompts that come at once, from the first one's arrival on.

    Args:
        bench: See there.
        raw: As config.json.
        batch: Prompts.
        prompt: Tokens of each.
        max_tokens: Of each answer, which nothing ends before.
        max_num_batched_tokens: Rows of a step of ours.
        options: More fields of transformers' `ContinuousBatchingConfig`.

    Raises:
        NotHere: This transformers has no continuous batching.
    """
    ids = prompts(batch, prompt, raw["vocab_size"])
    ours = served_row(bench.stream, raw, ids, max_tokens, max_num_batched_tokens)
    yield {"server": "chatd", "attention": "its own", "prompts": batch, **ours}
    # What ours took goes back to the card before the other asks how much is free.
    free_memory(bench.stream)
    name, attention, theirs = _theirs(bench.stream, raw, ids, max_tokens, dict(options or {}))
    yield {"server": name, "attention": attention, "prompts": batch, **theirs}


def _theirs(
    stream: Stream, raw: RawConfig, ids: list[list[int]], max_tokens: int, options: dict[str, Any]
) -> tuple[str, str, Row]:
    try:
        transformers: Any = import_module("transformers")
        batching_config: Any = import_module("transformers.generation").ContinuousBatchingConfig
    except (ImportError, AttributeError) as error:
        raise NotHere(f"no continuous batching: {error}") from error
    fields = {key: value for key, value in raw.items() if key not in ("architectures", "model_type", "dtype")}
    config = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    with torch.device(stream.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, raw["dtype"])).eval()
    if not hasattr(model, "generate_batch"):
        raise NotHere(f"transformers {transformers.__version__} has no generate_batch")
    # It computes in a thread of its own, in the order of another stream.
    stream.synchronize()
    if find_spec("flash_attn") is None and find_spec("flash_attn_interface") is None:
        # Otherwise it would ask a server for these kernels.
        options.setdefault("auto_switch_to_flash", False)
    known = {field.name for field in dataclass_fields(batching_config)}
    options = {key: value for key, value in options.items() if key in known}

    def answer(num_tokens: int) -> list[Any]:
        results = model.generate_batch(
            ids,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=batching_config(**options),
            record_timestamps=True,
            progress_bar=False,
        )
        failed = [result.error for result in results.values() if result.error is not None]
        if failed or len(results) < len(ids):
            raise RuntimeError(f"{len(results)} of {len(ids)} answers, errors: {failed[:1]}")
        return list(results.values())

    answer(_WARM_UP_TOKENS)
    answers = answer(max_tokens)
    start = min(one.created_time for one in answers)
    end = max(one.timestamps[-1] for one in answers)
    num_tokens = sum(len(one.generated_tokens) for one in answers)
    attention = str(model.config._attn_implementation)
    return (
        f"transformers {transformers.__version__}",
        attention,
        {"tokens": num_tokens, "seconds": end - start, "tok/s": num_tokens / (end - start)},
    )
