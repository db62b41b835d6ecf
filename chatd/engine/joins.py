"""In-flight join: requests that need the same uncomputed prefix compute it once.

```
leader     [ 7 ][ 2 ][ 9 ][ .  ][    ][    ]     runs; the next block is the one that somebody else needs as well
joiner     [ 7 ][ 2 ][ 9 ][ .  ][    ]  x x      set aside until the leader has computed what both have in common
joiner     [ 7 ][ 2 ][ 9 ][ .  ]  y y y
```
Whoever is about to be admitted and needs the very block that a running request computes next joins it: it takes no
blocks and no slot, and goes on by what the cache has once its leader is past the last block that they share. The key of
that next block names a namespace, so nobody joins across tenants. A joiner is looked at when it joins and when it goes
on, never in between. Where its leader ends, loses its blocks or stands still, the first joiner leads the others.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from chatd.engine.fairness import WaitingRequests, highest_class
from chatd.engine.messages import RequestClass, WaitReason
from chatd.engine.plan import RequestId
from chatd.engine.request import Request, RequestStatus
from chatd.kvcache.block import BlockId
from chatd.kvcache.manager import BlockKey, KVCacheManager
from chatd.kvcache.prefix_index import NamespaceId

MAX_JOINS_PER_STEP = 64
"""Requests that a full step looks at for a leader, so that a burst of them does not hold up its decodes."""

MAX_MISSED_STEPS = 2
"""A leader without rows in so many consecutive steps is followed no longer."""


@dataclass(slots=True)
class Group:
    """A leader and those who wait for it.

    Attributes:
        leader: Runs, or waits as the first of them to be admitted.
        limit: What the leader is sure to have in common with those that shared more with a leader before it, in tokens.
        joiners: By request, in the order of joining, with the tokens that each shares with the leader.
        num_missed: Consecutive steps without rows for the leader.
    """

    leader: Request
    limit: int = sys.maxsize
    joiners: dict[RequestId, tuple[Request, int]] = field(default_factory=dict)
    num_missed: int = 0
    _queue: list[tuple[int, RequestId]] = field(default_factory=list)
    _num_of: dict[RequestClass, int] = field(default_factory=dict)

    def add(self, request: Request, num_shared: int) -> None:
        """Let a request wait until `num_shared` tokens are computed."""
        self.joiners[request.request_id] = (request, num_shared)
        self._num_of[request.request_class] = self._num_of.get(request.request_class, 0) + 1
        heapq.heappush(self._queue, (num_shared, request.request_id))

    def remove(self, request: Request) -> None:
        """Take a joiner out."""
        del self.joiners[request.request_id]
        self._num_of[request.request_class] -= 1

    def pop(self, num_computed: int) -> Request | None:
        """Take out a joiner that has all that it shares with the leader, or None."""
        while self._queue and min(self._queue[0][0], self.limit) <= num_computed:
            num_shared, request_id = heapq.heappop(self._queue)
            request, shared = self.joiners.get(request_id, (None, 0))
            if request is not None and shared == num_shared:
                self.remove(request)
                return request
        return None

    def promote(self) -> Request:
        """Take out the first joiner, which leads from now on."""
        first, num_shared = next(iter(self.joiners.values()))
        self.remove(first)
        self.limit = min(self.limit, num_shared)
        self.leader = first
        self.num_missed = 0
        return first

    def highest_class(self) -> RequestClass:
        """Return the highest class of the leader and all who wait for it."""
        return highest_class([self.leader.request_class, *(name for name, number in self._num_of.items() if number)])


class Joins:
    """Who computes a prefix, and who waits for it.

    Args:
        kv: Says which block comes next.
        waiting: Where joiners are set aside.

    Attributes:
        num_joins: Requests that have waited for a prefix that another one was computing, since start.
    """

    def __init__(self, kv: KVCacheManager, waiting: WaitingRequests) -> None:
        self._kv = kv
        self._waiting = waiting
        self._leaders: dict[BlockKey, Request] = {}
        self._keys: dict[RequestId, BlockKey] = {}
        self._groups: dict[RequestId, Group] = {}
        self._group_of: dict[RequestId, Group] = {}
        self._num_leads: dict[NamespaceId, int] = {}
        self.num_joins = 0

    @property
    def groups(self) -> Collection[Group]:
        """All leaders with joiners."""
        return self._groups.values()

    def has_news(self, request: Request) -> bool:
        """Return whether anybody of a request's namespace began to compute a prompt since it was last looked at."""
        return request.num_leads_seen != self._num_leads.get(request.lease.table.namespace, 0)

    def join(self, request: Request, computed: Sequence[BlockId]) -> bool:
        """Set a waiting request aside where a running one computes the block that it needs next.

        Args:
            request: Would be admitted else.
            computed: Blocks that were found for it.
        """
        ids, table = request.lease.token_ids, request.lease.table
        request.num_leads_seen = self._num_leads.get(table.namespace, 0)
        if not request.is_told:
            return False  # A beam goes with its group.
        key = self._kv.next_block(table, ids, computed, last_too=request.compute_only)
        leader = None if key is None else self._leaders.get(key)
        if leader is None:
            return False
        size = self._kv.block_size
        first = self._kv.num_tokens_with(table, computed) // size + 1
        end = (len(ids) - (not request.compute_only)) // size
        num_shared = _num_shared_blocks(leader.lease.token_ids, ids, first, end, size) * size
        # Whoever led those behind it may wait for the same now; each finds out by itself.
        self._let_go(request)
        group = self._groups.get(leader.request_id)
        if group is None:
            group = self._groups[leader.request_id] = Group(leader)
        group.add(request, num_shared)
        request.num_found_tokens = num_shared
        self._group_of[request.request_id] = group
        self._waiting.set_aside(request)
        request.why = WaitReason.JOIN
        self.num_joins += not request.has_joined
        request.has_joined = True
        self._inherit(group)
        return True

    def begin(self, request: Request) -> None:
        """Note that a request was admitted."""
        namespace = request.lease.table.namespace
        self._num_leads[namespace] = self._num_leads.get(namespace, 0) + 1
        self.lead(request)

    def has_joined(self, request: Request) -> bool:
        """Return whether a request waits for another one's prefix now."""
        return request.request_id in self._group_of

    @property
    def has_leaders(self) -> bool:
        """Whether `is_leading` is true of anybody."""
        return bool(self._keys or self._groups)

    def is_leading(self, request: Request) -> bool:
        """Return whether others may join a request now, or have."""
        return request.request_id in self._keys or request.request_id in self._groups

    def lead(self, request: Request) -> None:
        """Note which block a running request computes next, and let those go on who have all that they waited for."""
        self._forget_key(request)
        if not request.is_told:
            return
        table = request.lease.table
        key = self._kv.next_block(table, request.lease.token_ids)
        if key is not None and self._leaders.setdefault(key, request) is request:
            self._keys[request.request_id] = key
        group = self._groups.get(request.request_id)
        if group is not None:
            self._serve(group)

    def on_planned(self, planned: Collection[RequestId]) -> None:
        """Have the first joiner lead where a running leader has had no rows for too long.

        Args:
            planned: Requests that have a part in the step.
        """
        for group in list(self._groups.values()):
            leader = group.leader
            if leader.status is not RequestStatus.RUNNING:
                continue
            group.num_missed = 0 if leader.request_id in planned else group.num_missed + 1
            if group.num_missed >= MAX_MISSED_STEPS:
                leader.is_overtaken = True
                self._forget_key(leader)
                self._replace_leader(group)

    def on_lost(self, request: Request) -> None:
        """Note that a request has ended, or lost its blocks: it computes nothing now, and waits for nobody."""
        self._forget_key(request)
        group = self._groups.get(request.request_id)
        if group is not None:
            self._replace_leader(group)
        group = self._group_of.pop(request.request_id, None)
        if group is not None:
            group.remove(request)
            self._inherit(group)

    # Parts.

    def _replace_leader(self, group: Group) -> None:
        old = group.leader
        del self._groups[old.request_id]
        first = group.promote()
        self._waiting.set_class(old, old.request_class)
        self._groups[first.request_id] = group
        self._put_back(first, old)
        self._serve(group)

    def _serve(self, group: Group) -> None:
        """Let those go on who have all that they share with the leader."""
        while (joiner := group.pop(group.leader.num_computed_tokens)) is not None:
            self._put_back(joiner, group.leader)
        self._inherit(group)

    def _let_go(self, leader: Request) -> None:
        group = self._groups.get(leader.request_id)
        if group is not None:
            for joiner, _ in list(group.joiners.values()):
                group.remove(joiner)
                self._put_back(joiner, leader)
            self._inherit(group)

    def _put_back(self, request: Request, leader: Request) -> None:
        del self._group_of[request.request_id]
        request.num_found_tokens = min(request.num_found_tokens, leader.num_computed_tokens)
        request.why = WaitReason.FAIR_SHARE
        request.retry_at = (-1, -1)
        self._waiting.put_back(request)

    def _inherit(self, group: Group) -> None:
        """Give the leader the highest class of all who wait for it; a group of nobody is no group."""
        self._waiting.set_class(group.leader, group.highest_class())
        if not group.joiners:
            self._groups.pop(group.leader.request_id, None)

    def _forget_key(self, request: Request) -> None:
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            del self._leaders[key]


def _num_shared_blocks(first: array[int], second: array[int], low: int, end: int, size: int) -> int:
    """Return how many leading blocks two sequences have in common, at most `end`; the first `low` are known to be."""
    high = min(end, len(first) // size)
    start = low
    left, right = (ids[start * size : high * size].tobytes() for ids in (first, second))
    width = size * first.itemsize
    while low < high:
        middle = (low + high + 1) // 2
        part = slice((low - start) * width, (middle - start) * width)
        if left[part] == right[part]:
            low = middle
        else:
            high = middle - 1
    return low
