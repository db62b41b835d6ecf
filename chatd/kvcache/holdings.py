"""What a block table holds of the pool, and what it has to answer for. Reads, and changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from chatd.kvcache.block_pool import NOBODY, SHARED, BlockPool
from chatd.kvcache.block_table import BlockTable


class Holdings(NamedTuple):
    """What one table holds.

    Attributes:
        num_blocks: In the table.
        num_shared: Of those, the ones that somebody else holds too, or that are public.
        bill: In blocks: each that is shared is split among those who hold it, a public one is nobody's.
    """

    num_blocks: int
    num_shared: int
    bill: float


def holdings_of(table: BlockTable, pool: BlockPool) -> Holdings:
    """Return what a table holds.

    All bills, the public blocks with a holder, and what plans in flight alone hold are together the active blocks.
    What one table says depends on its own namespace only: a public block counts as shared, whoever else holds it.
    """
    states, owners, blocks = pool.states, pool.owners, pool.blocks
    parts = 0.0
    num_shared = 0
    for block_id in table.block_ids:
        if owners[block_id] == NOBODY:
            num_shared += 1
        elif states[block_id] == SHARED:
            num_shared += 1
            parts += 1.0 / blocks[block_id].ref_count
    num_blocks = len(table.block_ids)
    return Holdings(num_blocks, num_shared, num_blocks - num_shared + parts)
