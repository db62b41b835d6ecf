"""From logits to tokens on a GPU: what is drawn stays there for the next step, and reaches the host when waited for.

The tokens are those that `engine.sampler` draws of the same logits, within the limits that `chatd_kernels.sampling`
states. Parameters, histories and the draws' numbers are on the device and go on there by themselves, so that a step
whose requests are those of the step before sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chatd.engine.plan import RequestId, SampleSpec, TokenLogprobs
from chatd.engine.sampler import Sampled
from chatd.engine.sampling_slots import SamplingSlots, SlotChanges
from chatd_kernels.sampling import sample_rows
from chatd_kernels.sampling.state import MAX_LIKELIEST, allocate_sampling_state
from chatd_kernels.stream import Stream

Specs = Sequence[tuple[RequestId, SampleSpec]]


class SampledInFlight:
    """The tokens of one step, which the device may still be drawing.

    The host has them once the work that drew them has ended.

    Attributes:
        tokens: `[len(specs)]` int64 on the device, in the order of `specs`: what a pending token of the next plan is.
            A row without a token (its logits were not finite, or it wanted candidates) has 0. Valid until the next
            call of `sample` runs on the device; what the stream runs before that call reads them safely.
    """

    def __init__(
        self, tokens: torch.Tensor, specs: Specs, vocab_size: int, host: _HostCopy | None, free: list[_HostCopy]
    ) -> None:
        self.tokens = tokens
        self._specs = specs
        self._vocab_size = vocab_size
        self._host = host
        self._free = free
        self._sampled: Sampled | None = None

    def result(self) -> Sampled:
        """Return them; the work that drew them must have ended."""
        if self._sampled is None:
            self._sampled = Sampled()
            if self._host is not None:
                host, self._host = self._host, None
                self._read(self._sampled, host)
                self._free.append(host)
        return self._sampled

    def _read(self, sampled: Sampled, host: _HostCopy) -> None:
        tokens, num_bad = host.drawn.tolist()
        for row, (request_id, spec) in enumerate(self._specs):
            if num_bad[row]:
                sampled.failed[request_id] = f"{num_bad[row]} of {self._vocab_size} logits are not finite"
            elif spec.num_candidates:
                sampled.candidates[request_id] = host.likeliest_of(row, min(spec.num_candidates, self._vocab_size))
            else:
                sampled.tokens[request_id] = tokens[row]
                if spec.params.logprobs is not None:
                    top = host.likeliest_of(row, min(spec.params.logprobs, self._vocab_size))
                    sampled.logprobs[request_id] = TokenLogprobs(float(host.logprobs[row, 0]), tuple(top))


class DeviceSampler:
    """Draws the tokens of steps that follow each other on one stream of a device.

    Args:
        vocab_size: Columns of the logits.
        max_num_rows: Requests that may draw in one step.
        stream: Of the device; `sample` is a part of work that is put into it.

    Raises:
        ValueError: The vocabulary is too large for the kernels.
    """

    def __init__(self, vocab_size: int, max_num_rows: int, stream: Stream) -> None:
        self._stream = stream
        self._state = allocate_sampling_state(vocab_size, max_num_rows, max_num_rows, stream.device)
        self._slots = SamplingSlots(max_num_rows, max_num_rows, vocab_size)
        self._free: list[_HostCopy] = []

    def sample(self, logits: torch.Tensor, specs: Specs) -> SampledInFlight:
        """Draw one token for each row, without waiting for the device.

        Args:
            logits: `[num_rows, vocab_size]`, contiguous, float32, float16 or bfloat16; not changed. Rows beyond those
                of `specs` pad a bucket, and are not looked at.
            specs: Whose each row is, and how it is drawn; at most `max_num_rows`, each request once. Their ids are
                read before this returns.
        """
        num_rows, state = len(specs), self._state
        tokens = state.drawn[0, :num_rows]
        if not specs:
            return SampledInFlight(tokens, specs, state.vocab_size, None, self._free)
        if all(spec.is_plain for _, spec in specs):
            sample_rows(logits, state, num_rows, is_plain=True)
            has_lists = False
        else:
            params = [spec.params for _, spec in specs]
            drawing = [p for p in params if not p.is_greedy]
            has_lists = any(
                spec.num_candidates or given.logprobs is not None
                for (_, spec), given in zip(specs, params, strict=True)
            )
            most = max(max(spec.num_candidates, spec.params.logprobs or 0) for _, spec in specs)
            try:
                self._send(self._slots.place(specs))
                sample_rows(
                    logits,
                    state,
                    num_rows,
                    has_draws=bool(drawing),
                    has_edges=any(p.top_k or p.top_p < 1.0 for p in drawing),
                    num_likeliest=max(1, min(most, state.vocab_size)) if has_lists else 0,
                )
            except Exception:
                # Some of it may have been done.
                self._slots.forget()
                raise
        host = self._free.pop() if self._free else _HostCopy(state.max_num_rows, self._stream)
        host.drawn.copy_(state.drawn, non_blocking=True)
        if has_lists:
            host.likeliest[:num_rows].copy_(state.likeliest[:num_rows], non_blocking=True)
            host.logprobs[:num_rows].copy_(state.logprobs[:num_rows], non_blocking=True)
        return SampledInFlight(tokens, specs, state.vocab_size, host, self._free)

    def forget(self) -> None:
        """Take nothing as known of what the device keeps, since a step of it may not have run."""
        self._slots.forget()

    def _send(self, changes: SlotChanges) -> None:
        state, upload = self._state, self._stream.upload
        if changes.row_slots is not None:
            state.row_slots.copy_(upload(changes.row_slots))
        if changes.slots:
            index = np.asarray(changes.slots, dtype=np.int64)
            state.table.index_copy_(0, upload(index), upload(np.stack(changes.fields)))
        for slot, words in changes.words:
            state.words[slot].copy_(upload(words))
        for slot, biases in changes.biases:
            state.biases[slot].copy_(upload(biases))


class _HostCopy:
    """What the host gets of a step; used again by a later one.

    Attributes:
        drawn: As `SamplingState.drawn`; so are the next two.
    """

    def __init__(self, max_num_rows: int, stream: Stream) -> None:
        self.drawn = stream.pinned((2, max_num_rows), torch.int64)
        self.likeliest = stream.pinned((max_num_rows, MAX_LIKELIEST), torch.int32)
        self.logprobs = stream.pinned((max_num_rows, 1 + MAX_LIKELIEST), torch.float32)

    def likeliest_of(self, row: int, count: int) -> list[tuple[int, float]]:
        """The first tokens of a row's list, with their log probabilities."""
        ids, logprobs = self.likeliest[row, :count].tolist(), self.logprobs[row, 1 : 1 + count].tolist()
        return list(zip(ids, logprobs, strict=True))
