"""Sampling, slow and obvious: rows are sorted, and sums are those of Python's integers.

Bits are those of the kernels where exponentials are: they decide which tokens tie, and the last bit of a weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chatd_kernels.sampling import state as places
from chatd_kernels.sampling.state import SamplingState

Row = npt.NDArray[np.float32]

_UNITS = np.float32(2.0**44)
_WORD = (1 << 32) - 1


def sample_rows(logits: torch.Tensor, state: SamplingState, num_rows: int, *, is_plain: bool = False) -> None:
    """The contract of `chatd_kernels.sampling.sample_rows`; every row is looked at for all that it may want."""
    for i in range(num_rows):
        row: Row = logits[i].float().cpu().numpy()
        num_bad = int((~np.isfinite(row)).sum())
        slot = -1 if is_plain else int(state.row_slots[i])
        if slot < 0 and not is_plain:
            continue
        state.drawn[1, i] = num_bad
        if is_plain:
            state.drawn[0, i] = 0 if num_bad else int(row.argmax())
            continue
        fields = state.table[slot].cpu().numpy()
        state.drawn[0, i] = 0
        if not num_bad and not fields[places.FLAGS] & places.IS_BEAM:
            state.drawn[0, i] = _draw(_adjusted(row, state, slot, fields), fields)
            _go_on(state, slot, int(state.drawn[0, i]))
        if not num_bad and fields[places.FLAGS] & (places.HAS_LOGPROBS | places.IS_BEAM):
            _list_likeliest(row, state, i, slot, fields)


def philox(seed: int, position: int) -> int:
    """The first two words of Philox4x32-10 as one number of 64 bits (Salmon et al. 2011)."""
    words, keys = [position & _WORD, position >> 32, 0, 0], [seed & _WORD, seed >> 32]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(second >> 32) ^ words[1] ^ keys[0], second & _WORD, (first >> 32) ^ words[3] ^ keys[1], first & _WORD]
        keys = [(keys[0] + 0x9E3779B9) & _WORD, (keys[1] + 0xBB67AE85) & _WORD]
    return words[0] << 32 | words[1]


def kept_units(row: Row, fields: npt.NDArray[np.int32]) -> list[int]:
    """The weight of each token after temperature, top-k, top-p and min-p, in units of 2^-44 of the likeliest one's.

    Args:
        row: `[vocab_size]`, after everything that changes logits.
        fields: Of the row's slot.
    """
    floats = fields.view(np.float32)
    scores = (row - row.max()) / floats[places.TEMPERATURE]
    weights = np.exp(scores)
    units = [int(unit) for unit in (weights * _UNITS).astype(np.int64)]
    is_kept = np.ones(len(row), dtype=np.bool_)
    top_k, top_p = int(fields[places.TOP_K]), _wide(fields, places.TOP_P)
    if 0 < top_k < len(row):
        is_kept = scores >= np.sort(scores)[-top_k]
    if top_p:
        kept_ids = np.flatnonzero(is_kept)
        order = kept_ids[np.argsort(-weights[kept_ids], kind="stable")].tolist()
        # Shares are in units of 2^-64; the smallest is that of one token.
        needed, reached = max(1, -(-sum(units[i] for i in order) * top_p >> 64)), 0
        is_kept[:] = False
        for i in order:
            if reached >= needed:
                break
            is_kept[i] = True
            reached += units[i]
    is_kept &= weights >= floats[places.MIN_P]
    return [unit if kept else 0 for unit, kept in zip(units, is_kept.tolist(), strict=True)]


def _draw(row: Row, fields: npt.NDArray[np.int32]) -> int:
    if fields[places.FLAGS] & places.IS_GREEDY:
        return int(row.argmax())
    units = kept_units(row, fields)
    number = philox(_wide(fields, places.SEED), _wide(fields, places.POSITION)) >> 11 << 11
    goal = sum(units) * number >> 64
    for token, unit in enumerate(units):
        goal -= unit
        if goal < 0:
            return token
    raise AssertionError("a row has no weight")


def _adjusted(row: Row, state: SamplingState, slot: int, fields: npt.NDArray[np.int32]) -> Row:
    """The logits, or a beam's log probabilities, after penalties, bias and forbidden ids."""
    flags, floats = int(fields[places.FLAGS]), fields.view(np.float32)
    if not flags & places.ADJUSTS:
        return row
    words = state.words[slot].cpu().numpy().view(np.uint32)
    counts = words & np.uint32(places.STOP_BIT - 1)
    bias_places = words >> np.uint32(places.BIAS_SHIFT)
    biases = np.concatenate((np.zeros(1, dtype=np.float32), state.biases[slot].cpu().numpy()))[bias_places]

    def penalized(values: Row) -> Row:
        penalty = floats[places.REPETITION]
        seen = (counts > 0) | (words & np.uint32(places.PROMPT_BIT) != 0)
        changed: Row = np.where(seen, np.where(values < 0, values * penalty, values / penalty), values)
        return changed

    if flags & places.IS_BEAM:
        row = penalized(row + biases)
    else:
        row = penalized(row) - (counts > 0) * floats[places.PRESENCE]
        row = row - counts.astype(np.float32) * floats[places.FREQUENCY] + biases
    if flags & places.FORBIDS:
        row = np.where(words & np.uint32(places.STOP_BIT) != 0, np.float32(-np.inf), row)
    return row


def _go_on(state: SamplingState, slot: int, token: int) -> None:
    """Count a drawn token."""
    fields: Any = state.table[slot].cpu().numpy().copy()
    fields.view(np.uint64)[places.POSITION // 2] += np.uint64(1)
    state.table[slot] = torch.from_numpy(fields)
    if fields[places.FLAGS] & places.COUNTS and int(state.words[slot, token]) & (places.STOP_BIT - 1) < (
        places.STOP_BIT - 1
    ):
        state.words[slot, token] += 1


def _list_likeliest(row: Row, state: SamplingState, i_row: int, slot: int, fields: npt.NDArray[np.int32]) -> None:
    count = int(fields[places.NUM_LIKELIEST])
    highest = row.max()
    log_sum = np.log(np.exp(row - highest).sum(dtype=np.float32))
    logprobs = (row - highest) - log_sum
    if fields[places.FLAGS] & places.HAS_LOGPROBS:
        state.logprobs[i_row, 0] = float(logprobs[int(state.drawn[0, i_row])])
    ranked = row
    if fields[places.FLAGS] & places.IS_BEAM:
        ranked = logprobs = _adjusted(logprobs, state, slot, fields)
    ids = np.argsort(-ranked, kind="stable")[:count]
    state.likeliest[i_row, :count] = torch.from_numpy(ids.astype(np.int32))
    state.logprobs[i_row, 1 : 1 + count] = torch.from_numpy(logprobs[ids])


def _wide(fields: npt.NDArray[np.int32], place: int) -> int:
    return int(fields.view(np.uint64)[place // 2])
