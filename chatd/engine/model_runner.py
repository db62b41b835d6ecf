"""Runs one step of the real model: block copies, one forward over all rows, sampling."""

from __future__ import annotations

from time import perf_counter

from chatd.engine.input_batch import InputBatch
from chatd.engine.plan import Plan, StepOutput
from chatd.engine.sampler import Sampled, Sampler
from chatd.models.decoder import Decoder
from chatd_kernels.copy_blocks import copy_blocks


class ModelRunner:
    """Executes plans on a decoder whose KV cache is bound. Reads nothing but the plan."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._batch = InputBatch(decoder.kv_cache.layout, decoder.config.num_heads, decoder.device)
        self._sampler = Sampler()

    def execute(self, plan: Plan) -> StepOutput:
        """Run one step.

        Raises:
            Exception: Whatever went wrong; nothing of the plan may become visible then. Logits that are not finite are
                no such thing: they fail their own request only.
        """
        start = perf_counter()
        if plan.copies:
            copy_blocks(self._decoder.kv_cache, [(copy.source, copy.target) for copy in plan.copies])
        sampled = self._compute(plan) if plan.chunks else Sampled()
        return StepOutput(sampled.tokens, sampled.logprobs, sampled.failed, perf_counter() - start)

    def _compute(self, plan: Plan) -> Sampled:
        logits = self._decoder.forward(self._batch.build(plan))
        return self._sampler.sample(
            logits, [(chunk.request_id, chunk.sample) for chunk in plan.chunks if chunk.sample is not None]
        )
