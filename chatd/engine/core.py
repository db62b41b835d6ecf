"""The engine without its process: messages in, steps, messages out.

```
core.handle(message, now)  -> messages     what the front asked
core.step(now)             -> messages     plan, run, commit (`pipeline`)
core.idle(now)             -> messages     what is due while nothing runs, and a slice of the invariants
```
Plain and synchronous. It knows no wall clock (`now` is given; `clock` only stamps what is reported), no randomness, no
torch: the runner is injected. So a seed replays it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import xxhash

from chatd.engine import invariants
from chatd.engine.draft import Decision as Decision
from chatd.engine.engine_config import EngineConfig as EngineConfig
from chatd.engine.engine_config import TenantLimits as TenantLimits
from chatd.engine.erasure import Eraser
from chatd.engine.inspection import inspect_blocks
from chatd.engine.messages import (
    PUBLIC_TENANT,
    Cancel,
    Done,
    EngineMessage,
    EngineStats,
    Erase,
    EraseTenant,
    Finish,
    FinishReason,
    Fork,
    Forked,
    FrontMessage,
    InspectBlocks,
    LeaseId,
    LeaseLost,
    LeaseTier,
    Ping,
    Pong,
    PoolFrame,
    Release,
    RequestTimings,
    Retain,
    SetTenant,
    Shutdown,
    Submit,
    Tier,
    Trim,
    WatchPool,
)
from chatd.engine.pipeline import Pipeline
from chatd.engine.plan import RequestId, Runner
from chatd.engine.reports import Reporter
from chatd.engine.request import Request
from chatd.engine.scheduler import Scheduler
from chatd.engine.submissions import Submissions
from chatd.errors import ChatdError, Conflict, NotFound
from chatd.kvcache.block_pool import BlockPool
from chatd.kvcache.disk import Disk
from chatd.kvcache.lease import Lease, LeaseState
from chatd.kvcache.leases import LeaseTable
from chatd.kvcache.manager import KVCacheManager
from chatd.kvcache.prefix_index import MAX_ENTRIES_PER_KEY, HashFunction, PrefixIndex
from chatd.kvcache.tiers import Tiers

_NO_TIME = RequestTimings(0.0, 0.0, 0.0, 0, 0)
_CHECKED = object()
_log = logging.getLogger(__name__)


class EngineCore:
    """Runs requests on one runner and one pool.

    Args:
        config: Numbers, limits, namespace.
        runner: Executes plans.
        clock: Seconds; stamps ends of steps in what is reported and is never decided by.
        log: Receives every decision of the scheduler.
        disk: Behind the host's buffer, of which the config says how large it is.
        hash_function: Of the prefix index; any function is right.
        max_entries_per_key: Of the prefix index.

    Attributes:
        pipeline: Runs the plans.
        is_checked: `idle` has copied down what there is room for, and looked over everything since.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float],
        *,
        log: Callable[[Decision], None] | None = None,
        disk: Disk | None = None,
        hash_function: HashFunction = xxhash.xxh3_128_digest,
        max_entries_per_key: int = MAX_ENTRIES_PER_KEY,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, PrefixIndex(hash_function, max_entries_per_key))
        for tenant, limits in config.tenants.items():
            self.pool.account(tenant, limits.weight, limits.floor_blocks)
        self.kv = KVCacheManager(self.pool, config.block_size, config.namespace)
        self.leases = LeaseTable(self.kv, config.max_leases, config.max_lease_tokens)
        self.tiers = Tiers(config.host_slots, lambda: self.pool, disk)
        self.scheduler = Scheduler(config, self.kv, self.leases, self.tiers, log)
        self.is_shutting_down = False
        self._submissions = Submissions(config, self.scheduler)
        self._eraser = Eraser(self.kv, self.leases, self.scheduler.moves.below)
        self._reporter = Reporter(self.scheduler, config.waiting_interval_s)
        self.pipeline = Pipeline(config, self.scheduler, runner, clock, self._reporter)
        self._checking: Iterator[None] | None = None
        self.is_checked = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return bool(self.scheduler.requests) or self.pipeline.is_busy

    def handle(self, message: FrontMessage, now: float) -> list[EngineMessage]:
        """Do what the front asks, between two steps; never raises on what a message says."""
        self.pool.now = now
        if isinstance(message, InspectBlocks):
            return [inspect_blocks(message, self.scheduler, now)]  # It changes nothing.
        self._restart_checks()
        self._reporter.mark_changed()
        match message:
            case Submit():
                self._submit(message, now)
            case Cancel():
                request = self._request(message.request)
                if request is not None:
                    self.scheduler.cancel(request, now)
            case Finish():
                self._finish(message, now)
            case Fork():
                self._fork(message)
            case Trim():
                self._trim(message)
            case Release():
                self._release(message, now)
            case Erase():
                self._erase(message, now)
            case EraseTenant():
                self._erase_tenant(message, now)
            case Retain() if message.lease >= 0:
                self.leases.set_attached(message.lease, message.attached)
            case SetTenant():
                self._set_tenant(message, now)
            case WatchPool():
                self._reporter.watch(message)
            case Ping():
                self.scheduler.outbox.append(Pong(message.nonce))
            case Shutdown():
                self.is_shutting_down = True
        return self._drain(now)

    def step(self, now: float) -> list[EngineMessage]:
        """Compute one step and return what it says; an exception of the runner costs at most one request.

        Raises:
            DeviceFault: The engine cannot go on.
        """
        self._restart_checks()
        self.pool.now = now
        self.pipeline.step(now)
        self._reporter.mark_changed()
        return self._drain(now, planned=True)

    def idle(self, now: float) -> list[EngineMessage]:
        """Return what is due, after a slice of copying down or of checking the invariants; for an idle engine."""
        self.pool.now = now
        if self.pipeline.is_busy:
            self._restart_checks()
            self.pipeline.settle(now)
        if self.scheduler.moves.has_chores and not self.scheduler.requests:
            self._restart_checks()
            self.pipeline.copy_down(now)
            return self._drain(now)
        if self._checking is None:
            self._checking = invariants.slices(self.scheduler)
        try:
            if not self.is_checked:
                self.is_checked = next(self._checking, _CHECKED) is _CHECKED
        except AssertionError:
            _log.exception("an invariant is broken; all KV is dropped and computed again where it is needed")
            self._reporter.count_integrity_error()
            if not self.scheduler.requests:
                self._reset()
            self.is_checked = True
        return self._drain(now)

    def close(self) -> None:
        """End with what is open: a step is waited for, and the disk writes in its time what it was given."""
        self.pipeline.close()
        if self.tiers.disk is not None:
            self.tiers.disk.close()

    def next_due(self) -> float | None:
        """Return the `now` at which `idle` will have something to send, or None."""
        return self._reporter.next_due()

    def pool_frame(self, now: float) -> PoolFrame:
        """Return the pool as it is, with what was asked for by the last `WatchPool`."""
        return self._reporter.frame(now)

    def stats(self) -> EngineStats:
        """Return the counters since start."""
        return self._reporter.stats()

    def check_invariants(self) -> None:
        """Check everything between two steps.

        Raises:
            AssertionError: Names what is broken.
        """
        invariants.check(self.scheduler)

    # The front's verbs.

    def _submit(self, message: Submit, now: float) -> None:
        if message.request in self.scheduler.requests:
            _log.error("request id %d is in use; the submission is dropped", message.request)
            return
        tenant = None if message.tenant == PUBLIC_TENANT else message.tenant
        lease = self._lease(message.lease)
        held = 0 if lease is None else len(lease.token_ids)
        if lease is not None and lease.tenant == tenant and self._request_on(lease) is not None:
            self._refuse(message, Conflict(f"lease {message.lease} has a request already"))
        elif lease is not None and lease.tenant != tenant:
            self._refuse(message, NotFound(f"lease {message.lease} is not known"))
        elif held < message.base_len:
            self.scheduler.outbox.append(LeaseLost(message.request, message.lease))
        else:
            try:
                request = self._submissions.open(message, tenant, lease, now)
            except ChatdError as error:
                self._refuse(message, error)
            else:
                self.scheduler.submit(request, message.sample_of, message.beam)

    def _finish(self, message: Finish, now: float) -> None:
        request, lease = self._request(message.request), self._lease(message.lease)
        if request is not None:
            self.scheduler.finish(request, message.length, now)
        elif lease is not None and self._request_on(lease) is None:
            self.leases.trim(lease, max(0, message.length))

    def _fork(self, message: Fork) -> None:
        lease = self._lease(message.lease)
        fork = None
        # A new lease that is not opened is answered with `LeaseLost` when it is used, as any that is not known.
        is_new = message.new_lease >= 0 and self.leases.get(message.new_lease) is None
        if lease is not None and is_new and 0 <= message.at <= len(lease.token_ids):
            fork = self.leases.fork(lease, message.new_lease, message.at)
        num_tokens = num_blocks = 0
        if fork is not None:
            self.leases.set_idle(fork)
            num_tokens, num_blocks = fork.table.num_computed_tokens, len(fork.table.block_ids)
        self.scheduler.outbox.append(Forked(message.new_lease, num_tokens, num_blocks))

    def _trim(self, message: Trim) -> None:
        lease = self._lease(message.lease)
        if lease is None:
            return
        length = max(0, message.length)
        if self._request_on(lease) is None:
            if message.forget:
                self._eraser.trim(lease, length)
            else:
                self.leases.trim(lease, length)
        else:
            lease.trim_to = length if lease.trim_to is None else min(length, lease.trim_to)

    def _release(self, message: Release, now: float) -> None:
        self.leases.set_attached(message.lease, False)
        lease = self._lease(message.lease)
        if lease is None:
            return
        request = self._request_on(lease)
        if request is not None:
            self.scheduler.cancel(request, now)
        self.leases.close(lease)

    def _erase(self, message: Erase, now: float) -> None:
        lease = self._lease(message.lease)
        tenant = None if message.tenant == PUBLIC_TENANT else message.tenant
        if lease is not None and lease.tenant != tenant:
            lease = None  # Somebody else's is as unknown as one that is not open.
        else:
            self.leases.set_attached(message.lease, False)
        request = None if lease is None else self._request_on(lease)
        if request is not None:
            self.scheduler.cancel(request, now)
        self.scheduler.outbox.append(self._eraser.erase(message, lease))

    def _erase_tenant(self, message: EraseTenant, now: float) -> None:
        assert message.tenant != PUBLIC_TENANT, "public blocks are nobody's to erase"
        for request in list(self.scheduler.requests.values()):
            if request.request_id >= 0 and request.lease.tenant == message.tenant:  # Beams end with their search.
                self.scheduler.cancel(request, now)
        for lease in self.leases:
            if lease.tenant == message.tenant:
                self.leases.set_attached(lease.lease_id, False)
        self.scheduler.outbox.append(self._eraser.erase_tenant(message))

    def _request(self, request_id: RequestId) -> Request | None:
        """Return a request of the front's; negative numbers are the engine's own beams."""
        return self.scheduler.requests.get(request_id) if request_id >= 0 else None

    def _lease(self, lease_id: LeaseId) -> Lease | None:
        """Return a lease of the front's."""
        return self.leases.get(lease_id) if lease_id >= 0 else None

    def _set_tenant(self, message: SetTenant, now: float) -> None:
        weight, tenant = message.weight, message.tenant
        if tenant == PUBLIC_TENANT or not 0.0 < weight < math.inf or not 0.0 <= message.floor <= 1.0:
            _log.error("tenant %r cannot have weight %r and floor %r; nothing changes", tenant, weight, message.floor)
            return
        wanted = int(message.floor * self.pool.num_blocks)
        others = self.pool.num_blocks - self.pool.usable_blocks(tenant)
        floor = max(0, min(wanted, self.pool.num_blocks // 2 - others))
        if floor < wanted:
            _log.warning(
                "tenant %r asks for a floor of %d blocks and gets %d: all floors together are at most half of %d",
                tenant,
                wanted,
                floor,
                self.pool.num_blocks,
            )
        self.pool.set_limits(tenant, weight, floor)
        self.scheduler.counters.set_weight(tenant, weight)
        self.scheduler.end_hopeless(now)

    def _request_on(self, lease: Lease) -> Request | None:
        if lease.state in (LeaseState.IDLE, LeaseState.ATTACHED):
            return None
        return next((r for r in self.scheduler.requests.values() if r.lease is lease), None)

    def _refuse(self, message: Submit, error: ChatdError) -> None:
        self.scheduler.outbox.append(
            Done(message.request, FinishReason.FAILED, 0, 0, 0, _NO_TIME, error.error_code, error.message)
        )

    # What goes wrong, and what goes out.

    def _reset(self) -> None:
        """Drop all KV and start over with an empty pool; every lease keeps its ids."""
        old = self.pool
        fresh = BlockPool(self.config.num_blocks, PrefixIndex(old.index.hash_function, old.index.max_entries_per_key))
        for account in old.accounts:
            fresh.account(account.tenant, account.weight, account.floor)
        for before in (old.public, *old.accounts):
            after = fresh.account(before.tenant)
            after.num_evicted, after.num_wanted_again = before.num_evicted, before.num_wanted_again
        fresh.num_evictions, fresh.now = old.num_evictions, old.now
        self.pool = fresh
        self.kv.use_pool(fresh)
        self.leases.drop_all()
        self.tiers.clear()
        for lease in self.leases:
            lease.tier = Tier.TOKENS
            self.scheduler.outbox.append(LeaseTier(LeaseId(lease.lease_id), Tier.TOKENS, "policy", 0))
        self._restart_checks()

    def _restart_checks(self) -> None:
        self._checking, self.is_checked = None, False

    def _drain(self, now: float, *, planned: bool = False) -> list[EngineMessage]:
        outbox = self.scheduler.outbox
        messages = [*outbox, *self._reporter.tiers(), *self._reporter.due(now, planned=planned)]
        outbox.clear()
        return messages
