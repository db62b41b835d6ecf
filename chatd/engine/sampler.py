"""From logits to tokens: each row by its own parameters, bit for bit the same whatever rows are beside it.

Logits are changed in this order: repetition penalty, presence and frequency penalties, logit bias, stop ids that
`min_tokens` forbids; then temperature, top-k, top-p, min-p, and one draw. Greedy rows that ask for nothing else share
one argmax. Knows nothing of requests but their id, which keys a cache of what their history contains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from chatd.engine.philox import uniforms
from chatd.engine.plan import RequestId, SampleSpec, TokenLogprobs
from chatd.engine.sampling import SamplingParams

FloatRow = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# Requests whose history is remembered between steps; more than run at once, so that none is rebuilt at every step.
MAX_HISTORIES = 1024

# How far below the likeliest token candidates are sought first. Nearly every nucleus lies in the first range, so that
# a few hundred values are sorted instead of the vocabulary; where it does not, the next range is tried, then all.
_MARGINS = (6.0, 14.0, np.inf)

# What is colder is as good as greedy, and would be 0 in float32.
_MIN_TEMPERATURE = 1e-30

# Bins of scores for top-p; what is less likely than e^-128 of the likeliest shares the last one.
_BINS_PER_NAT = 16
_NUM_BINS = 2048

# Probabilities are summed in blocks first, to find a draw's place without a running sum over the vocabulary.
_SUM_BLOCK = 256


@dataclass(slots=True)
class Sampled:
    """The tokens of one step.

    Attributes:
        tokens: The token drawn for each request.
        logprobs: For those that asked.
        failed: Requests whose logits were not finite, and why; they have no token.
        candidates: For those that want some in place of a token, likeliest first.
    """

    tokens: dict[RequestId, int] = field(default_factory=dict)
    logprobs: dict[RequestId, TokenLogprobs] = field(default_factory=dict)
    failed: dict[RequestId, str] = field(default_factory=dict)
    candidates: dict[RequestId, list[tuple[int, float]]] = field(default_factory=dict)


class _History:
    """Which ids a request's prompt and answer contain, and how often the answer has each; grows with the answer."""

    def __init__(self) -> None:
        self.num_prompt = 0
        self.num_output = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> Ids:
        """Every id seen, once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> FloatRow:
        """How often the answer has each of `ids`; 0 for those of the prompt only."""
        return self._counts[: len(self._places)]

    def extend(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Take in what was not seen yet; both sequences only ever grow."""
        for token_id in prompt_ids[self.num_prompt :]:
            self._place(token_id)
        for token_id in output_ids[self.num_output :]:
            place = self._place(token_id)  # may replace the array of counts
            self._counts[place] += 1.0
        self.num_prompt = len(prompt_ids)
        self.num_output = len(output_ids)

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        return place


