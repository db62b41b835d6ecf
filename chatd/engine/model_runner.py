"""Runs one step of the real model on the CPU: block moves and copies, one forward over all rows, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from chatd.engine.host_buffer import HostBuffer
from chatd.engine.input_batch import InputBatch
from chatd.engine.plan import BlockMove, Plan, StepOutput
from chatd.engine.sampler import Sampled, Sampler
from chatd.models.decoder import Decoder
from chatd_kernels.copy_blocks import copy_blocks
from chatd_kernels.swap_blocks import load_blocks, store_blocks


class ModelRunner:
    """Executes plans on a decoder whose KV cache is bound. Reads nothing but the plan.

    Args:
        decoder: The model.
        host: Where stores go and loads come from; None for plans without either.
    """

    def __init__(self, decoder: Decoder, host: HostBuffer | None = None) -> None:
        self._decoder = decoder
        self._host = host
        self._batch = InputBatch(decoder.kv_cache.layout, decoder.config.num_heads)
        self._sampler = Sampler()

    def execute(self, plan: Plan) -> StepOutput:
        """Run one step.

        Raises:
            Exception: Whatever went wrong; nothing of the plan may become visible then. Logits that are not finite are
                no such thing: they fail their own request only.
        """
        cache = self._decoder.kv_cache
        start = perf_counter()
        if plan.stores:
            store_blocks(cache, self._slots, _pairs(plan.stores))
        stored = perf_counter()
        if plan.copies:
            copy_blocks(cache, [(copy.source, copy.target) for copy in plan.copies])
        copied = perf_counter()
        if plan.loads:
            load_blocks(cache, self._slots, _pairs(plan.loads))
        loaded = perf_counter()
        sampled = self._compute(plan) if plan.chunks else Sampled()
        move_s = stored - start + loaded - copied
        model_s = perf_counter() - start - move_s
        return StepOutput(sampled.tokens, sampled.logprobs, sampled.failed, model_s, move_s, sampled.candidates)

    @property
    def _slots(self) -> torch.Tensor:
        assert self._host is not None, "a plan moves blocks, and there is no buffer on the host"
        return self._host.slots

    def _compute(self, plan: Plan) -> Sampled:
        logits = self._decoder.forward(self._batch.build(plan))
        return self._sampler.sample(
            logits, [(chunk.request_id, chunk.sample) for chunk in plan.chunks if chunk.sample is not None]
        )


def _pairs(moves: Sequence[BlockMove]) -> list[tuple[int, int]]:
    return [(move.block_id, move.slot) for move in moves]
