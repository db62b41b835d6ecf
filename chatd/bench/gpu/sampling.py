"""Drawing tokens on a GPU, beside the same by a sort of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from chatd.bench.gpu.parts import Bench, Rows
from chatd.bench.gpu.timing import seconds_of
from chatd_kernels.sampling import sample_rows
from chatd_kernels.sampling.state import IS_GREEDY, SamplingState, allocate_sampling_state, pack_slot

BATCHES = (1, 8, 32, 128, 256)
VOCABULARIES = (128_256, 151_936)


@dataclass(frozen=True, slots=True)
class Kind:
    """Parameters of all rows of a batch, and how the logits are spread: the deviation of normal ones."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    spread: float = 3.0


KINDS = (
    Kind("greedy", temperature=0.0),
    Kind("temperature"),
    Kind("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Kind("top-p 0.95", top_p=0.95),
    # Nothing stands out, so that no margin holds few candidates: the worst case.
    Kind("top-p 0.95, flat", top_p=0.95, spread=0.3),
)


def sampling_rows(
    bench: Bench,
    batches: Sequence[int] = BATCHES,
    vocabularies: Sequence[int] = VOCABULARIES,
    kinds: Sequence[Kind] = KINDS,
) -> Rows:
    """Yield µs of one step's draws, ours and by a sort; logits are float32."""
    for vocab_size in vocabularies:
        state = allocate_sampling_state(vocab_size, max(batches), max(batches), bench.device)
        state.row_slots.copy_(torch.arange(max(batches), dtype=torch.int32))
        for kind in kinds:
            for batch in batches:
                generator = torch.Generator(bench.device).manual_seed(0)
                logits = torch.randn(batch, vocab_size, generator=generator, device=bench.device) * kind.spread
                ours = seconds_of(_ours(logits, state, kind), bench.stream, budget_s=0.05)
                sort = seconds_of(partial(draw_by_sort, logits, kind), bench.stream, budget_s=0.05)
                yield {
                    "vocabulary": vocab_size,
                    "rows": kind.name,
                    "batch": batch,
                    "ours µs": ours * 1e6,
                    "sort µs": sort * 1e6,
                    "sort / ours": sort / ours,
                    "GB/s of one read": logits.nbytes / ours / 1e9,
                }


def _ours(logits: torch.Tensor, state: SamplingState, kind: Kind) -> partial[None]:
    is_greedy = kind.temperature == 0.0
    fields = pack_slot(
        flags=IS_GREEDY if is_greedy else 0, temperature=kind.temperature, top_k=kind.top_k, top_p=kind.top_p
    )
    state.table.copy_(torch.from_numpy(fields).expand(state.num_slots, -1))
    has_edges = kind.top_k > 0 or kind.top_p < 1.0
    return partial(sample_rows, logits, state, len(logits), is_plain=is_greedy, has_edges=has_edges)


def draw_by_sort(logits: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Draw as it is often done: sort, cut off by rank and by running sum, and race exponential numbers.

    Nothing here waits for the device, which a captured graph would not allow.
    """
    if kind.temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits / kind.temperature
    if kind.top_k == 0 and kind.top_p >= 1.0:
        weights = logits.softmax(dim=-1)
        return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)
    values, ids = logits.sort(dim=-1, descending=True)
    if kind.top_k:
        values[:, kind.top_k :].fill_(-torch.inf)
    weights = values.softmax(dim=-1)
    weights.masked_fill_(weights.cumsum(dim=-1) - weights >= kind.top_p, 0.0)
    place = (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1, keepdim=True)
    return ids.gather(1, place)[:, 0]
