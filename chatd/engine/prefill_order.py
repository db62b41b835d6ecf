"""Which prompt is computed next within one step: by class, then by tenant, then the shortest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chatd.engine.fairness import ClassShares, Tenant, TenantQueue, VirtualCounters, WaitingRequests
from chatd.engine.messages import RequestClass
from chatd.engine.request import Request, RequestStatus


class PrefillOrder:
    """The candidates of one plan, admitted prefills and waiting requests alike.

    Args:
        prefills: Running requests with a prompt to compute.
        waiting: Candidates for admission.
        counters: The tenant with the smallest goes first.
        classes: Which class goes first.
        admit: False leaves the waiting ones out.
    """

    def __init__(
        self,
        prefills: Sequence[Request],
        waiting: WaitingRequests,
        counters: VirtualCounters,
        classes: ClassShares,
        *,
        admit: bool,
    ) -> None:
        self._running: dict[RequestClass, dict[Tenant, list[Request]]] = {}
        for request in prefills:
            self._running.setdefault(request.schedule_class, {}).setdefault(request.tenant, []).append(request)
        self._waiting = waiting
        self._counters = counters
        self._classes = classes
        self._admit = admit
        self._closed: set[Tenant] = set()
        self._served: dict[Tenant, float] = {}

    def next(self) -> tuple[Request, int | None] | None:
        """Return the best candidate, and how many tokens its class may take now (None: no limit)."""
        candidates = {name: tenants for name in RequestClass if (tenants := self._tenants(name))}
        for name, most in self._classes.order(candidates):
            tenant = min(candidates[name], key=self._virtual_time)
            return self._first(name, tenant), most
        return None

    def serve(self, request: Request, num_tokens: int) -> None:
        """Count rows that a candidate was given; it is no candidate any more."""
        classes = [name for name in RequestClass if self._tenants(name) or name is request.schedule_class]
        self._drop(request)
        self._classes.charge(request.schedule_class, num_tokens, classes)
        served = self._served.get(request.tenant, 0.0)
        self._served[request.tenant] = served + num_tokens / self._counters.weight(request.tenant)

    def skip(self, request: Request) -> None:
        """Pass over a candidate; where it waits for admission, nothing of its tenant is admitted before it."""
        if request.status is RequestStatus.WAITING:
            self._closed.add(request.tenant)
        self._drop(request)

    def untried(self) -> Iterator[TenantQueue]:
        """Yield each queue whose next one was not reached: the step was full before."""
        for name in RequestClass:
            for tenant, queue in list(self._waiting.of(name).items()):
                if tenant not in self._closed:
                    yield queue

    def close(self) -> None:
        """Admit nobody any more: what becomes free is for the one that waits for blocks."""
        self._admit = False

    def _tenants(self, name: RequestClass) -> list[Tenant]:
        tenants = list(self._running.get(name, ()))
        if self._admit:
            tenants += [tenant for tenant in self._waiting.of(name) if tenant not in self._closed]
        return tenants

    def _first(self, name: RequestClass, tenant: Tenant) -> Request:
        candidates = list(self._running.get(name, {}).get(tenant, ()))
        if self._admit and tenant not in self._closed and tenant in self._waiting.of(name):
            candidates.append(self._waiting.of(name)[tenant].head)
        return min(candidates, key=self._waiting.key)

    def _virtual_time(self, tenant: Tenant) -> tuple[float, int, str]:
        """Return a tenant's place; one that just came is level with the smallest counter, and goes before it."""
        served = self._counters.counter(tenant) + self._served.get(tenant, 0.0)
        return (served, self._counters.num_requests(tenant), tenant or "")

    def _drop(self, request: Request) -> None:
        # Its class may have changed since, by whom it leads.
        for tenants in self._running.values():
            mine = tenants.get(request.tenant, [])
            if request in mine:
                mine.remove(request)
                if not mine:
                    del tenants[request.tenant]
