"""Numbers in place of token ids, so that a decision log holds no text.

Ids are numbered in the order of their first appearance. Equal ids stay equal and different ones different, and nothing
in the engine core decides by more than that: so a masked log replays to the same decisions. It is no encryption: how
long messages are and how often a token is repeated can still be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from chatd.engine.engine_config import EngineConfig
from chatd.engine.messages import (
    Beams,
    EngineMessage,
    Erase,
    EraseTenant,
    FrontMessage,
    Submit,
    TokenDelta,
    Tokens,
)
from chatd.engine.plan import StepOutput, TokenLogprobs
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.block_file import DIGEST_BYTES


class _Numbers(dict[int, int]):
    def __missing__(self, token_id: int) -> int:
        number = self[token_id] = len(self)
        return number


class TokenMask:
    """The numbers of one log.

    Args:
        vocab_size: Ids are below this; 0 where it is not known. An id out of range is refused by the core, which
            names it, so it stays.
    """

    def __init__(self, vocab_size: int) -> None:
        self._limit = vocab_size or 2**31
        self._number = _Numbers().__getitem__

    def ids(self, token_ids: Iterable[int]) -> list[int]:
        """Return the numbers of ids that are in range."""
        return list(map(self._number, token_ids))

    def config(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration with its stop ids masked, and with no key to the names of blocks below the pool."""
        return replace(
            config,
            eos_token_ids=frozenset(self.ids(sorted(config.eos_token_ids))),
            digest_key=bytes(len(config.digest_key)),
        )

    def front(self, message: FrontMessage) -> FrontMessage:
        """Return what the front said."""
        if isinstance(message, Erase):
            return msgspec.structs.replace(message, token_ids=self._all_in_range(message.token_ids))
        if isinstance(message, EraseTenant):
            names = [number.to_bytes(DIGEST_BYTES, "big") for number in range(len(message.digests))]
            return msgspec.structs.replace(message, digests=names)
        if not isinstance(message, Submit):
            return message
        ids = message.new_ids
        # Ids out of range are refused, with the least and the greatest of them.
        is_refused = ids and not 0 <= min(ids) <= max(ids) < self._limit
        masked = [min(ids), max(ids)] if is_refused else self.ids(ids)
        return msgspec.structs.replace(message, new_ids=masked, params=self._params(message.params))

    def output(self, output: StepOutput) -> StepOutput:
        """Return what the runner said."""
        number = self._number
        sampled = {request: number(token_id) for request, token_id in output.sampled.items()}
        if not output.logprobs and not output.candidates:
            return replace(output, sampled=sampled)
        logprobs = {request: self._logprobs(told) for request, told in output.logprobs.items()}
        candidates = {
            request: [(number(token_id), value) for token_id, value in told]
            for request, told in output.candidates.items()
        }
        return replace(output, sampled=sampled, logprobs=logprobs, candidates=candidates)

    def engine(self, message: EngineMessage) -> EngineMessage:
        """Return what the engine says."""
        if isinstance(message, Tokens):
            changed = []
            for delta in message.deltas:
                logprobs = delta.logprobs and [
                    (own, [(self._number(token_id), value) for token_id, value in top]) for own, top in delta.logprobs
                ]
                changed.append(TokenDelta(delta.request, self.ids(delta.ids), logprobs))
            return Tokens(message.step, changed)
        if isinstance(message, Beams):
            sequences = [msgspec.structs.replace(each, ids=self.ids(each.ids)) for each in message.sequences]
            return Beams(message.request, sequences)
        return message

    def _params(self, params: SamplingParams) -> SamplingParams:
        if not params.stop_token_ids and not params.logit_bias:
            return params
        return msgspec.structs.replace(
            params,
            stop_token_ids=tuple(map(self._in_range, params.stop_token_ids)),
            logit_bias=tuple((self._in_range(token_id), bias) for token_id, bias in params.logit_bias),
        )

    def _all_in_range(self, token_ids: list[int]) -> list[int]:
        """Return the numbers of ids; those that are out of range stay."""
        return list(map(self._in_range, token_ids))

    def _in_range(self, token_id: int) -> int:
        return self._number(token_id) if 0 <= token_id < self._limit else token_id

    def _logprobs(self, told: TokenLogprobs) -> TokenLogprobs:
        return replace(told, top=tuple((self._number(token_id), value) for token_id, value in told.top))
