"""Steps that a GPU runs before it serves: they take the most memory, and start every kernel that later steps may start.

A kernel that is compiled in the middle of a conversation would hold up everybody for seconds. All of these steps are in
block 0, whose content no request has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chatd.engine.plan import BlockCopy, BlockId, Chunk, Plan, RequestId, SampleSpec
from chatd.engine.sampling import SamplingParams
from chatd_kernels.sampling.state import MAX_LIKELIEST

_FEWEST_ROWS = 32
"""Of a chunk that attention takes for prefill, in any model."""

_GREEDY = SampleSpec(SamplingParams(max_tokens=1), 0)
_LISTED = SampleSpec(SamplingParams(max_tokens=1, logprobs=1), 0)
_BEAM = SampleSpec(SamplingParams(max_tokens=1), 0, num_candidates=MAX_LIKELIEST)
_DRAWN = SampleSpec(
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=0.1, seed=0),
    0,
    prompt_ids=[0],
)


def warm_up_steps(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> list[Plan]:
    """Return the steps, the last of which is that of as many decodes as there may be.

    The largest ones have as many rows as there may be in as few chunks as can be, or in as many. Others have rows that
    double, since their number decides how products are cut, at the end of the longest context, where positions are
    split over programs; few rows at the begin of one, beside a decode that draws nothing, where they are not; one
    decode for each kind of draw; and decodes that double, for the product with the vocabulary.
    """

    def chunk(index: int, length: int, sample: SampleSpec | None, *, is_late: bool = False) -> Chunk:
        length = min(length, max_model_len)
        start = max_model_len - length if is_late else 0
        blocks = [BlockId(0)] * -(-(start + length) // block_size)
        return Chunk(RequestId(-1 - index), start, [0] * length, blocks, sample)

    def rows(number: int, num_chunks: int, *, is_late: bool = False) -> list[Chunk]:
        """So many rows in so many chunks, or in more where they would be longer than a context."""
        num_chunks = min(max_num_seqs, max(num_chunks, -(-number // max_model_len)))
        ends = [number * i // num_chunks for i in range(num_chunks + 1)]
        return [chunk(i, ends[i + 1] - ends[i], _DRAWN, is_late=is_late) for i in range(num_chunks)]

    few = min(_FEWEST_ROWS, max(1, max_num_batched_tokens - 1))
    steps = (
        rows(max_num_batched_tokens, 1),
        rows(max_num_batched_tokens, max_num_seqs),
        *(rows(number, 1, is_late=True) for number in _doubling(few, max(few + 1, max_num_batched_tokens))),
        [chunk(0, few, _DRAWN), *([chunk(1, 1, None)] if max_num_seqs > 1 and few < max_num_batched_tokens else [])],
        *([chunk(0, 1, kind)] for kind in (_GREEDY, _LISTED, _BEAM)),
        *([chunk(i, 1, _GREEDY) for i in range(number)] for number in _doubling(_FEWEST_ROWS, max_num_seqs)),
        [chunk(i, 1, _DRAWN if i % 2 else _GREEDY) for i in range(max_num_seqs)],
    )
    return [Plan(-1, chunks, (), block_size) for chunks in steps]


def _doubling(first: int, end: int) -> Iterator[int]:
    """Yield numbers below `end`, each twice the one before."""
    while first < end:
        yield first
        first *= 2


def trial_step(last: Plan, num_blocks: int) -> Plan:
    """Return the last of the steps, with a copy of a block before it where there are two."""
    return replace(last, copies=(BlockCopy(BlockId(0), BlockId(1)),) if num_blocks > 1 else ())
