"""A runner that fills every slot nobody owns, before each step, with what would spoil any result that reads it.

It stands between an engine core and the real model's runner. What it may fill is decided from the core's own tables:
blocks that are empty, slots of a held block beyond what its holders have computed (those that the step is to write
included), and slots of the host's buffer that keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chatd.engine.core import EngineCore
from chatd.engine.plan import Plan, Runner, StepOutput


class PoisoningRunner:
    """Poisons, then runs a step. Its steps take no time, so that two runs are planned alike.

    Args:
        runner: Executes the plans.
        cache: The KV cache that it writes to (`chatd_kernels.kv_cache.KVCache`).
        value: What slots are filled with; None fills none.
        host: The host's buffer, where there is one.

    Attributes:
        core: Whose slots these are; to be set before the first step.
        num_poisoned: Slots of the pool that were filled.
        num_poisoned_host: Slots of the host's buffer that were filled.
    """

    core: EngineCore

    def __init__(self, runner: Runner, cache: Any, value: float | None, host: Any = None) -> None:
        self._runner = runner
        self._cache = cache
        self._value = value
        self._host = host
        self.num_poisoned = self.num_poisoned_host = 0

    def execute(self, plan: Plan) -> StepOutput:
        """Fill what nobody owns, and run the step."""
        if self._value is not None:
            self.poison(plan)
        return replace(self._runner.execute(plan), model_s=0.0, move_s=0.0)

    def poison(self, plan: Plan | None = None) -> None:
        """Fill what nobody owns, but for what a plan reads that is in no table."""
        size = self._cache.layout.block_size
        for block_id, start in self._unowned(plan):
            block = self._cache.data[block_id]
            if start == 0:
                block.fill_(self._value)
            else:
                layout = self._cache.layout
                tiles = block.view(layout.num_layers, 2, layout.num_kv_heads, -1)
                keys = tiles[:, 0].reshape(layout.num_layers, layout.num_kv_heads, size // 16, layout.head_dim, 16)
                values = tiles[:, 1].view(layout.num_layers, layout.num_kv_heads, size, layout.head_dim)
                assert keys.data_ptr() == tiles[:, 0].data_ptr(), "the keys are a copy"
                values[:, :, start:] = self._value
                keys[:, :, start // 16, :, start % 16 :] = self._value
                keys[:, :, start // 16 + 1 :] = self._value
            self.num_poisoned += size - start
        if self._host is not None:
            for slot in self.core.tiers.free_slots:
                self._host.slots[slot].fill_(self._value)
                self.num_poisoned_host += 1

    def _unowned(self, plan: Plan | None) -> Iterator[tuple[int, int]]:
        """Yield each block that has slots without an owner, with the first of them."""
        size = self._cache.layout.block_size
        ends: dict[int, int] = {}
        holders: dict[int, int] = {}
        for lease in self.core.leases:
            computed = lease.table.num_computed_tokens
            for place, block_id in enumerate(lease.table.block_ids):
                end = min(size, max(0, computed - place * size))
                ends[block_id] = max(end, ends.get(block_id, 0))
                holders[block_id] = holders.get(block_id, 0) + 1
        read = set()
        if plan is not None:
            read = {copy.source for copy in plan.copies} | {move.block_id for move in plan.stores}
        for block in self.core.pool.blocks:
            # Registered blocks are whole, and whatever holds a block beside the tables knows what is in it.
            if block.entry is not None or block.block_id in read or block.ref_count != holders.get(block.block_id, 0):
                continue
            end = ends.get(block.block_id, 0)
            if end < size:
                yield block.block_id, end
