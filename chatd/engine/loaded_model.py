"""What start-up makes of a model, on whatever device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from chatd.engine.cost_model import CostParameters
from chatd.engine.lower_tiers import LowerTiers
from chatd.engine.memory import PoolSize
from chatd.engine.plan import Runner
from chatd.models.decoder import Decoder

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run steps.

    Attributes:
        runner: Executes plans; on a GPU it launches them too.
        decoder: What it runs.
        pool: Size of the KV cache that is bound to the decoder.
        quantization: Weight format that runs.
        kv_format: Names what the bits of a block depend on beside weights and tokens: its number format, and how it
            was computed.
        notes: For the person at the terminal.
        tiers: What is below the pool.
        cost: What steps are assumed to take until they were measured.
        target_step_s: A step with prefill may always take so long.
        steps_in_flight: Plans that the runner works on at a time.
    """

    runner: Runner
    decoder: Decoder
    pool: PoolSize
    quantization: str
    kv_format: str
    notes: list[str]
    tiers: LowerTiers
    cost: CostParameters = field(default_factory=CostParameters)
    target_step_s: float = 0.05
    steps_in_flight: Literal[1, 2] = 1
