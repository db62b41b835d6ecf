"""What one key may use: token buckets for requests and for tokens, and counts of what is open.

Buckets are charged before work starts for requests, and after it ended for tokens: a request is let in while the bucket
is not in debt, and its tokens then put it there. Time comes from the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from chatd.errors import RateLimited

LOOKS_PER_REQUEST = 10
"""Looks at what there is that go with each request: at a list, a session's messages, another branch of them."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of one key; 0 is none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_inflight: int = 64


class LimitState(TypedDict):
    """One limit as `rate_limits.updated` shows it, named as in OpenAI's realtime protocol."""

    name: str
    limit: int
    remaining: int
    reset_seconds: float


class TokenBucket:
    """A bucket that fills evenly up to its capacity; it may go into debt.

    Args:
        capacity: What it holds, at first too.
        per_s: What flows in; above 0.
        now: By the caller's clock, in seconds.
    """

    def __init__(self, capacity: float, per_s: float, now: float) -> None:
        assert per_s > 0, "a bucket without a rate never fills"
        self.capacity = capacity
        self._rate = per_s
        self._level = capacity
        self._then = now

    def level(self, now: float) -> float:
        """Return what is in it; negative in debt."""
        self._level = min(self.capacity, self._level + max(0.0, now - self._then) * self._rate)
        self._then = now
        return self._level

    def wait_s(self, now: float, amount: float) -> float:
        """Return how long until `amount` is there; 0 if it is."""
        return max(0.0, amount - self.level(now)) / self._rate

    def take(self, now: float, amount: float) -> None:
        """Take `amount`, into debt if need be."""
        self._level = self.level(now) - amount


class KeyQuota:
    """What one key has used."""

    def __init__(self, limits: QuotaLimits, clock: Callable[[], float]) -> None:
        now = clock()
        self._limits = limits
        self._clock = clock
        self._requests = _per_minute(limits.requests_per_minute, now)
        self._looks = _per_minute(limits.requests_per_minute * LOOKS_PER_REQUEST, now)
        self._tokens = _per_minute(limits.tokens_per_minute, now)
        self.num_inflight = 0

    def admit(self, num_answers: int = 1) -> None:
        """Let so many more answers begin; `finish` must follow.

        Each counts as a request of its own.

        Raises:
            RateLimited: Says which limit, and when to come back. Nothing was charged.
        """
        if self.num_inflight + num_answers > self._limits.max_inflight:
            raise RateLimited(
                f"{self.num_inflight} answers are in progress, the limit is {self._limits.max_inflight}"
                " (quotas.max_inflight)",
                code="too_many_inflight",
                retry_after_ms=1000,
            )
        now = self._clock()
        if self._requests is not None:
            self._refuse_above(
                "requests", self._requests.wait_s(now, 1.0), self._limits.requests_per_minute, "requests_per_minute"
            )
        if self._tokens is not None:
            self._refuse_above(
                "tokens", self._tokens.wait_s(now, 1.0), self._limits.tokens_per_minute, "tokens_per_minute"
            )
        if self._requests is not None:
            self._requests.take(now, float(num_answers))
        self.num_inflight += num_answers

    def admit_change(self) -> None:
        """Let a change that no answer follows happen; it counts as a request.

        Raises:
            RateLimited: When to come back. Nothing was charged.
        """
        if self._requests is not None:
            now = self._clock()
            self._refuse_above(
                "requests", self._requests.wait_s(now, 1.0), self._limits.requests_per_minute, "requests_per_minute"
            )
            self._requests.take(now, 1.0)

    def refund_change(self) -> None:
        """Undo one `admit_change` whose change was refused."""
        if self._requests is not None:
            self._requests.take(self._clock(), -1.0)

    def admit_look(self) -> None:
        """Let somebody look at what there is; whoever has used up the requests still may.

        Raises:
            RateLimited: When to come back. Nothing was charged.
        """
        if self._looks is not None:
            now = self._clock()
            limit = int(self._looks.capacity)
            self._refuse_above("looks at sessions", self._looks.wait_s(now, 1.0), limit, "requests_per_minute")
            self._looks.take(now, 1.0)

    def resume(self) -> None:
        """Count an answer that goes on after a restart, over any limit: it was let in before; `finish` must follow."""
        self.num_inflight += 1

    def refund(self, num_answers: int = 1) -> None:
        """Undo one `admit` whose request was refused before it began."""
        if self._requests is not None:
            self._requests.take(self._clock(), -float(num_answers))
        self.finish(0, num_answers)

    def finish(self, num_tokens: int, num_answers: int = 1) -> None:
        """End the answers of one `admit` and charge their tokens."""
        assert self.num_inflight >= num_answers, "an answer ended that was not admitted"
        self.num_inflight -= num_answers
        if self._tokens is not None and num_tokens:
            self._tokens.take(self._clock(), float(num_tokens))

    def check_tokens(self) -> None:
        """Refuse what would be charged later and is no answer.

        Raises:
            RateLimited: The tokens are used up.
        """
        if self._tokens is not None:
            self._refuse_above(
                "tokens", self._tokens.wait_s(self._clock(), 1.0), self._limits.tokens_per_minute, "tokens_per_minute"
            )

    def charge(self, num_tokens: int) -> None:
        """Charge tokens of no answer."""
        if self._tokens is not None and num_tokens:
            self._tokens.take(self._clock(), float(num_tokens))

    def state(self) -> list[LimitState]:
        """Return what is left of each limit there is."""
        now = self._clock()
        rows: list[LimitState] = []
        buckets = (("requests", self._requests), ("tokens", self._tokens))
        for name, bucket in buckets:
            if bucket is not None:
                rows.append(
                    LimitState(
                        name=name,
                        limit=int(bucket.capacity),
                        remaining=max(0, int(bucket.level(now))),
                        reset_seconds=round(bucket.wait_s(now, bucket.capacity), 3),
                    )
                )
        return rows

    @staticmethod
    def _refuse_above(what: str, wait_s: float, limit: int, setting: str) -> None:
        if wait_s > 0:
            raise RateLimited(
                f"{limit} {what} a minute are used up (quotas.{setting})",
                retry_after_ms=max(1, round(wait_s * 1000)),
            )


