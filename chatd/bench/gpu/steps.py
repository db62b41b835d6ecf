"""Decode steps of a whole model: one kernel after another, from graphs, and one step ahead, beside their roofline."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chatd.bench.gpu.models import QWEN3_8B, RandomModel, RawConfig, roofline_s
from chatd.bench.gpu.parts import Bench, Rows
from chatd.bench.gpu.rates import measured_rates
from chatd.engine.plan import PENDING_TOKEN, BlockId, Chunk, Plan, RequestId, SampleSpec
from chatd.engine.sampling import SamplingParams

BATCHES = (1, 8, 32, 128, 256)
CONTEXT = 1024
NUM_STEPS = 20
MAX_MODEL_LEN = 8192
"""Of contexts, as a server has it: graphs split attention for the longest one."""
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Steps:
    """What steps take: medians of seconds from the end of one to the end of the next, and on the device."""

    wall_s: float
    device_s: float


class Decodes:
    """Requests of equal length that decode side by side, a token further with each plan.

    Args:
        model: Whose cache they lie in.
        batch: Requests.
        context: Tokens of each that are taken as computed.
        num_steps: Most plans.
    """

    def __init__(self, model: RandomModel, batch: int, context: int, num_steps: int) -> None:
        self._runner = model.runner
        self._block_size = model.layout.block_size
        self._position = context
        self._end = context + num_steps
        count = blocks_of(context + num_steps, self._block_size)
        free = random.Random(0).sample(range(model.num_blocks), batch * count)
        self._blocks = [[BlockId(block) for block in free[i * count : (i + 1) * count]] for i in range(batch)]
        first = blocks_of(context, self._block_size)
        self._tables = [blocks[:first] for blocks in self._blocks]
        self._params = SamplingParams(max_tokens=num_steps)

    def plan(self, token: int) -> Plan:
        """Return the next step, in which each request computes this token."""
        position = self._position
        assert position < self._end, f"position {position} of {self._end}"
        self._position += 1
        if position % self._block_size == 0:
            for table, blocks in zip(self._tables, self._blocks, strict=True):
                table.append(blocks[len(table)])
        sample = SampleSpec(self._params, position)
        chunks = [Chunk(RequestId(i), position, (token,), table, sample) for i, table in enumerate(self._tables)]
        return Plan(position, chunks, (), self._block_size)

    def one_at_a_time(self, num_steps: int) -> Steps:
        """Run steps, each made when the one before has ended."""
        walls, devices = [], []
        for number in range(_WARM_UP_STEPS + num_steps):
            start = time.perf_counter()
            output = self._runner.execute(self.plan(1))
            if number >= _WARM_UP_STEPS:
                walls.append(time.perf_counter() - start)
                devices.append(output.model_s)
        return Steps(statistics.median(walls), statistics.median(devices))

    def one_ahead(self, num_steps: int) -> Steps:
        """Run steps, each made and launched while the one before runs."""
        walls, devices = [], []
        running = self._runner.launch(self.plan(1))
        ended = time.perf_counter()
        for number in range(_WARM_UP_STEPS + num_steps):
            behind = self._runner.launch(self.plan(PENDING_TOKEN))
            output = running.result()
            now = time.perf_counter()
            if number >= _WARM_UP_STEPS:
                walls.append(now - ended)
                devices.append(output.model_s)
            ended, running = now, behind
        running.result()
        return Steps(statistics.median(walls), statistics.median(devices))


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def step_rows(
    bench: Bench,
    name: str = "Qwen3-8B",
    raw: RawConfig = QWEN3_8B,
    *,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
    num_steps: int = NUM_STEPS,
    max_model_len: int = MAX_MODEL_LEN,
    kv_dtype: torch.dtype | None = None,
    is_deterministic: bool = False,
) -> Rows:
    """Yield what a decode step takes by batch; batches that do not fit the card's memory are left out."""
    rates = measured_rates(bench)
    length = context + num_steps + _WARM_UP_STEPS + 1
    blocks_each = blocks_of(length, 16)
    model = RandomModel(
        bench.stream,
        raw,
        max_num_seqs=max(batches),
        max_model_len=max_model_len,
        num_blocks=lambda most: max((b for b in batches if b * blocks_each <= most), default=0) * blocks_each,
        max_num_batched_tokens=max(batches),
        kv_dtype=kv_dtype,
        is_deterministic=is_deterministic,
    )
    fitting = [batch for batch in batches if batch * blocks_each <= model.num_blocks]

    def decodes(batch: int) -> Decodes:
        return Decodes(model, batch, context, length - context)

    # Before there are graphs.
    eager = {batch: decodes(batch).one_at_a_time(num_steps) for batch in fitting}
    model.capture(fitting)
    for batch in fitting:
        graphs, ahead = decodes(batch).one_at_a_time(num_steps), decodes(batch).one_ahead(num_steps)
        least = roofline_s(model.config, model.layout, batch, context + num_steps // 2, rates)
        if kv_dtype is None and not is_deterministic:
            bench.step_s[name, batch] = ahead.wall_s
        plain = bench.step_s.get((name, batch))
        yield {
            "model": name,
            "KV": str(model.layout.dtype).removeprefix("torch."),
            "deterministic": is_deterministic,
            "batch": batch,
            "context": context,
            "roofline ms": least * 1e3,
            "device ms": graphs.device_s * 1e3,
            "kernel by kernel ms": eager[batch].wall_s * 1e3,
            "graphs ms": graphs.wall_s * 1e3,
            "one ahead ms": ahead.wall_s * 1e3,
            "one ahead / roofline": ahead.wall_s / least,
            "against plain": ahead.wall_s / plain if plain else None,
            "tok/s": batch / ahead.wall_s,
        }
