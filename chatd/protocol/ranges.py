"""What sampling parameters may be: one table for the schema, for the engine that checks it, and for forms.

Frames are read without it, so that a client can read what a daemon with other ranges has.
"""

from __future__ import annotations

from typing import NamedTuple

from chatd.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20


class Range(NamedTuple):
    """The least and the greatest value, both allowed; whole numbers where these are."""

    low: float
    high: float


RANGES: dict[str, Range] = {
    "temperature": Range(0.0, 5.0),
    "top_p": Range(0.0, 1.0),
    "top_k": Range(0, 2**31),
    "min_p": Range(0.0, 1.0),
    "max_tokens": Range(1, 2**31),
    "min_tokens": Range(0, 2**31),
    "seed": Range(0, 2**63 - 1),
    "repetition_penalty": Range(0.01, 10.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "logprobs": Range(0, MAX_TOP_LOGPROBS),
}
BIAS_RANGE = Range(-100.0, 100.0)


def check_range(name: str, value: float, within: Range) -> None:
    """Refuse a number that is out of range; NaN is out of all.

    Raises:
        InvalidRequest: Names the value and the range.
    """
    if not within.low <= value <= within.high:
        raise InvalidRequest(f"{name} is {value}, the range is {within.low} to {within.high}", param=name)


def check_stop_strings(stop: tuple[str, ...]) -> None:
    """Refuse too many stop strings, and too long or empty ones.

    Raises:
        InvalidRequest: Names the numbers.
    """
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(stop)} stop strings, the limit is {MAX_STOP_STRINGS}", param="stop")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"a stop string has {len(text)} characters, the range is 1 to {MAX_STOP_STRING_CHARS}", param="stop"
            )
