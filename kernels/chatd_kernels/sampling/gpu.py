"""Sampling on GPUs: which kernels a batch of rows starts."""

from __future__ import annotations

from typing import Any

import torch

from chatd_kernels.launch import ACTIVATIONS, Launch, next_power_of_2
from chatd_kernels.sampling.gpu_draw import draw_tokens
from chatd_kernels.sampling.gpu_kernels import gather_candidates, pick_likeliest, scan_parts, weigh_parts
from chatd_kernels.sampling.gpu_likeliest import list_likeliest, list_part_likeliest
from chatd_kernels.sampling.state import MAX_LIKELIEST, PART, SamplingState

_BLOCK = 1024
"""Tokens that a program of parts holds at once."""
_CHUNK = 2048
"""Tokens that a program of rows holds at once."""


def launches(
    logits: torch.Tensor,
    state: SamplingState,
    num_rows: int,
    *,
    is_plain: bool = False,
    has_draws: bool = True,
    has_edges: bool = True,
    num_likeliest: int = 0,
) -> list[Launch]:
    """What `sample_rows` starts, in this order.

    Raises:
        ValueError: a shape or dtype is not supported.
    """
    vocab_size, max_num_rows = state.vocab_size, state.max_num_rows
    if logits.dtype not in ACTIVATIONS or not logits.is_contiguous() or logits.dim() != 2:
        raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}; expected contiguous rows of floats")
    if logits.shape[1] != vocab_size:
        raise ValueError(f"logits have {logits.shape[1]} columns, the state has {vocab_size}")
    if not 0 <= num_rows <= min(len(logits), max_num_rows):
        raise ValueError(f"{num_rows} rows are to be drawn, there are {len(logits)} and room for {max_num_rows}")
    if num_likeliest > MAX_LIKELIEST:
        raise ValueError(f"{num_likeliest} of the likeliest tokens are wanted, the limit is {MAX_LIKELIEST}")
    if num_rows == 0:
        return []
    num_parts = -(-vocab_size // PART)
    grid = (num_rows, num_parts)
    row: dict[str, Any] = {
        "logits": logits,
        "table": state.table,
        "words": state.words,
        "biases": state.biases,
        "row_slots": state.row_slots,
        "VOCAB": vocab_size,
        "NUM_PARTS": num_parts,
    }
    parts, keys = {"PARTS": next_power_of_2(num_parts)}, {"part_keys": state.part_keys}
    sums = {"part_max": state.part_max, "part_sum": state.part_sum}
    drawn = {"part_bad": state.part_bad, "drawn": state.drawn, "max_num_rows": max_num_rows}
    listed = {"candidates": state.candidates, "scores": state.scores}
    blocks = {"PART": PART, "BLOCK": _BLOCK}

    # Bits count: a product and a sum are rounded each by itself.
    how: dict[str, Any] = {"num_warps": 8, "fuses_multiply_add": False}
    scan = {**row, **keys, **sums, **blocks, "part_bad": state.part_bad, "IS_PLAIN": is_plain}
    found = [Launch(scan_parts, grid, scan, **how)]
    if is_plain:
        arguments = {**keys, **drawn, **parts, "NUM_PARTS": num_parts}
        return [*found, Launch(pick_likeliest, (num_rows,), arguments, num_warps=1)]
    margins = {**keys, **parts, "margins": state.margins}
    if has_draws:
        found.append(Launch(weigh_parts, grid, {**row, **margins, **blocks}, **how))
        if has_edges:
            found.append(Launch(gather_candidates, grid, {**row, **margins, **listed, **blocks}, **how))
    chunks = {"PART": PART, "CHUNK": _CHUNK, "HAS_DRAWS": has_draws}
    found.append(Launch(draw_tokens, (num_rows,), {**row, **margins, **listed, **drawn, **chunks}, **how))
    if num_likeliest > 0:
        lists = {**parts, **sums, "part_likeliest": state.part_likeliest}
        found.append(Launch(list_part_likeliest, grid, {**row, **lists, "PART": PART}, **how))
        del row["words"], row["biases"]
        results = {"drawn": state.drawn, "likeliest": state.likeliest, "logprobs": state.logprobs}
        width = {"WIDTH": 32 if num_likeliest <= 32 else MAX_LIKELIEST}
        found.append(Launch(list_likeliest, (num_rows,), {**row, **lists, **results, **width}, **how))
    return found


def sample_rows(
    logits: torch.Tensor,
    state: SamplingState,
    num_rows: int,
    *,
    is_plain: bool = False,
    has_draws: bool = True,
    has_edges: bool = True,
    num_likeliest: int = 0,
) -> None:
    """The contract of `chatd_kernels.sampling.sample_rows`."""
    for launch in launches(
        logits,
        state,
        num_rows,
        is_plain=is_plain,
        has_draws=has_draws,
        has_edges=has_edges,
        num_likeliest=num_likeliest,
    ):
        launch.run()
