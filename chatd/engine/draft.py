"""The plan in the making: what each request was given in it, and the lines of the decision log."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chatd.engine.plan import PENDING_TOKEN, BlockCopy, BlockMove, Chunk, Plan
from chatd.engine.request import Request
from chatd.kvcache.host_block import HostBlock
from chatd.kvcache.manager import Allocation


class Decision(NamedTuple):
    """A line of the decision log: the same inputs give the same lines."""

    step: int
    verb: str
    request_id: int
    detail: tuple[float, ...]


class TenantCounts:
    """What a tenant has been served since start, in tokens."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0


@dataclass(slots=True)
class Draft:
    """One request's part of the plan that is being made, or in flight.

    Attributes:
        request: Whose.
        allocation: The slots that were taken for it.
        start: Its first row's position.
        num_tokens: Its rows; none where it only loads, or all that it wants is found.
        is_decode: Whether it draws the next token of an answer with one row.
        loads: Blocks that are loaded from the host, and end where the first row is; pinned until commit.
        is_void: Its request has ended since it was planned: its allocation is undone, and nothing of it is committed.
    """

    request: Request
    allocation: Allocation
    start: int
    num_tokens: int
    is_decode: bool
    loads: Sequence[HostBlock] = ()
    is_void: bool = False


_PENDING = (PENDING_TOKEN,)


def build_plan(step: int, drafts: Collection[Draft], block_size: int, stores: Sequence[BlockMove] = ()) -> Plan:
    """Return the plan that the runner gets; it reads tokens and block tables of the leases, and copies no history."""
    chunks: list[Chunk] = []
    copies: list[BlockCopy] = []
    loads: list[BlockMove] = []
    for draft in drafts:
        request, allocation = draft.request, draft.allocation
        ids, block_ids = request.lease.token_ids, request.lease.table.block_ids
        end = draft.start + draft.num_tokens
        if draft.loads:
            place = draft.start // block_size
            loaded = block_ids[place - len(draft.loads) : place]
            loads += [BlockMove(i, block.slot) for i, block in zip(loaded, draft.loads, strict=True)]
        if not draft.num_tokens:
            continue
        if draft.start == len(ids):  # One step ahead: the step in flight draws the token of this row.
            chunks.append(Chunk(request.request_id, draft.start, _PENDING, block_ids, request.sample_spec(1)))
        else:
            sample = request.sample_spec() if end == len(ids) and not request.compute_only else None
            chunks.append(Chunk(request.request_id, draft.start, ids[draft.start : end], block_ids, sample))
        if allocation.copy_source is not None and allocation.copy_target is not None:
            copies.append(BlockCopy(allocation.copy_source, allocation.copy_target))
    return Plan(step, chunks, copies, block_size, stores, loads)
