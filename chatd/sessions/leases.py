"""What the front believes of a session's KV: what the engine holds of it, and what was last heard. No decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from chatd.engine.messages import LeaseId, Tier
from chatd.engine.plan import RequestId
from chatd.sessions.logs import Node


@dataclass(slots=True)
class Lease:
    """What the front believes the engine to hold for a session.

    Attributes:
        id: Never reused.
        epoch: Of the engine process that was told; another one knows nothing of it.
        node: The message to whose end, or into which, the ids go.
        num_tokens: Ids of the log that the engine has.
        fork_of: Set until the first submission: the lease to share with, and up to which token.
        ahead: The request that computes on it while no turn does.
        draft_ids: Of what is being typed: ids that the engine has beyond the end of `node`; in no log.
    """

    id: LeaseId
    epoch: int = 0
    node: Node | None = None
    num_tokens: int = 0
    fork_of: tuple[LeaseId, int] | None = None
    ahead: RequestId | None = None
    draft_ids: list[int] = field(default_factory=list)

    def renew(self, epoch: int) -> None:
        """Note that an engine has nothing of it."""
        self.epoch, self.node, self.num_tokens, self.fork_of, self.ahead = epoch, None, 0, None, None
        self.draft_ids = []


@dataclass(slots=True)
class Latest:
    """The last values of what has no `seq`."""

    queued: dict[str, object] | None = None
    prefill: dict[str, int] | None = None
    tier: Tier = Tier.TOKENS
    blocks_held: int = 0
    blocks_shared: int = 0
