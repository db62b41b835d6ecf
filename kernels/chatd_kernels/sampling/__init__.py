"""Sampling on the device: from logits to tokens without a sort, each row by its own parameters.

What is drawn is a function of the row's logits, its parameters and its draw's number alone, bit for bit, whatever rows
are beside it and however many: a token's weight is `exp((x - max) / temperature)` rounded down to a multiple of 2^-44
of the likeliest one's, and sums of such integers are exact in any order. So are the two products that a draw needs, of
a sum with `top_p` and with the uniform number, each the upper half of 128 bits. (What is 30 nats less likely than the
likeliest token is never drawn; all of that together would be drawn once in 2^27 tokens at most.) The CPU's sampler sums
in floating point, with an exponential that may differ in the last bit: it draws the same token unless the number falls
within about 1e-7 of the border between two.

Rules of equal ones, as the CPU's: of equal logits the lowest id is the likeliest; tokens that tie with the last one of
top-k all stay; of those whose weights tie at the edge of top-p the lowest ids stay; ids are drawn in ascending order.

What a row of V logits costs, in reads of the row:

| | reads | then |
|---|---|---|
| greedy | 1 | |
| temperature, min-p | 2 | one part of 4096 |
| top-k, top-p | 3 | the candidates, up to 8192, about 2 log2(candidates) times out of the first-level cache |
| top-k, top-p, too many candidates | 2 | the row about 2 log2(distinct logits) times, by one program |

The second and third read of a small batch come from the cache. A sort of 32-bit keys with 64-bit places moves each
number about 8 times there and back (12 bytes each way), and probabilities, their running sum and the way back to the
order of ids are passes more: some 250 bytes a logit against 6 (16-bit logits) or 12 here. Penalties, bias and forbidden
ids read one 32-bit word more for each logit, of rows that have some.

`scan_parts` finds the maxima of parts of a row, `weigh_parts` how many tokens lie within some margins of the row's
maximum, and their weight; `gather_candidates` writes down those within the narrowest margin that must hold the edge;
`draw_tokens` finds the edge among them and draws. `list_part_likeliest` and `list_likeliest` rank tokens for log
probabilities and beams.

Source: rejection by pivots in place of sorting, FlashInfer (Ye et al. 2025); Philox, Salmon et al. 2011.
"""

from __future__ import annotations

import torch

from chatd_kernels.dispatch import launcher
from chatd_kernels.sampling.state import SamplingState


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
    """Write the first rows' tokens to `state.drawn`, and to `state.likeliest` what is asked for.

    Args:
        logits: `[at least num_rows, vocab_size]` float16, bfloat16 or float32, contiguous; not changed.
        state: Row i is drawn by the parameters of slot `state.row_slots[i]`; -1 leaves a row alone.
        num_rows: How many rows are looked at.
        is_plain: All rows are greedy with nothing else asked for; slots are not looked at.
        has_draws: Some row has a temperature.
        has_edges: Some row has top-k or top-p.
        num_likeliest: The most that any row wants of the likeliest tokens or, with 0 of them, 1 where a row wants the
            drawn token's log probability.
    """
    launcher("sampling", logits.device.type, "sample_rows")(
        logits,
        state,
        num_rows,
        is_plain=is_plain,
        has_draws=has_draws,
        has_edges=has_edges,
        num_likeliest=num_likeliest,
    )
