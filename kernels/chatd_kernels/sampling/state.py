"""What sampling keeps on the device between steps: parameters of requests by slot, and what their histories contain.

A slot's parameters are one row of 32-bit fields. What changes a logit by its token is one 32-bit word for each token:

```
31           21  20      19    18                0
[ bias's place ][prompt][stop][ times in the answer ]       no bias: place 0
```
Only words of slots with `ADJUSTS` are read. Nothing here knows how tokens are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FLAGS, TEMPERATURE, MIN_P, TOP_K, TOP_P, SEED, POSITION = 0, 1, 2, 3, 4, 6, 8
REPETITION, PRESENCE, FREQUENCY, NUM_LIKELIEST = 10, 11, 12, 13
"""Places of fields. `TOP_P` is in units of 2^-64, 0 keeps all; it, `SEED` and `POSITION` take two, the lower first."""
NUM_FIELDS = 16

IS_GREEDY, ADJUSTS, COUNTS, FORBIDS, HAS_LOGPROBS, IS_BEAM = 1, 2, 4, 8, 16, 32
"""Flags: takes the likeliest; has words; counts what it draws in them; stop ids are forbidden; wants log probabilities;
draws nothing and wants candidates."""

STOP_BIT, PROMPT_BIT, BIAS_SHIFT = 1 << 19, 1 << 20, 21
MAX_BIASES = 1024
"""Tokens of a slot with a bias."""

MAX_LIKELIEST = 128
"""The most likeliest tokens that a row may want."""

PART = 4096
"""Tokens of a row that one program reads."""
NUM_MARGINS = 4
"""Margins below a row's maximum within which tokens are counted: 4, 8, 16 and 32 nats."""
MAX_CANDIDATES = 8192
"""Tokens of a row that are written down to be searched."""
MAX_VOCAB = 1 << 19
"""Sums of so many weights fit 63 bits."""


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Buffers at addresses that never change, for kernels on one stream.

    Attributes:
        table: `[num_slots, NUM_FIELDS]` int32.
        words: `[num_slots, vocab_size]` int32.
        biases: `[num_slots, MAX_BIASES]` float32; place p of a word is column p - 1.
        row_slots: `[max_num_rows]` int32, the slot of each row or -1.
        drawn: `[2, max_num_rows]` int64: tokens, and how many logits of the row are not finite; then its token is 0.
        likeliest: `[max_num_rows, MAX_LIKELIEST]` int32 ids, likeliest first.
        logprobs: `[max_num_rows, 1 + MAX_LIKELIEST]` float32: of the drawn token, and of the likeliest.
        part_keys: `[max_num_rows, num_parts]` int64: the largest logit with its id, see `gpu_rows.order_key`.
        part_bad: Likewise, int32: logits that are not finite.
        part_max: Likewise, float32: the maximum before anything changed logits.
        part_sum: Likewise: of exponentials relative to it.
        margins: `[max_num_rows, num_parts, 2, NUM_MARGINS]` int64: tokens within margins, and their weights' sum.
        candidates: `[max_num_rows, MAX_CANDIDATES]` int32 ids, ascending.
        scores: Likewise, float32: (logit - maximum) / temperature.
        part_likeliest: `[max_num_rows, num_parts, MAX_LIKELIEST]` int64, as `part_keys`.
    """

    table: torch.Tensor
    words: torch.Tensor
    biases: torch.Tensor
    row_slots: torch.Tensor
    drawn: torch.Tensor
    likeliest: torch.Tensor
    logprobs: torch.Tensor
    part_keys: torch.Tensor
    part_bad: torch.Tensor
    part_max: torch.Tensor
    part_sum: torch.Tensor
    margins: torch.Tensor
    candidates: torch.Tensor
    scores: torch.Tensor
    part_likeliest: torch.Tensor

    @property
    def vocab_size(self) -> int:
        """Tokens of a row."""
        return self.words.shape[1]

    @property
    def max_num_rows(self) -> int:
        """Rows that may be drawn at once."""
        return len(self.row_slots)

    @property
    def num_slots(self) -> int:
        """Requests whose parameters are kept."""
        return len(self.table)


def allocate_sampling_state(
    vocab_size: int, max_num_rows: int, num_slots: int, device: torch.device | str
) -> SamplingState:
    """Allocate the buffers: 4 bytes for each slot and token, and about 100 KiB for each row.

    Raises:
        ValueError: the vocabulary is too large.
    """
    if not 1 <= vocab_size < MAX_VOCAB:
        raise ValueError(f"vocabulary of {vocab_size} tokens, the limit is {MAX_VOCAB - 1}")
    num_parts = -(-vocab_size // PART)

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SamplingState(
        table=zeros(num_slots, NUM_FIELDS, dtype=torch.int32),
        words=zeros(num_slots, vocab_size, dtype=torch.int32),
        biases=zeros(num_slots, MAX_BIASES, dtype=torch.float32),
        row_slots=torch.full((max_num_rows,), -1, dtype=torch.int32, device=device),
        drawn=zeros(2, max_num_rows, dtype=torch.int64),
        likeliest=zeros(max_num_rows, MAX_LIKELIEST, dtype=torch.int32),
        logprobs=zeros(max_num_rows, 1 + MAX_LIKELIEST, dtype=torch.float32),
        part_keys=zeros(max_num_rows, num_parts, dtype=torch.int64),
        part_bad=zeros(max_num_rows, num_parts, dtype=torch.int32),
        part_max=zeros(max_num_rows, num_parts, dtype=torch.float32),
        part_sum=zeros(max_num_rows, num_parts, dtype=torch.float32),
        margins=zeros(max_num_rows, num_parts, 2, NUM_MARGINS, dtype=torch.int64),
        candidates=zeros(max_num_rows, MAX_CANDIDATES, dtype=torch.int32),
        scores=zeros(max_num_rows, MAX_CANDIDATES, dtype=torch.float32),
        part_likeliest=zeros(max_num_rows, num_parts, MAX_LIKELIEST, dtype=torch.int64),
    )


def pack_slot(
    *,
    flags: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    num_likeliest: int = 0,
) -> npt.NDArray[np.int32]:
    """Return the fields of a slot, `[NUM_FIELDS]`."""
    fields = np.zeros(NUM_FIELDS, dtype=np.int32)
    floats, pairs = fields.view(np.float32), fields.view(np.uint64)
    fields[FLAGS] = flags
    floats[TEMPERATURE] = max(temperature, _MIN_TEMPERATURE)
    floats[MIN_P] = min_p
    fields[TOP_K] = top_k if top_k < MAX_VOCAB else 0
    # Below 1 a double is at most 1 - 2^-53, so this fits; the smallest share is that of one token.
    pairs[TOP_P // 2] = 0 if top_p >= 1.0 else max(1, int(top_p * 2.0**64))
    pairs[SEED // 2] = seed
    pairs[POSITION // 2] = position
    floats[REPETITION], floats[PRESENCE], floats[FREQUENCY] = repetition_penalty, presence_penalty, frequency_penalty
    fields[NUM_LIKELIEST] = num_likeliest
    return fields


# What is colder is as good as greedy, and would be 0 in float32.
_MIN_TEMPERATURE = 1e-30