class Sampler:
    """Draws the tokens of a step."""

    def __init__(self) -> None:
        self._histories: OrderedDict[RequestId, _History] = OrderedDict()

    def sample(self, logits: torch.Tensor, specs: Sequence[tuple[RequestId, SampleSpec]]) -> Sampled:
        """Draw one token for each row.

        Args:
            logits: `[len(specs), vocab_size]`, float32, on the CPU; not changed.
            specs: Whose each row is, and how it is drawn.
        """
        assert logits.shape[0] == len(specs), f"{logits.shape[0]} rows of logits for {len(specs)} samples"
        result = Sampled()
        if not specs:
            return result
        finite = _finite_rows(logits)
        plain = [finite[i] and spec.is_plain for i, (_, spec) in enumerate(specs)]
        if any(plain):
            for (request_id, _), is_plain, token in zip(specs, plain, _argmax(logits), strict=True):
                if is_plain:
                    result.tokens[request_id] = token
        drawn = [i for i, (_, spec) in enumerate(specs) if finite[i] and not spec.params.is_greedy]
        numbers = dict(
            zip(
                drawn,
                uniforms([specs[i][1].params.seed for i in drawn], [specs[i][1].output_position for i in drawn]),
                strict=True,
            )
        )
        for i, (request_id, spec) in enumerate(specs):
            if not finite[i]:
                num_bad = int((~torch.isfinite(logits[i])).sum())
                result.failed[request_id] = f"{num_bad} of {logits.shape[1]} logits are not finite"
            elif spec.num_candidates:
                result.candidates[request_id] = beam_candidates(logits[i], spec)
            elif not plain[i]:
                row = logits[i].numpy()
                token = self._sample_row(row, request_id, spec, float(numbers.get(i, 0.0)))
                result.tokens[request_id] = token
                if spec.params.logprobs is not None:
                    result.logprobs[request_id] = token_logprobs(row, token, spec.params.logprobs)
        return result

    def _sample_row(self, row: FloatRow, request_id: RequestId, spec: SampleSpec, number: float) -> int:
        logits = self._adjusted(row, request_id, spec)
        if spec.params.is_greedy:
            return int(logits.argmax())
        ids, weights = candidates(logits, spec.params)
        place = _place_of(weights, number)
        return place if ids is None else int(ids[place])

    def _adjusted(self, row: FloatRow, request_id: RequestId, spec: SampleSpec) -> FloatRow:
        """Return the row after penalties, bias and forbidden stop ids; the row itself where there are none."""
        params = spec.params
        if not (params.needs_history or params.logit_bias or spec.stop_token_ids):
            return row
        logits = row.copy()
        if params.needs_history:
            history = self._history(request_id, spec)
            apply_penalties(logits, history.ids, history.counts, params)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            np.add.at(logits, np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float32))
        if spec.stop_token_ids:
            logits[list(spec.stop_token_ids)] = -np.inf
        return logits

    def _history(self, request_id: RequestId, spec: SampleSpec) -> _History:
        history = self._histories.get(request_id)
        if (
            history is None
            or history.num_prompt != len(spec.prompt_ids)
            or not history.num_output <= len(spec.output_ids)
        ):
            history = self._histories[request_id] = _History()
            while len(self._histories) > MAX_HISTORIES:
                self._histories.popitem(last=False)
        history.extend(spec.prompt_ids, spec.output_ids)
        self._histories.move_to_end(request_id)
        return history


def beam_candidates(row: torch.Tensor, spec: SampleSpec) -> list[tuple[int, float]]:
    """Return the likeliest tokens after a beam, with their log probabilities as transformers' beam search has them.

    Log probabilities are of the row as the model gave it. Then they are changed in the order of transformers'
    processors: bias, repetition penalty, stop ids that `min_tokens` forbids.

    Args:
        row: `[vocab_size]`, float32, on the CPU.
        spec: Of the beam; its history is looked at anew, since the next beam under this name may be another's child.
    """
    params = spec.params
    scores = torch.log_softmax(row, dim=-1).numpy()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        np.add.at(scores, np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float32))
    if params.repetition_penalty != 1.0:
        seen = np.unique(
            np.concatenate([np.asarray(part, dtype=np.int64) for part in (spec.prompt_ids, spec.output_ids)])
        )
        apply_penalties(scores, seen, np.zeros(len(seen), dtype=np.float32), params)
    if spec.stop_token_ids:
        scores[list(spec.stop_token_ids)] = -np.inf
    count = min(spec.num_candidates, len(scores))
    lowest = np.partition(scores, len(scores) - count)[len(scores) - count]
    places = np.flatnonzero(scores >= lowest)
    order = np.argsort(-scores[places], kind="stable")[:count]
    return [(int(place), float(scores[place])) for place in places[order]]


def apply_penalties(logits: FloatRow, ids: Ids, counts: FloatRow, params: SamplingParams) -> None:
    """Change the logits of the ids that the history contains.

    Args:
        logits: `[vocab_size]`, changed in place.
        ids: The distinct ids of prompt and answer.
        counts: How often the answer has each.
        params: The three penalties.

    Source: repetition, CTRL (Keskar et al., 2019); presence and frequency, OpenAI's API reference.
    """
    values = logits[ids]
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        values = np.where(values < 0, values * penalty, values / penalty)
    if params.presence_penalty != 0.0:
        values -= (counts > 0) * np.float32(params.presence_penalty)
    if params.frequency_penalty != 0.0:
        values -= counts * np.float32(params.frequency_penalty)
    logits[ids] = values


