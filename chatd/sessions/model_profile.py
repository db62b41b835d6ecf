"""What sessions need to know of the model that is served: its limits and its sampling defaults.

Defaults are layered: generation_config.json, then the session's parameters, then the message's. `resolve` makes of them
what the engine gets, in which nothing is left to a default.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chatd.engine.messages import Ready
from chatd.engine.sampling import SamplingParams, check_sampling_params
from chatd.errors import ContextLengthExceeded, InvalidRequest, ModelError
from chatd.protocol import ModelInfo, Params
from chatd.protocol.ranges import RANGES, check_range, check_stop_strings

GENERATION_CONFIG_FILE = "generation_config.json"
SEED_BITS = 63
MAX_BYTES_PER_TOKEN = 8
"""Text with more bytes than this for each token of the context is not tokenized; prose and code have 3 to 5."""
NO_PARAMS = Params()
_SAMPLING = SamplingParams(max_tokens=1)
NEUTRAL = Params(
    temperature=_SAMPLING.temperature,
    top_p=_SAMPLING.top_p,
    top_k=_SAMPLING.top_k,
    min_p=_SAMPLING.min_p,
    min_tokens=_SAMPLING.min_tokens,
    repetition_penalty=_SAMPLING.repetition_penalty,
    presence_penalty=_SAMPLING.presence_penalty,
    frequency_penalty=_SAMPLING.frequency_penalty,
    ignore_eos=_SAMPLING.ignore_eos,
)
"""What holds where nobody says anything else."""
T = TypeVar("T")


def draw_seed() -> int:
    """Return a seed for an answer whose request names none."""
    return secrets.randbits(SEED_BITS)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Limits and defaults of the served model. Before the engine is ready the pool's numbers are 0.

    Attributes:
        id: The name that clients use.
        context: Tokens of a context, prompt and answer together.
        vocab_size: Ids are below this.
        stop_token_ids: Ids that end an answer.
        defaults: Sampling parameters of generation_config.json.
        max_tokens: Longest answer, or None for the rest of the context.
        block_size: Tokens of a block.
        blocks: Blocks of the pool.
        vocabulary: Digest of the tokenizer and the template, which decide what ids mean.
    """

    id: str
    context: int
    vocab_size: int
    stop_token_ids: frozenset[int] = frozenset()
    defaults: Params = NO_PARAMS
    max_tokens: int | None = None
    block_size: int = 0
    blocks: int = 0
    vocabulary: str = ""

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        model_id: str,
        context: int,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        max_tokens: int | None = None,
        vocabulary: str = "",
    ) -> ModelProfile:
        """Build from a checked model folder.

        Raises:
            ModelError: generation_config.json is not a JSON object.
        """
        path = folder / GENERATION_CONFIG_FILE
        config: Any = {}
        if path.is_file():
            try:
                config = json.loads(path.read_bytes())
            except ValueError as error:
                raise ModelError(f"{path} is not valid JSON: {error}", code="model_corrupt") from None
        if not isinstance(config, dict):
            raise ModelError(f"{path} does not hold an object", code="model_corrupt")
        return cls(
            id=model_id,
            context=context,
            vocab_size=vocab_size,
            stop_token_ids=frozenset(stop_token_ids),
            defaults=sampling_defaults(config),
            max_tokens=max_tokens,
            vocabulary=vocabulary,
        )

    def with_ready(self, ready: Ready) -> ModelProfile:
        """Return the profile with what the engine found to fit."""
        return replace(
            self,
            context=min(self.context, ready.max_model_len),
            vocab_size=ready.vocab_size,
            block_size=ready.block_size,
            blocks=ready.num_blocks,
        )

    def info(self) -> ModelInfo:
        """Return the model as a client sees it."""
        params = self.defaults.over(msgspec.structs.replace(NEUTRAL, max_tokens=self.max_tokens))
        return ModelInfo(
            id=self.id, context=self.context, block_size=self.block_size, blocks=self.blocks, params=params
        )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that leaves room for one token of an answer."""
        pool = self.blocks * self.block_size
        return min(self.context, pool if pool else self.context) - 1

    def check_text(self, contents: Sequence[str]) -> None:
        """Refuse text that cannot fit, before it is tokenized.

        Raises:
            ContextLengthExceeded: Names the numbers.
        """
        limit = MAX_BYTES_PER_TOKEN * self.context
        # A character has at least one byte, so what is long enough by characters is not copied to be measured.
        num_bytes = sum(map(len, contents))
        if num_bytes <= limit:
            num_bytes = sum(len(content.encode(errors="surrogatepass")) for content in contents)
        if num_bytes > limit:
            raise ContextLengthExceeded(
                f"prompt has at least {num_bytes} bytes of new text, the limit is {limit}"
                f" ({MAX_BYTES_PER_TOKEN} for each token of max_model_len {self.context})",
                param="content",
                hint="start a new session, or send less",
            )

    def check_prompt(self, num_tokens: int) -> None:
        """Refuse a prompt that can never fit.

        Raises:
            ContextLengthExceeded: Names the numbers.
        """
        if num_tokens > self.longest_prompt:
            raise ContextLengthExceeded(
                f"prompt has {num_tokens} tokens, the limit is {self.longest_prompt} (max_model_len {self.context})",
                param="content",
                hint="start a new session, or send less",
            )

    def resolve(self, params: Params, num_prompt_tokens: int, *, draw: Callable[[], int] = draw_seed) -> SamplingParams:
        """Return what the engine gets for a prompt of this length.

        Args:
            params: The message's over the session's; the model's defaults are put below them here.
            num_prompt_tokens: Must have passed `check_prompt`.
            draw: Makes the seed where none is named.

        Raises:
            InvalidRequest: Names the field that is out of range.
        """
        known = params.over(self.defaults)
        check_stop_strings(known.stop)
        room = self.context - num_prompt_tokens
        asked = known.max_tokens
        if asked is not None:
            check_range("max_tokens", asked, RANGES["max_tokens"])
        limits = [room, *(limit for limit in (asked, self.max_tokens) if limit is not None)]
        ignore_eos = bool(known.ignore_eos)
        stop_ids = set(known.stop_token_ids) if ignore_eos else self.stop_token_ids.union(known.stop_token_ids)
        resolved = SamplingParams(
            max_tokens=min(limits),
            min_tokens=_or(known.min_tokens, 0),
            temperature=_or(known.temperature, 0.0),
            top_k=_or(known.top_k, 0),
            top_p=_or(known.top_p, 1.0),
            min_p=_or(known.min_p, 0.0),
            seed=draw() if known.seed is None else known.seed,
            repetition_penalty=_or(known.repetition_penalty, 1.0),
            presence_penalty=_or(known.presence_penalty, 0.0),
            frequency_penalty=_or(known.frequency_penalty, 0.0),
            logit_bias=_logit_bias(known.logit_bias),
            stop_token_ids=tuple(sorted(stop_ids)),
            ignore_eos=ignore_eos,
            logprobs=known.logprobs,
        )
        if resolved.max_tokens < resolved.min_tokens <= _or(asked, 2**31):
            # Only the context or the configured limit is in the way: the answer gets there and ends.
            resolved = msgspec.structs.replace(resolved, min_tokens=resolved.max_tokens)
        check_sampling_params(resolved, self.vocab_size)
        return resolved

    def going_on(
        self, sampling: SamplingParams, params: Params, num_prompt_tokens: int, num_answered: int
    ) -> SamplingParams:
        """Return the parameters of an answer that goes on: as they were, with as many more tokens as `params` ask for.

        Args:
            sampling: Of the answer so far, whose seed and positions go on.
            params: Whose `max_tokens` is for what comes now; the model's defaults are put below it.
            num_prompt_tokens: Before the answer.
            num_answered: Tokens of the answer so far; with these the prompt must have passed `check_prompt`.
        """
        asked = params.over(self.defaults).max_tokens
        more = [limit for limit in (asked, self.max_tokens) if limit is not None]
        room = self.context - num_prompt_tokens
        return msgspec.structs.replace(sampling, max_tokens=min([room, *(num_answered + limit for limit in more)]))

    def ends_by_context(self, params: Params, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        """Return whether an answer that reached its limit reached that of the context, not one that was asked for."""
        asked = params.over(self.defaults).max_tokens
        limits = [limit for limit in (asked, self.max_tokens) if limit is not None]
        return num_output_tokens >= self.context - num_prompt_tokens and all(
            limit > num_output_tokens for limit in limits
        )


def sampling_defaults(config: Mapping[str, Any]) -> Params:
    """Return the sampling parameters of a generation_config.json; what it does not say stays open.

    `do_sample` decides as in transformers: without it, or a temperature of its own, answers are greedy.
    """
    do_sample = config.get("do_sample")
    temperature = _number(config, "temperature")
    if do_sample is True and temperature is None:
        temperature = 1.0
    if do_sample is False:
        temperature = 0.0
    top_k = _number(config, "top_k")
    return Params(
        temperature=temperature,
        top_k=None if top_k is None else int(top_k),
        top_p=_number(config, "top_p"),
        min_p=_number(config, "min_p"),
        repetition_penalty=_number(config, "repetition_penalty"),
    )


def _number(config: Mapping[str, Any], name: str) -> float | None:
    value, within = config.get(name), RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not within.low <= value <= within.high:
        return None
    return float(value)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(biases: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    pairs = []
    for name, bias in (biases or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 9):
            raise InvalidRequest(f"{name[:32]!r} is not a token id", param="logit_bias")
        pairs.append((int(name), float(bias)))
    return tuple(pairs)
