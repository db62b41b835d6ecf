"""The plans that were made and are not committed: at most two, and what becomes of a request's part in them.

```
plan N     launched ──────────────── result ─ commit      hits, tokens and ends are those of committed plans
plan N+1                launched ──────────────────── …   has a pending token for each row that N draws for
```
A request that ends while a plan has a part for it is void there: its allocation is undone at once, its blocks go back
when that plan has ended, and nothing is committed for it. What has to take blocks from somebody who runs waits until
nothing is in flight. Knows drafts and block tables; who runs plans is `pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chatd.engine.block_moves import PlannedStores
from chatd.engine.cost_model import num_pairs
from chatd.engine.draft import Draft
from chatd.engine.plan import Plan, RequestId
from chatd.engine.request import Request
from chatd.kvcache.manager import KVCacheManager


@dataclass(slots=True)
class Flight:
    """A plan in flight.

    Attributes:
        plan: As the runner got it.
        drafts: What each request has in it.
        stores: What it copies down.
        num_rows: Of its drafts, those that are void by now too: they are computed all the same.
        num_pairs: (row, key) pairs of their attention.
    """

    plan: Plan
    drafts: dict[RequestId, Draft]
    stores: PlannedStores
    num_rows: int = field(init=False)
    num_pairs: int = field(init=False)

    def __post_init__(self) -> None:
        """Count once what is asked for at each plan, and at commit."""
        self.num_rows = self.plan.num_tokens
        self.num_pairs = sum(num_pairs(draft.start, draft.num_tokens) for draft in self.drafts.values())


class Flights:
    """Plans in flight, oldest first.

    Args:
        kv: Block tables.
        most: Plans in flight at most; with 1 a plan is committed before the next one is made.

    Attributes:
        must_settle: Somebody can be helped only when nothing is in flight; no plan is made before that.
    """

    def __init__(self, kv: KVCacheManager, most: int) -> None:
        self.must_settle = False
        self._kv = kv
        self._most = most
        self._last_step = 0
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def is_full(self) -> bool:
        """No plan can be made now."""
        return len(self._flights) >= self._most or (self.must_settle and bool(self._flights))

    @property
    def newest(self) -> Plan | None:
        """The last plan that was made, if it is in flight."""
        return self._flights[-1].plan if self._flights else None

    def is_planned(self, request_id: RequestId) -> bool:
        """Return whether a request has a part in any plan."""
        return any(request_id in flight.drafts for flight in self._flights)

    def begin(self, flight: Flight) -> None:
        """Add a plan that was just made."""
        if self._most > 1:
            step = self._last_step = flight.plan.step
            for draft in flight.drafts.values():
                draft.request.lease.table.last_plan = step
            for table in flight.stores.tables:
                table.last_plan = step
        self._flights.append(flight)

    def end_oldest(self, plan: Plan) -> Flight:
        """Take out a plan that has ended; `retire` follows."""
        flight = self._flights[0] if self._flights else None
        assert flight is not None, f"plan {plan.step} is not in flight"
        assert flight.plan is plan, f"plan {plan.step} is not the oldest in flight"
        del self._flights[0]
        return flight

    def undo_newest(self) -> Flight:
        """Take out the last plan that was made and undo what it took; `retire` follows."""
        assert self._flights, "no plan is in flight"
        flight = self._flights.pop()
        for draft in flight.drafts.values():
            if not draft.is_void:
                self._kv.discard(draft.allocation)
        return flight

    def void(self, request: Request) -> None:
        """Undo a request's part in all plans: it ends."""
        for flight in reversed(self._flights):
            draft = flight.drafts.get(request.request_id)
            if draft is not None and not draft.is_void:
                draft.is_void = True
                self._kv.discard(draft.allocation)

    def retire(self) -> None:
        """Let go of what no plan in flight holds."""
        if self._most > 1:
            self._kv.retire(self._flights[0].plan.step - 1 if self._flights else self._last_step)
        if not self._flights:
            self.must_settle = False
