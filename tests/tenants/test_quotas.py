"""Token buckets and counts, by a clock that moves when it is told to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatd.errors import RateLimited
from chatd.tenants.quotas import LOOKS_PER_REQUEST, KeyQuota, QuotaLimits, Quotas, TokenBucket
from chatd.testing.engine import FakeClock


def quota(clock: FakeClock, **limits: int) -> KeyQuota:
    return KeyQuota(QuotaLimits(**limits), clock)


def test_without_limits_everything_is_let_in_and_nothing_is_told() -> None:
    key = quota(FakeClock(), max_inflight=10**6)
    for _ in range(1000):
        key.admit()
    assert key.state() == []


def test_requests_beyond_a_minutes_worth_wait_for_the_bucket() -> None:
    clock = FakeClock()
    key = quota(clock, requests_per_minute=6)
    for _ in range(6):
        key.admit()
    with pytest.raises(RateLimited) as refused:
        key.admit()
    assert refused.value.retry_after_ms == 10_000
    assert key.num_inflight == 6
    clock.advance(10)
    key.admit()
    assert key.state() == [{"name": "requests", "limit": 6, "remaining": 0, "reset_seconds": 60.0}]


def test_tokens_put_the_bucket_into_debt_and_it_comes_back() -> None:
    clock = FakeClock()
    key = quota(clock, tokens_per_minute=600)
    key.admit()
    key.finish(700)
    with pytest.raises(RateLimited) as refused:
        key.admit()
    assert refused.value.retry_after_ms == 10_100
    clock.advance(10.1)
    key.admit()


def test_answers_in_progress_are_bounded() -> None:
    key = quota(FakeClock(), max_inflight=2)
    key.admit()
    key.admit()
    with pytest.raises(RateLimited) as refused:
        key.admit()
    assert refused.value.error_code == "too_many_inflight"
    key.finish(0)
    key.admit()


def test_a_refund_gives_the_request_back() -> None:
    key = quota(FakeClock(), requests_per_minute=1)
    key.admit()
    key.refund()
    key.admit()
    with pytest.raises(RateLimited):
        key.admit()


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 20)), max_size=50))
def test_a_bucket_never_gives_more_than_flowed_in(steps) -> None:
    clock = FakeClock()
    bucket = TokenBucket(10, 2.0, clock())
    taken = 0
    for seconds, amount in steps:
        clock.advance(seconds)
        if bucket.wait_s(clock(), amount) == 0:
            bucket.take(clock(), amount)
            taken += amount
        assert taken <= 10 + 2.0 * clock() + 1e-6
        assert bucket.level(clock()) <= 10


def test_the_wait_that_is_told_is_enough() -> None:
    clock = FakeClock()
    bucket = TokenBucket(5, 0.5, clock())
    bucket.take(clock(), 7)
    wait = bucket.wait_s(clock(), 1)
    clock.advance(wait)
    assert bucket.wait_s(clock(), 1) == pytest.approx(0)


def test_connections_are_counted_in_all_by_key_and_by_address() -> None:
    quotas = Quotas(
        QuotaLimits(), max_connections=3, max_connections_per_key=2, max_connections_per_address=2, clock=FakeClock()
    )
    quotas.connect("a", "1")
    quotas.connect("a", "2")
    with pytest.raises(RateLimited, match="per_key"):
        quotas.connect("a", "3")
    quotas.connect("b", "1")
    with pytest.raises(RateLimited, match="max_connections"):
        quotas.connect("c", "9")
    quotas.disconnect("a", "2")
    with pytest.raises(RateLimited, match="per_address"):
        quotas.connect("c", "1")
    quotas.connect("c", "9")
    for key, address in (("a", "1"), ("b", "1"), ("c", "9")):
        quotas.disconnect(key, address)
    assert (quotas._by_key, quotas._by_address, quotas._num_connections) == ({}, {}, 0)


def test_a_forgotten_keys_answers_end_all_the_same() -> None:
    quotas = Quotas(
        QuotaLimits(), max_connections=3, max_connections_per_key=2, max_connections_per_address=2, clock=FakeClock()
    )
    old = quotas.of("a")
    old.admit()
    quotas.forget("a")
    assert quotas.of("a") is not old
    old.finish(5)
    assert old.num_inflight == 0


def test_several_answers_of_one_request_count_each_and_put_the_bucket_into_debt() -> None:
    clock = FakeClock()
    key = quota(clock, requests_per_minute=6, max_inflight=10)
    key.admit(8)
    assert key.num_inflight == 8
    with pytest.raises(RateLimited, match="max_inflight"):
        key.admit(3)
    with pytest.raises(RateLimited) as refused:
        key.admit()
    assert refused.value.retry_after_ms == 30_000  # two in debt and one more, at one in ten seconds
    key.refund(8)
    assert key.num_inflight == 0
    key.admit(2)
    key.finish(5, 2)
    assert key.num_inflight == 0


def test_looks_are_counted_by_themselves_ten_to_a_request() -> None:
    clock = FakeClock()
    key = quota(clock, requests_per_minute=1)
    key.admit_change()
    for _ in range(LOOKS_PER_REQUEST):
        key.admit_look()
    with pytest.raises(RateLimited, match=r"10 looks at sessions a minute are used up \(quotas\.requests_per_minute\)"):
        key.admit_look()
    clock.advance(6.0)
    key.admit_look()
    with pytest.raises(RateLimited):
        key.admit_change()


def test_without_limits_anybody_may_look() -> None:
    key = quota(FakeClock())
    for _ in range(1000):
        key.admit_look()
