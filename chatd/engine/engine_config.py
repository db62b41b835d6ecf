"""What the engine core is built with. Numbers in; where they come from is the process's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from chatd.engine.cost_model import CostParameters
from chatd.engine.transfer_costs import TransferCosts
from chatd.errors import ConfigError
from chatd.kvcache.prefix_index import Namespace


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's part of the engine.

    Attributes:
        weight: Of service tokens, slots and blocks, relative to the other tenants.
        floor_blocks: Resident blocks that no other tenant can take.
    """

    weight: float = 1.0
    floor_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine core's configuration.

    Attributes:
        num_blocks: Of the pool.
        namespace: Identity of the KV that this engine computes; its `tenant` is not used.
        max_model_len: Tokens of a context; lowered to what the pool holds beside all floors.
        block_size: Tokens of a block.
        max_num_seqs: Requests that run at a time.
        max_num_batched_tokens: Rows of one step.
        max_waiting: Requests that wait at a time; more are refused.
        itl_ratio: A step with prefill takes at most this many times what its decodes alone would take.
        target_step_s: But a step may always take this long: a pause that no reader sees. 0 where decodes take
            milliseconds (GPUs).
        cost: What steps are assumed to take until they were measured.
        transfer_costs: What it costs to move blocks to lower tiers and back.
        tenants: Limits of the tenants that have their own; others have weight 1 and no floor.
        eos_token_ids: The model's stop ids, which do not end an answer with `ignore_eos`; where empty, no id does.
        vocab_size: Ids are below this; 0 does not check.
        max_leases: Sessions whose ids the engine keeps; beyond, the longest idle is forgotten.
        max_lease_tokens: Likewise for the sum of their ids (4 bytes each).
        waiting_interval_s: A request's place in its queue is told no more often than this.
        host_slots: Blocks that the host's buffer holds; 0 keeps nothing below the pool.
        digest_key: Secret of the names that blocks have below the pool.
        preemption: Whether a preempted request's blocks are saved below the pool and loaded again, or computed
            again; "auto" takes what costs less.
        steps_in_flight: Plans that a runner works on at a time: 2 is one step ahead, and needs a `PipelinedRunner`.
    """

    num_blocks: int
    namespace: Namespace
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 4096
    itl_ratio: float = 2.0
    target_step_s: float = 0.05
    cost: CostParameters = field(default_factory=CostParameters)
    transfer_costs: TransferCosts = field(default_factory=TransferCosts)
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    max_leases: int = 16384
    max_lease_tokens: int = 64 * 2**20
    waiting_interval_s: float = 0.25
    host_slots: int = 0
    digest_key: bytes = b""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    steps_in_flight: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: Names the field, its value and its range.
        """
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_leases", "max_lease_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, the least is 1", param=name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, the least is {self.max_num_seqs}"
                " (max_num_seqs): each running request computes a row in a step",
                param="max_num_batched_tokens",
            )
        if self.steps_in_flight not in (1, 2):
            raise ConfigError(f"steps_in_flight is {self.steps_in_flight}, it is 1 or 2", param="steps_in_flight")
        floors = sum(limits.floor_blocks for limits in self.tenants.values())
        if floors * 2 > self.num_blocks:
            raise ConfigError(
                f"tenants' floors are {floors} blocks, the most is half of the pool's {self.num_blocks}",
                param="tenants",
            )
        room = (self.num_blocks - floors) * self.block_size
        if room < self.max_model_len:
            object.__setattr__(self, "max_model_len", room)
