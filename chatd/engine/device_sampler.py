"""From logits to tokens on a GPU: what is drawn stays there for the next step, and reaches the host when waited for.

The tokens are those that `engine.sampler` draws of the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from chatd.engine.plan import RequestId, SampleSpec
from chatd.engine.sampler import Sampled, Sampler


class SampledInFlight:
    """The tokens of one step, which the device may still be drawing.

    Attributes:
        tokens: `[len(specs)]` int64 on the device, in the order of `specs`: what a pending token of the next plan is.
            A row without a token (its logits were not finite, or it wanted candidates) has 0. Valid until the next
            call of `sample` runs on the device; work queued on the same stream before that call reads them safely.
        rows: The place in `tokens` of each request.
    """

    def __init__(self, tokens: torch.Tensor, rows: dict[RequestId, int], sampled: Sampled) -> None:
        self.tokens = tokens
        self.rows = rows
        self._sampled = sampled

    def result(self) -> Sampled:
        """Wait until they are on the host, and return them."""
        return self._sampled


class DeviceSampler:
    """Draws the tokens of steps that follow each other on one stream of a device.

    Args:
        vocab_size: Columns of the logits.
        max_num_rows: Requests that may draw in one step.
        device: Of the logits.
    """

    def __init__(self, vocab_size: int, max_num_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_num_rows = max_num_rows
        self._sampler = Sampler()
        self._last: dict[RequestId, int] = {}
        self._tokens = torch.zeros(max_num_rows, dtype=torch.int64, device=device)

    def sample(self, logits: torch.Tensor, specs: Sequence[tuple[RequestId, SampleSpec]]) -> SampledInFlight:
        """Draw one token for each row, without waiting for the device.

        Args:
            logits: `[num_rows, vocab_size]`, contiguous, float32, float16 or bfloat16; not changed. Rows beyond those
                of `specs` pad a bucket, and are not looked at.
            specs: Whose each row is, and how it is drawn; at most `max_num_rows`, each request once.
        """
        whole = [(request_id, self._with_pending(request_id, spec)) for request_id, spec in specs]
        sampled = self._sampler.sample(logits[: len(specs)].float().cpu(), whole)
        self._last = dict(sampled.tokens)
        drawn = [sampled.tokens.get(request_id, 0) for request_id, _ in specs]
        self._tokens[: len(specs)] = torch.tensor(drawn, dtype=torch.int64)
        rows = {request_id: row for row, (request_id, _) in enumerate(specs)}
        return SampledInFlight(self._tokens[: len(specs)], rows, sampled)

    def _with_pending(self, request_id: RequestId, spec: SampleSpec) -> SampleSpec:
        if not spec.params.needs_history or len(spec.output_ids) == spec.output_position:
            return spec
        return msgspec.structs.replace(spec, output_ids=[*spec.output_ids, self._last[request_id]])
