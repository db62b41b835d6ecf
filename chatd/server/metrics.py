"""What `/metrics` says, in Prometheus' text format. Names and meanings are vLLM's, under `chatd_`.

Tenant labels are given to configured tenants only (those with a key), so that nobody makes series by inventing names.
Counters of tokens come from the engine where it serves, so they include what no session asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chatd.engine.messages import TierPool
from chatd.protocol import Timings, Usage

if TYPE_CHECKING:
    from chatd.server.daemon import Daemon
    from chatd.sessions.conversation import Owner

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER_TENANT = "other"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# vLLM knows these; `kv_exhausted` and the like are aborts there.
_FINISHED = {"stop": "stop", "stop_string": "stop", "max_output_tokens": "length", "context": "length"}


class Metrics:
    """All metrics of a daemon, and a `TurnObserver` of its sessions.

    Args:
        daemon: Read at each scrape.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        # One more series beside every counter, which nothing here needs.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        tenant = ("tenant",)
        self._ttft = Histogram(
            "chatd_time_to_first_token_seconds",
            "From the message to its answer's first token.",
            tenant,
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self._itl = Histogram(
            "chatd_inter_token_latency_seconds",
            "Between tokens of an answer.",
            tenant,
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self._queue = Histogram(
            "chatd_request_queue_time_seconds",
            "From the message to its admission.",
            tenant,
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self._e2e = Histogram(
            "chatd_e2e_request_latency_seconds",
            "From the message to the end of its answer.",
            tenant,
            buckets=_E2E_BUCKETS,
            registry=registry,
        )
        self._success = Counter(
            "chatd_request_success", "Answers that ended, by how.", ("tenant", "finished_reason"), registry=registry
        )
        self._failed = Counter("chatd_request_failure", "Answers that failed.", tenant, registry=registry)
        self._http = Counter(
            "chatd_http_requests", "HTTP requests, by route and status.", ("route", "status"), registry=registry
        )
        self._commands = Counter("chatd_websocket_commands", "Commands of chatd.v1.", ("command",), registry=registry)
        self._refused = Counter("chatd_websocket_errors", "Commands refused, by code.", ("code",), registry=registry)
        self._overloaded = Counter(
            "chatd_websocket_overloads", "Websockets closed because they did not read.", registry=registry
        )
        self._itl_by_tenant: dict[str, Histogram] = {}
        registry.register(_Scrape(daemon))

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def tenant_label(self, tenant: str) -> str:
        """Return a tenant's name where it is configured."""
        return tenant if tenant in self._daemon.keys.tenants or tenant == "local" else OTHER_TENANT

    # The doors.

    def http_answered(self, route: str, status: int) -> None:
        """Note an HTTP request; `route` is a registered path."""
        self._http.labels(route, str(status)).inc()

    def command_received(self, command: str) -> None:
        """Note a command that exists."""
        self._commands.labels(command).inc()

    def command_refused(self, code: str) -> None:
        """Note a refusal."""
        self._refused.labels(code).inc()

    def connection_overloaded(self) -> None:
        """Note a reader that was too slow."""
        self._overloaded.inc()

    # `TurnObserver`.

    def turn_started(self, owner: Owner) -> None:
        """Note nothing: the engine counts what runs."""

    def first_token(self, owner: Owner, ttft_s: float) -> None:
        """Note the time from the message to the first token."""
        self._ttft.labels(self.tenant_label(owner.tenant)).observe(ttft_s)

    def next_tokens(self, owner: Owner, num_tokens: int, gap_s: float) -> None:
        """Note tokens after the first and the time since those before."""
        histogram = self._itl_by_tenant.get(owner.tenant)
        if histogram is None:
            histogram = self._itl_by_tenant[owner.tenant] = self._itl.labels(self.tenant_label(owner.tenant))
        for _ in range(num_tokens):
            histogram.observe(gap_s / num_tokens)

    def turn_ended(self, owner: Owner, reason: str, usage: Usage | None, timings: Timings | None) -> None:
        """Note the end of a turn."""
        tenant = self.tenant_label(owner.tenant)
        if reason == "failed" or usage is None or timings is None:
            self._failed.labels(tenant).inc()
            return
        self._success.labels(tenant, _FINISHED.get(reason, "abort")).inc()
        self._queue.labels(tenant).observe(timings.queue_ms / 1000)
        decode_s = (usage.output_tokens - 1) / timings.decode_tok_s if timings.decode_tok_s else 0.0
        self._e2e.labels(tenant).observe(timings.ttft_ms / 1000 + max(0.0, decode_s))


class _Scrape(Collector):
    """What is read when somebody asks, instead of counted as it happens."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def describe(self) -> list[Metric]:
        """Nothing is collected at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the daemon."""
        daemon = self._daemon
        yield from self._pool()
        yield from self._engine()
        manager = daemon.sessions
        if manager is None:
            return
        yield _gauge("chatd_sessions", "Sessions, those of stateless requests included.", len(manager.lease_sessions))
        yield _gauge("chatd_turns_in_flight", "Answers in progress.", manager.num_in_flight)
        public = manager.public_prompts
        yield _gauge("chatd_public_prompts", "System prompts that all tenants share.", len(public))
        yield _gauge("chatd_public_prompts_computed", "Of those, the ones whose KV is there.", public.num_computed)
        yield _gauge("chatd_public_prompt_tokens", "Tokens that they begin with.", public.num_tokens)
        stats = manager.stats
        yield _counter("chatd_output_deltas", "Pieces of text sent on.", stats.deltas)
        yield _counter("chatd_lease_misses", "Conversations sent to the engine again as a whole.", stats.lease_misses)
        yield _counter("chatd_known_history_hits", "Stateless requests whose history was known.", stats.known_hits)
        yield _counter("chatd_known_history_misses", "Stateless ones whose history was not.", stats.known_misses)

    def _pool(self) -> Iterator[Metric]:
        frame = self._daemon.latest_pool_frame
        if frame is None:
            return
        label = self._daemon.metrics.tenant_label
        yield _gauge(
            "chatd_kv_cache_usage_perc",
            "Part of the blocks that are held, 0 to 1.",
            frame.num_active / frame.num_blocks if frame.num_blocks else 0.0,
        )
        blocks = GaugeMetricFamily("chatd_kv_cache_blocks", "Blocks by state.", labels=("state",))
        for state, number in (("free", frame.num_free), ("cached", frame.num_cached), ("active", frame.num_active)):
            blocks.add_metric((state,), number)
        yield blocks
        yield GaugeMetricFamily(
            "chatd_kv_cache_blocks_saved",
            "Blocks that sharing saves now.",
            max(0, frame.num_held - frame.num_active),
        )
        yield _counter("chatd_kv_cache_evictions", "Cached blocks taken for something else.", frame.num_evictions)
        yield from _tiers(frame.tiers)
        gauges = (
            GaugeMetricFamily("chatd_num_requests_running", "Requests in the batch.", labels=("tenant",)),
            GaugeMetricFamily("chatd_num_requests_waiting", "Requests that wait.", labels=("tenant",)),
        )
        counters = (
            CounterMetricFamily("chatd_prompt_tokens", "Tokens of prompts.", labels=("tenant",)),
            CounterMetricFamily("chatd_generation_tokens", "Tokens generated.", labels=("tenant",)),
            CounterMetricFamily("chatd_prefix_cache_queries", "Prompt tokens looked up.", labels=("tenant",)),
            CounterMetricFamily("chatd_prefix_cache_hits", "Prompt tokens found computed.", labels=("tenant",)),
            CounterMetricFamily(
                "chatd_kv_cache_wanted_again", "Evicted blocks that a prompt asked for soon after.", labels=("tenant",)
            ),
        )
        rows: dict[str, list[int]] = {}
        for row in frame.tenants:
            sums = rows.setdefault(label(row.tenant), [0] * 7)
            values = (
                row.num_running,
                row.num_waiting,
                row.prompt_tokens,
                row.output_tokens,
                row.prompt_tokens,
                row.cached_tokens,
                row.num_wanted_again,
            )
            for i, value in enumerate(values):
                sums[i] += value
        families: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (*gauges, *counters)
        for tenant, sums in rows.items():
            for family, value in zip(families, sums, strict=True):
                family.add_metric((tenant,), value)
        yield from gauges
        yield from counters

    def _engine(self) -> Iterator[Metric]:
        daemon = self._daemon
        yield _gauge("chatd_ready", "1 while turns are taken.", int(daemon.readiness.is_ready))
        yield _gauge("chatd_websocket_connections", "Open websockets.", len(daemon.connections))
        yield _gauge("chatd_uptime_seconds", "Since start.", daemon.clock() - daemon.started_at)
        yield _gauge("chatd_asyncio_tasks", "Tasks of the front's event loop.", len(asyncio.all_tasks()))
        yield _gauge("chatd_open_fds", "Descriptors that the front has open.", num_open_fds())
        info = GaugeMetricFamily("chatd_build_info", "The version that runs.", labels=("version",))
        info.add_metric((daemon.version,), 1)
        yield info
        if daemon.engine is not None:
            yield _counter("chatd_engine_restarts", "Engine processes that were replaced.", daemon.engine.num_restarts)
        stats = daemon.sessions.engine_stats if daemon.sessions is not None else None
        if stats is not None:
            yield _counter("chatd_num_preemptions", "Requests that lost their blocks.", stats.num_preemptions)
            yield _counter("chatd_num_swapped", "Of those, the ones whose blocks were saved.", stats.num_swapped)
            yield _counter("chatd_num_joins", "Requests that waited for another one's prefix.", stats.num_joins)
            yield _counter("chatd_engine_steps", "Steps committed.", stats.steps)
            yield _counter("chatd_engine_step_seconds", "Seconds in steps.", stats.step_s)
            yield _counter("chatd_engine_model_seconds", "Of those, in the model.", stats.model_s)
            yield _counter("chatd_engine_move_seconds", "Of those, in moving blocks between tiers.", stats.move_s)
            yield _counter("chatd_engine_failed_steps", "Steps that were discarded.", stats.num_failed_steps)
            yield _counter(
                "chatd_engine_oversized_steps",
                "Of those, steps that were tried again with fewer rows for want of memory.",
                stats.num_oversized_steps,
            )
            yield _counter("chatd_engine_integrity_errors", "Invariants found broken.", stats.integrity_errors)


def num_open_fds() -> int:
    """Return the descriptors that this process has open."""
    return int(psutil.Process().num_fds())


def _tiers(rows: Sequence[TierPool]) -> Iterator[Metric]:
    """Tell of each tier below the pool."""
    used = GaugeMetricFamily("chatd_kv_tier_blocks", "Blocks kept below the pool.", labels=("tier",))
    room = GaugeMetricFamily("chatd_kv_tier_capacity_blocks", "Blocks that a tier can keep.", labels=("tier",))
    counters = (
        CounterMetricFamily("chatd_kv_tier_stored", "Blocks written to a tier below the pool.", labels=("tier",)),
        CounterMetricFamily("chatd_kv_tier_loaded", "Blocks read from it.", labels=("tier",)),
        CounterMetricFamily("chatd_kv_tier_refused", "Blocks found damaged when read.", labels=("tier",)),
    )
    for row in rows:
        used.add_metric((row.tier,), row.num_used)
        room.add_metric((row.tier,), row.num_blocks)
        for family, value in zip(counters, (row.num_stored, row.num_loaded, row.num_refused), strict=True):
            family.add_metric((row.tier,), value)
    yield used
    yield room
    yield from counters


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