def candidates(logits: FloatRow, params: SamplingParams) -> tuple[Ids | None, FloatRow]:
    """Return the tokens that temperature, top-k, top-p and min-p leave, and their relative probabilities.

    Args:
        logits: `[vocab_size]`; minus infinity forbids a token, and at least one is not forbidden.
        params: `temperature` is above 0.

    Returns:
        Ids in ascending order, or None for the whole vocabulary, and a weight for each; the likeliest token's is 1.
        Tokens that tie with the last one of top-k all stay; of those that tie at the edge of top-p, the lowest ids do.
    """
    # The maximum is taken off before the division, so that no temperature overflows.
    scores = (logits - logits.max()) / np.float32(max(params.temperature, _MIN_TEMPERATURE))
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = _top_k(scores, params.top_k)
        scores = scores[ids]
    weights = np.exp(scores)
    if params.top_p < 1.0:
        kept = _top_p(scores, weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def token_logprobs(row: FloatRow, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log probability of a token and of the likeliest ones, in the row as the model gave it."""
    highest = float(row.max())
    log_sum = highest + float(np.log(np.exp(row - np.float32(highest)).sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    if num_top > 0:
        ids = _top_k(row - np.float32(highest), min(num_top, len(row)))
        values = row[ids]
        order = np.argsort(-values, kind="stable")[:num_top]
        top = [(int(ids[i]), float(values[i]) - log_sum) for i in order]
    return TokenLogprobs(float(row[token_id]) - log_sum, tuple(top))


def _top_k(scores: FloatRow, k: int) -> Ids:
    """Return the ids, ascending, of the `k` highest scores, and of those that tie with the last of them."""
    for margin in _MARGINS:
        ids = np.flatnonzero(scores >= -margin)
        if len(ids) >= k:
            break
    values = scores[ids]
    lowest = np.partition(values, len(values) - k)[len(values) - k]
    kept: Ids = ids[values >= lowest]
    return kept


def _top_p(scores: FloatRow, weights: FloatRow, top_p: float) -> Ids:
    """Return the places, ascending, of the smallest set that has at least `top_p` of the weight; never none."""
    needed = top_p * float(weights.sum(dtype=np.float64))
    for margin in _MARGINS:
        places = np.flatnonzero(scores >= -margin)
        likely = weights[places]
        if margin == np.inf or float(likely.sum(dtype=np.float64)) >= needed:
            break
    # Scores fall into bins; only the bin in which the sum reaches what is needed has to be sorted.
    bins = np.minimum(scores[places] * np.float32(-_BINS_PER_NAT), np.float32(_NUM_BINS - 1)).astype(np.intp)
    sums = np.cumsum(np.bincount(bins, weights=likely))
    edge_bin = min(int(np.searchsorted(sums, needed, side="left")), len(sums) - 1)
    edge = np.flatnonzero(bins == edge_bin)
    order = np.argsort(-likely[edge], kind="stable")
    reached = np.cumsum(likely[edge][order], dtype=np.float64) + (sums[edge_bin - 1] if edge_bin else 0.0)
    num_kept = max(1, int(np.searchsorted(reached, needed, side="left")) + 1)
    kept = bins < edge_bin
    kept[edge[order[:num_kept]]] = True
    nucleus: Ids = places[kept]
    return nucleus


def _place_of(weights: FloatRow, number: float) -> int:
    """Return the first place at which the running sum of weights exceeds `number` times their sum."""
    num_whole = len(weights) // _SUM_BLOCK * _SUM_BLOCK
    sums = np.cumsum(
        np.append(
            weights[:num_whole].reshape(-1, _SUM_BLOCK).sum(axis=1, dtype=np.float64),
            weights[num_whole:].sum(dtype=np.float64),
        )
    )
    target = number * sums[-1]
    block = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
    start = block * _SUM_BLOCK
    inside = np.cumsum(weights[start : start + _SUM_BLOCK], dtype=np.float64)
    place = int(np.searchsorted(inside, target - (sums[block - 1] if block else 0.0), side="right"))
    if place >= len(inside) or weights[start + place] == 0.0:
        # Rounding between the two sums left the target at the very end; the last token of any weight is the answer.
        place = int(np.flatnonzero(weights[: start + len(inside)])[-1]) - start
    return start + place


def _finite_rows(logits: torch.Tensor) -> list[bool]:
    finite: list[bool] = np.isfinite(logits.numpy()).all(axis=1).tolist()
    return finite


def _argmax(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row; of equal ones the lowest id."""
    tokens: list[int] = logits.numpy().argmax(axis=1).tolist()
    return tokens
