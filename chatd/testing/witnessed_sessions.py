"""What the front of a witnessed engine knows: its sessions, its requests, and how large everything is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from chatd.engine.messages import (
    LeaseId,
    Submit,
)
from chatd.engine.plan import RequestId
from chatd.testing.engine import (
    EMPTY_PREFIX,
    extend_chain,
)

VOCAB_SIZE = 11
STOP_ID = 0


@dataclass(slots=True, eq=False)
class Session:
    """A conversation as the front knows it."""

    lease: LeaseId
    tenant: str
    token_ids: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    job: Job | None = None

    def extend(self, token_ids: list[int]) -> None:
        """Append ids."""
        chain = self.chains[-1] if self.chains else EMPTY_PREFIX
        for token_id in token_ids:
            chain = extend_chain(chain, token_id)
            self.chains.append(chain)
        self.token_ids += token_ids

    def cut(self, length: int) -> None:
        """Forget ids beyond a length."""
        del self.token_ids[length:]
        del self.chains[length:]


@dataclass(slots=True, eq=False)
class Job:
    """A request as the front knows it."""

    request: RequestId
    session: Session
    submit: Submit
    num_prompt: int
    num_answered: int = 0
    may_fail: bool = False
    is_started: bool = False
    trim_to: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How large everything is in one run, and how full.

    Attributes:
        public: The part of sessions that are public.
        backlog: Requests that the first two tenants keep waiting, the one with long answers, the other long prompts;
            then nothing is done that leaves either without, or changes their weights.
        steps_in_flight: 2 plans one step ahead.
        is_eager: Then steps run when they are launched, and not when their result is asked for.
    """

    num_blocks: int = 40
    block_size: int = 4
    max_model_len: int = 72
    max_num_seqs: int = 5
    max_num_batched_tokens: int = 24
    max_leases: int = 14
    max_sessions: int = 10
    tenants: tuple[str, ...] = ("acme", "blue", "crow")
    floors: tuple[int, ...] = (6, 0, 0)
    weights: tuple[float, ...] = (1.0, 2.0, 1.0)
    target_step_s: float = 0.0
    public: float = 0.07
    backlog: int = 0
    host_slots: int = 0
    disk_blocks: int = 0
    disk_queue: int = 256
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    steps_in_flight: Literal[1, 2] = 1
    is_eager: bool = False
