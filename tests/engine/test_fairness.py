"""Whose turn it is: counters, classes, the order within a tenant."""

import itertools

import pytest

from chatd.engine.fairness import CLASS_MIN_SHARE, ClassShares, TenantQueue, VirtualCounters, WaitingRequests
from chatd.engine.messages import RequestClass

INTERACTIVE, BATCH, AHEAD = RequestClass


class FakeRequest:
    """What the queues read of a request."""

    def __init__(self, request_id, tokens=10, arrival_s=0.0, tenant="acme", request_class=INTERACTIVE):
        self.request_id = request_id
        self.num_expected_tokens = tokens
        self.arrival_s = arrival_s
        self.tenant = tenant
        self.request_class = self.schedule_class = request_class
        self.sort_key = (0.0, 0)
        self.is_suspect = False


def test_service_counts_by_weight():
    counters = VirtualCounters({"acme": 2.0})
    counters.enter("acme")
    counters.enter("blue")
    counters.charge("acme", 100)
    counters.charge("blue", 100)
    assert (counters.counter("acme"), counters.counter("blue")) == (50.0, 100.0)


def test_a_tenant_that_returns_is_lifted_to_the_smallest_active_counter():
    counters = VirtualCounters({})
    for tenant in ("acme", "blue"):
        counters.enter(tenant)
    counters.charge("acme", 100)
    counters.charge("blue", 300)
    counters.enter("crow")
    assert counters.counter("crow") == 100.0
    counters.leave("blue")
    counters.enter("blue")
    assert counters.counter("blue") == 300.0


def test_nobody_gains_by_leaving_an_idle_engine():
    counters = VirtualCounters({})
    counters.enter("acme")
    counters.charge("acme", 500)
    counters.leave("acme")
    counters.enter("blue")
    assert counters.counter("blue") == 500.0


def test_shares_are_among_those_who_are_active():
    counters = VirtualCounters({"acme": 3.0})
    counters.enter("acme")
    assert counters.share("acme", 8) == 8.0
    counters.enter("blue")
    assert (counters.share("acme", 8), counters.share("blue", 8)) == (6.0, 2.0)


def serve(shares, waiting, steps, budget):
    served = dict.fromkeys(RequestClass, 0)
    for _ in range(steps):
        left = budget
        while left:
            name, most = next(shares.order(waiting))
            tokens = left if most is None else min(left, most)
            shares.charge(name, tokens, waiting)
            served[name] += tokens
            left -= tokens
    return {name: tokens / (steps * budget) for name, tokens in served.items()}


@pytest.mark.parametrize("budget", [5, 16, 64, 512])
@pytest.mark.parametrize("waiting", [(INTERACTIVE, BATCH), (INTERACTIVE, BATCH, AHEAD), (BATCH, AHEAD)])
def test_each_class_that_waits_has_its_least_share_and_the_highest_has_the_rest(budget, waiting):
    served = serve(ClassShares(16, 512), waiting, 2000, budget)
    for name in waiting[1:]:
        assert served[name] == pytest.approx(CLASS_MIN_SHARE, abs=0.01)
    assert served[waiting[0]] == pytest.approx(1 - CLASS_MIN_SHARE * (len(waiting) - 1), abs=0.02)


def test_a_class_alone_has_everything():
    assert serve(ClassShares(16, 512), (AHEAD,), 10, 100)[AHEAD] == 1.0


def test_a_class_that_was_blocked_does_not_take_over_afterwards():
    shares = ClassShares(16, 100)
    shares.charge(INTERACTIVE, 1_000_000, (INTERACTIVE, BATCH))
    assert next(shares.order((INTERACTIVE, BATCH))) == (BATCH, 100)


def test_the_shortest_prefill_goes_first():
    queue = WaitingRequests(0.01)
    requests = [FakeRequest(1, 500), FakeRequest(2, 20), FakeRequest(3, 100)]
    for request in requests:
        queue.add(request)
    assert [request.request_id for request in queue] == [2, 3, 1]
    assert queue.of(INTERACTIVE)["acme"].head.request_id == 2


def test_a_long_prompt_is_overtaken_only_by_what_comes_within_its_own_prefill_time():
    queue = WaitingRequests(0.01)
    queue.add(FakeRequest(1, 400, arrival_s=0.0))
    queue.add(FakeRequest(2, 10, arrival_s=3.0))
    queue.add(FakeRequest(3, 10, arrival_s=4.0))
    assert [request.request_id for request in queue] == [2, 1, 3]


def test_a_request_leaves_from_the_middle():
    queue = TenantQueue()
    requests = [FakeRequest(i) for i in range(5)]
    for place, request in enumerate(requests):
        request.sort_key = (float(place), place)
        queue.add(request)
    queue.remove(requests[2])
    assert [request.request_id for request in queue] == [0, 1, 3, 4]
    assert len(queue) == 4


def test_places_are_counted_in_the_tenants_own_queue_over_all_classes():
    queue = WaitingRequests(0.01)
    for number, (tenant, name) in enumerate(itertools.product(("acme", "blue"), (BATCH, INTERACTIVE, INTERACTIVE))):
        queue.add(FakeRequest(number, tenant=tenant, request_class=name))
    places = {request.request_id: place for request, place in queue.positions()}
    assert places == {1: 1, 2: 2, 0: 3, 4: 1, 5: 2, 3: 3}


def test_an_empty_queue_of_a_tenant_goes_away():
    queue = WaitingRequests(0.01)
    request = FakeRequest(1)
    queue.add(request)
    queue.remove(request)
    assert queue.of(INTERACTIVE) == {}
    assert len(queue) == 0
