"""How much memory sharing saves: blocks counted once for each table that has them, and once for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from chatd.kvcache.block import BlockId
from chatd.kvcache.block_table import BlockTable


class Sharing(NamedTuple):
    """Blocks of some tables.

    Attributes:
        num_held: Places in the tables: what they would hold if nothing were shared.
        num_distinct: Blocks that they hold.
    """

    num_held: int
    num_distinct: int


def sharing_of(tables: Iterable[BlockTable]) -> Sharing:
    """Return how much some tables share with one another."""
    num_held = 0
    distinct: set[BlockId] = set()
    for table in tables:
        num_held += len(table.block_ids)
        distinct.update(table.block_ids)
    return Sharing(num_held, len(distinct))