class Quotas:
    """Every key's use, and who is connected from where.

    Args:
        limits: Of each key.
        max_connections: Open sockets in all, per key and per address.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        limits: QuotaLimits,
        *,
        max_connections: int,
        max_connections_per_key: int,
        max_connections_per_address: int,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._max_connections = max_connections
        self._max_per_key = max_connections_per_key
        self._max_per_address = max_connections_per_address
        self._clock = clock
        self._keys: dict[str, KeyQuota] = {}
        self._num_connections = 0
        self._by_key: dict[str, int] = {}
        self._by_address: dict[str, int] = {}

    @property
    def limits(self) -> QuotaLimits:
        """The limits of each key."""
        return self._limits

    def of(self, key_id: str) -> KeyQuota:
        """Return a key's use."""
        quota = self._keys.get(key_id)
        if quota is None:
            quota = self._keys[key_id] = KeyQuota(self._limits, self._clock)
        return quota

    def forget(self, key_id: str) -> None:
        """Drop a revoked key's buckets; answers in progress end against the object they began with."""
        self._keys.pop(key_id, None)

    def connect(self, key_id: str, address: str) -> None:
        """Count one more socket; `disconnect` must follow.

        Raises:
            RateLimited: Names the limit.
        """
        for count, limit, what in (
            (self._num_connections, self._max_connections, "max_connections"),
            (self._by_key.get(key_id, 0), self._max_per_key, "max_connections_per_key"),
            (self._by_address.get(address, 0), self._max_per_address, "max_connections_per_address"),
        ):
            if count >= limit:
                raise RateLimited(
                    f"{count} connections are open, the limit is {limit} (server.{what})",
                    code="too_many_connections",
                    retry_after_ms=5000,
                )
        self._num_connections += 1
        self._by_key[key_id] = self._by_key.get(key_id, 0) + 1
        self._by_address[address] = self._by_address.get(address, 0) + 1

    def disconnect(self, key_id: str, address: str) -> None:
        """Count one socket less."""
        self._num_connections -= 1
        for counts, name in ((self._by_key, key_id), (self._by_address, address)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]


def _per_minute(limit: int, now: float) -> TokenBucket | None:
    return TokenBucket(limit, limit / 60.0, now) if limit else None
