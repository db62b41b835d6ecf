"""Whose turn it is: virtual counters over tenants, shares of classes, and the order within a tenant.

Counters are those of VTC: each tenant's service in weighted tokens; the smallest goes first.
Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping

from chatd.engine.messages import RequestClass
from chatd.engine.plan import RequestId
from chatd.engine.request import Request

Tenant = str | None

PROMPT_TOKEN_COST = 1.0
CACHED_TOKEN_COST = 0.1
OUTPUT_TOKEN_COST = 2.0

CLASS_MIN_SHARE = 0.1
_CLASS_ORDER = (RequestClass.INTERACTIVE, RequestClass.BATCH, RequestClass.PREFILL_AHEAD)


def highest_class(classes: Collection[RequestClass]) -> RequestClass:
    """Return the class that goes first."""
    return min(classes, key=_CLASS_ORDER.index)


class VirtualCounters:
    """Service that each tenant has had, by its weight.

    Args:
        weights: Of the tenants that have another weight than 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._counters: dict[Tenant, float] = {}
        self._num_requests: dict[Tenant, int] = {}
        self._left_last = 0.0

    def weight(self, tenant: Tenant) -> float:
        """Return a tenant's part relative to the others'."""
        return self._weights.get(tenant, 1.0) if tenant is not None else 1.0

    def set_weight(self, tenant: Tenant, weight: float) -> None:
        """Change a tenant's weight; what it has been served until now stays as it was counted."""
        if tenant is not None:
            self._weights[tenant] = weight

    def counter(self, tenant: Tenant) -> float:
        """Return the weighted tokens that a tenant has been served, lifts included."""
        return self._counters.get(tenant, 0.0)

    def num_requests(self, tenant: Tenant) -> int:
        """Return how many requests of a tenant have not ended."""
        return self._num_requests.get(tenant, 0)

    def enter(self, tenant: Tenant) -> None:
        """Count a new request. A tenant that returns is lifted to the smallest active counter."""
        if tenant not in self._num_requests:
            floor = min((self._counters[other] for other in self._num_requests), default=self._left_last)
            self._counters[tenant] = max(self.counter(tenant), floor)
        self._num_requests[tenant] = self._num_requests.get(tenant, 0) + 1

    def leave(self, tenant: Tenant) -> None:
        """Count a request that ended."""
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]
            self._left_last = self._counters[tenant]

    def charge(self, tenant: Tenant, cost: float) -> None:
        """Charge committed service, in tokens."""
        self._counters[tenant] = self._counters.get(tenant, 0.0) + cost / self.weight(tenant)

    def share(self, tenant: Tenant, total: float) -> float:
        """Return a tenant's part of `total` among the active tenants."""
        weights = sum(self.weight(other) for other in self._num_requests)
        return total * self.weight(tenant) / weights if weights else total


class ClassShares:
    """Which class's prefill goes first: the highest, but for one that is owed its least share.

    While a class waits it earns a part of what the others are given, such that it ends with `CLASS_MIN_SHARE` of all.

    Args:
        quantum: Tokens that must be owed before a class is served out of turn.
        max_owed: Tokens that are owed at most, so that a class that was blocked does not take over afterwards.
    """

    def __init__(self, quantum: int, max_owed: int) -> None:
        self._quantum = quantum
        self._max_owed = max_owed
        self._owed = dict.fromkeys(_CLASS_ORDER, 0.0)

    def order(self, waiting: Collection[RequestClass]) -> Iterator[tuple[RequestClass, int | None]]:
        """Yield (class, tokens that it may take now; None is no limit), best first. A class can come twice."""
        owed = [(self._owed[name], name) for name in _CLASS_ORDER[1:] if name in waiting]
        for tokens, name in sorted(owed, key=lambda item: -item[0]):
            if tokens >= self._quantum:
                yield name, int(tokens)
        for name in _CLASS_ORDER:
            if name in waiting:
                yield name, None

    def charge(self, served: RequestClass, num_tokens: int, waiting: Collection[RequestClass]) -> None:
        """Count committed prefill tokens of one class while others had work too."""
        self._owed[served] = max(0.0, self._owed[served] - num_tokens)
        earned = num_tokens * CLASS_MIN_SHARE / (1 - CLASS_MIN_SHARE)
        for name in waiting:
            if name is not served:
                self._owed[name] = min(self._max_owed, self._owed[name] + earned)


