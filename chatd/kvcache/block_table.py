"""The blocks that one sequence of tokens holds, in order of position."""

from __future__ import annotations

from chatd.kvcache.block import BlockId
from chatd.kvcache.block_pool import Account
from chatd.kvcache.prefix_index import NamespaceId


class BlockTable:
    """What a lease, and with it the request that runs on it, holds.

    ```
    block_ids      [ 7 ][ 2 ][ 9 ][ 4 ]
    tokens         |----|----|----|--
                   registered^       ^ num_computed_tokens
    ```
    Always `len(block_ids) == ceil(num_planned_tokens / block_size)`: no block is held ahead of need.

    Attributes:
        namespace: Under which its blocks are registered.
        account: Who is charged for the blocks that it allocates.
        block_ids: Handed to the runner as it is, which reads it before the next plan is made.
        num_computed_tokens: Leading tokens whose KV is committed.
        num_planned_tokens: Leading tokens whose KV is committed, or will be by the plans in flight.
        last_plan: The last plan that reads or writes its blocks, where another one may be made before that is
            committed; what it gives back meanwhile stays held until then.
        copying: Source and target of a copy-on-write that is not committed; the target is a block of this table.
        num_registered_blocks: Leading blocks that commit has seen to: registered, found, or to be adopted.
        adoptions: (place in the table, block) pairs: the same content was registered by somebody else first; the
            table already holds that block and gives its own back at its next plan.
    """

    __slots__ = (
        "account",
        "adoptions",
        "block_ids",
        "copying",
        "last_plan",
        "namespace",
        "num_computed_tokens",
        "num_planned_tokens",
        "num_registered_blocks",
    )

    def __init__(self, namespace: NamespaceId, account: Account) -> None:
        self.namespace = namespace
        self.account = account
        self.block_ids: list[BlockId] = []
        self.num_computed_tokens = 0
        self.num_planned_tokens = 0
        self.last_plan = 0
        self.copying: tuple[BlockId, BlockId] | None = None
        self.num_registered_blocks = 0
        self.adoptions: list[tuple[int, BlockId]] = []
