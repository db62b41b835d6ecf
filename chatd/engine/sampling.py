"""What a request may ask of sampling. Knows ranges; does not know how tokens are drawn (`engine.sampler`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from chatd.errors import InvalidRequest
from chatd.protocol.ranges import BIAS_RANGE, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, RANGES, Range, check_range

MAX_BEAM_WIDTH = 10
MAX_LENGTH_PENALTY = 5.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are drawn; every field is resolved (no "use the default" left).

    Attributes:
        max_tokens: Ends the answer as `max_output_tokens`.
        min_tokens: Stop ids are not drawn before this many tokens.
        temperature: 0 is greedy and exact.
        top_k: 0 keeps all.
        top_p: Keeps the smallest set with at least this probability.
        min_p: Drops what is less likely than this share of the likeliest.
        seed: Draw number i of the answer is Philox(seed, i); so the seed is the sampler's whole state.
        repetition_penalty: Over prompt and answer, as in CTRL (Keskar et al., 2019); 1 is off.
        presence_penalty: Over the answer, as OpenAI's; 0 is off.
        frequency_penalty: Over the answer, as OpenAI's; 0 is off.
        logit_bias: (token id, added to its logit) pairs.
        stop_token_ids: The model's stop ids and the request's own; the one that ends an answer is kept in the ids.
        ignore_eos: The model's stop ids do not end the answer.
        logprobs: How many of the likeliest tokens to report beside the drawn one; None reports nothing.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """True where the likeliest token is taken and nothing is drawn."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """True where a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search for the likeliest sequences in place of drawing one; as transformers' `generate(num_beams=…)`.

    Attributes:
        width: Sequences that are kept at each token.
        num_returned: Of the best finished ones; at most `width`.
        length_penalty: A sequence's score is the sum of its log probabilities over length ** penalty.
        early_stopping: True ends with `width` finished sequences; False when none that goes on is likely to become
            better; "never" when none can.
    """

    width: int
    num_returned: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what is out of range.

    Raises:
        InvalidRequest: Names the field, its value and its range. NaN fails every range.
    """
    for name, within in RANGES.items():
        check_range(name, getattr(params, name) or 0, within)
    check_range("min_tokens", params.min_tokens, Range(0, params.max_tokens))
    check_range("stop_token_ids", len(params.stop_token_ids), Range(0, MAX_STOP_TOKEN_IDS))
    check_range("logit_bias", len(params.logit_bias), Range(0, MAX_LOGIT_BIAS))
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{token_id} is not in the vocabulary of {vocab_size} tokens", param="stop_token_ids")
    for token_id, bias in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{token_id} is not in the vocabulary of {vocab_size} tokens", param="logit_bias")
        check_range("logit_bias", bias, BIAS_RANGE)


def check_beam_search(
    search: BeamSearch, params: SamplingParams, vocab_size: int, max_num_seqs: int = MAX_BEAM_WIDTH
) -> None:
    """Refuse a search that is out of range, or parameters that a search has no place for.

    `min_tokens`, `logit_bias` and `repetition_penalty` change the log probabilities, as transformers' processors do.

    Args:
        search: What is asked for.
        params: The same request's, which have passed `check_sampling_params`.
        vocab_size: Ids are below this.
        max_num_seqs: Requests, and so beams, that run at once, where that is known.

    Raises:
        InvalidRequest: Names the field. NaN fails every range.
    """
    stop_ids = len(params.stop_token_ids)
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("beam_width", search.width, 1, min(MAX_BEAM_WIDTH, max_num_seqs, max(1, vocab_size - stop_ids))),
        ("num_returned", search.num_returned, 1, search.width),
        ("length_penalty", search.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise InvalidRequest(f"{name} is {value}, the range is {low} to {high}", param=name)
    neutral: tuple[tuple[str, float | None, float | None], ...] = (
        ("temperature", params.temperature, 0.0),
        ("top_k", params.top_k, 0),
        ("top_p", params.top_p, 1.0),
        ("min_p", params.min_p, 0.0),
        ("presence_penalty", params.presence_penalty, 0.0),
        ("frequency_penalty", params.frequency_penalty, 0.0),
        ("logprobs", params.logprobs, None),
    )
    for name, given, nothing in neutral:
        if given != nothing:
            raise InvalidRequest(f"{name} is {given}, a beam search takes {nothing} only", param=name)