class TenantQueue:
    """The requests of one tenant and class that wait, the next one first.

    The order is by `arrival + time that the prefill needs`: the shortest remaining prefill goes first, and nothing is
    overtaken by what comes later than its own prefill would take. So a long prompt waits, but never for ever.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._requests: dict[tuple[float, int], Request] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[key] for key in self._keys)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.sort_key) is request

    def __getitem__(self, place: int) -> Request:
        return self._requests[self._keys[place]]

    @property
    def head(self) -> Request:
        """The next one of a queue that is not empty."""
        return self._requests[self._keys[0]]

    def add(self, request: Request) -> None:
        """Put a request at the place of its `sort_key`."""
        insort(self._keys, request.sort_key)
        self._requests[request.sort_key] = request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._requests[request.sort_key]
        del self._keys[bisect_left(self._keys, request.sort_key)]


class WaitingRequests:
    """All requests that wait, by class and tenant.

    One that is set aside waits for another request to get on. It is counted, and no candidate for admission; so it
    stands in nobody's way. A suspect is always aside: its admission is decided apart (`suspects`).

    Args:
        seconds_per_token: What a token of prefill takes, for the order within a tenant.
    """

    def __init__(self, seconds_per_token: float) -> None:
        self.seconds_per_token = seconds_per_token
        self._queues: dict[RequestClass, dict[Tenant, TenantQueue]] = {name: {} for name in _CLASS_ORDER}
        self._aside: dict[RequestId, Request] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        """Yield the candidates for admission, then those that are set aside."""
        for tenants in self._queues.values():
            for queue in tenants.values():
                yield from queue
        yield from self._aside.values()

    def first(self) -> Request | None:
        """Return a candidate for admission, of the highest class that has one; None where all are set aside."""
        return next((queue.head for tenants in self._queues.values() for queue in tenants.values()), None)

    def set_aside(self, request: Request) -> None:
        """Make a queued request no candidate until it is put back."""
        self.remove(request)
        self._aside[request.request_id] = request
        self._length += 1

    def put_back(self, request: Request) -> None:
        """Queue a request that was set aside."""
        self.remove(request)
        self.add(request)

    def set_class(self, request: Request, schedule_class: RequestClass) -> None:
        """Change a request's place in the schedule, whether it waits or not."""
        if request.schedule_class is schedule_class:
            return
        queue = self._queues[request.schedule_class].get(request.tenant)
        is_queued = queue is not None and request in queue
        if is_queued:
            self.remove(request)
        request.schedule_class = schedule_class
        if is_queued:
            self.add(request)

    def is_aside(self, request: Request) -> bool:
        """Return whether a request is set aside."""
        return request.request_id in self._aside

    def add(self, request: Request) -> None:
        """Queue a request, a suspect aside; its key is made here and stays until it leaves."""
        request.sort_key = self.key(request)
        if request.is_suspect:
            self._aside[request.request_id] = request
            self._length += 1
            return
        self._queues[request.schedule_class].setdefault(request.tenant, TenantQueue()).add(request)
        self._length += 1

    def key(self, request: Request) -> tuple[float, int]:
        """Return a request's place among its tenant's."""
        return (request.arrival_s + request.num_expected_tokens * self.seconds_per_token, request.request_id)

    def remove(self, request: Request) -> None:
        """Take a request out; it is admitted or has ended."""
        self._length -= 1
        if self._aside.pop(request.request_id, None) is not None:
            return
        tenants = self._queues[request.schedule_class]
        tenants[request.tenant].remove(request)
        if not tenants[request.tenant]:
            del tenants[request.tenant]

    def of(self, request_class: RequestClass) -> Mapping[Tenant, TenantQueue]:
        """Return the queues of one class, by tenant; none is empty."""
        return self._queues[request_class]

    def head_of(self, tenant: Tenant) -> Request | None:
        """Return the next candidate of a tenant, of its highest class that has one."""
        for tenants in self._queues.values():
            if tenant in tenants:
                return tenants[tenant].head
        return None

    def next_ones(self, num_each: int) -> Iterator[tuple[Request, int]]:
        """Yield the first so many of each queue, with their places."""
        for name, tenants in self._queues.items():
            for tenant, queue in tenants.items():
                start = self._num_before(tenant, name)
                for place in range(min(num_each, len(queue))):
                    yield queue[place], start + place + 1

    def positions(self) -> Iterator[tuple[Request, int]]:
        """Yield each request with its place, from 1, in its tenant's own queue over all classes.

        Those that are set aside stand at its end. Queues may change between two items: each place is the one at that
        time, and who moves up meanwhile may be left out.
        """
        for name, tenants in self._queues.items():
            for tenant in list(tenants):
                place = 0
                while (queue := tenants.get(tenant)) is not None and place < len(queue):
                    yield queue[place], self._num_before(tenant, name) + place + 1
                    place += 1
        num_aside: dict[Tenant, int] = {}
        for request in list(self._aside.values()):
            tenant = request.tenant
            num_aside[tenant] = num_aside.get(tenant, 0) + 1
            if self.is_aside(request):
                yield request, self._num_before(tenant) + num_aside[tenant]

    def _num_before(self, tenant: Tenant, name: RequestClass | None = None) -> int:
        """Return how many of a tenant's stand in the queues before that of one class, or in all."""
        number = 0
        for other, tenants in self._queues.items():
            if other is name:
                break
            number += len(tenants.get(tenant, ()))
        return number
