"""What the doors share: who is let in, what serves behind them, who is connected, and whether it is time to stop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from chatd import __version__
from chatd.config import Settings
from chatd.errors import ConfigError, Unavailable
from chatd.protocol import CLOSE_UNAUTHENTICATED, ServerDraining, frame_limit_bytes
from chatd.server.auth import ANONYMOUS_KEY_ID, Authenticator, Principal
from chatd.server.idempotency import AnswerCache
from chatd.server.logging import get_logger
from chatd.server.metrics import Metrics
from chatd.server.outbox import EventEncoder
from chatd.server.policy import owner_of
from chatd.server.pool_hub import PoolHub
from chatd.tenants.keys import KeyStore
from chatd.tenants.quotas import KeyQuota, QuotaLimits, Quotas

if TYPE_CHECKING:
    from chatd.engine.client import EngineClient
    from chatd.engine.messages import FrontMessage, PoolFrame
    from chatd.journal.records import UsageRow
    from chatd.server.websocket import Connection
    from chatd.sessions.manager import Restored, SessionManager
    from chatd.sessions.turn import Turn

KEYS_POLL_S = 2.0
LOADING_RETRY_MS = 1000
ReadUsage = Callable[["str | None", "date | None", "date | None"], Awaitable["list[UsageRow]"]]
"""Of a tenant or all, from a day, to a day; as `journal.journal.Journal.usage`."""

logger = get_logger("chatd.server")


@dataclass(frozen=True, slots=True)
class Readiness:
    """What `/ready` says.

    Attributes:
        status: "ready", "starting", "stalled", "restarting", "draining" or "failed".
        phase: What it is doing.
        progress: Of that, from 0 to 1.
    """

    status: str
    phase: str
    progress: float

    @property
    def is_ready(self) -> bool:
        """True while turns are taken."""
        return self.status == "ready"


@dataclass(slots=True, eq=False)
class Stream:
    """An HTTP answer in progress; it ends with its key."""

    key_id: str
    cancel: Callable[[], None]


class Daemon:
    """One per process. It serves nothing until `open` was called.

    Args:
        settings: All of them.
        keys: The keys that are good now.
        clock: Seconds, monotonic.

    Attributes:
        usage: Reads the tokens that were counted; None where nothing is kept.
        url: Where it listens; "" before that.
        owns_process: Nobody else handles this process' signals.
    """

    def __init__(self, settings: Settings, keys: KeyStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        server = settings.server
        self.settings = settings
        self.keys = keys
        self.clock = clock
        self.version = __version__
        self.boot = secrets.token_hex(8)
        self.started_at = clock()
        self.created = int(time.time())
        self.authenticator = Authenticator(
            keys,
            host=server.host,
            allow_anonymous=server.allow_anonymous_loopback,
            behind_proxy=server.behind_proxy is not None,
            allowed_hosts=server.allowed_hosts,
            allowed_origins=server.allowed_origins,
            clock=clock,
        )
        self.quotas = Quotas(
            QuotaLimits(
                requests_per_minute=settings.quotas.requests_per_minute,
                tokens_per_minute=settings.quotas.tokens_per_minute,
                max_inflight=settings.quotas.max_inflight,
            ),
            max_connections=server.max_connections,
            max_connections_per_key=server.max_connections_per_key,
            max_connections_per_address=server.max_connections_per_address,
            clock=clock,
        )
        self.encoder = EventEncoder()
        self.answers = AnswerCache()
        self.metrics = Metrics(self)
        self.connections: set[Connection] = set()
        self.streams: set[Stream] = set()
        self.url = ""
        self.owns_process = False
        self.draining = False
        self.usage: ReadUsage | None = None
        self.on_frame_limit: Callable[[int], None] | None = None
        self._loading = ("starting", 0.0)
        self._failed: str | None = None
        self._manager: SessionManager | None = None
        self._engine: EngineClient | None = None
        self._to_tell: list[FrontMessage] = []
        self._pool: PoolHub | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # What serves.

    def report(self, phase: str, progress: float) -> None:
        """Say what start-up is doing, for `/ready`, and in the log at each new phase and quarter. From any thread."""
        before, self._loading = self._loading, (phase, progress)
        if phase != before[0] or int(4 * progress) != int(4 * before[1]):
            logger.info("server.loading", phase=phase, percent=round(100 * progress))

    def fail(self, reason: str) -> None:
        """Say that start-up failed for good."""
        self._failed = reason

    def open(self, manager: SessionManager, engine: EngineClient) -> None:
        """Serve from now on."""
        self._manager = manager
        self._engine = engine
        # Of keys that went while nothing served; those of callers without one are nobody's.
        for key_id in manager.answering_keys() - {"", ANONYMOUS_KEY_ID}:
            self._end_answers(key_id)
        for message in self._to_tell:
            engine.send(message)
        self._to_tell.clear()
        self._pool = PoolHub(
            lambda interval_s, with_map, with_leases: manager.watch_pool(
                interval_s, with_map=with_map, with_leases=with_leases
            ),
            self.clock,
        )
        manager.add_observer(self.metrics)
        manager.add_pool_listener(self._pool.on_frame)
        self._pool.start()
        if self.on_frame_limit is not None:
            self.on_frame_limit(self.frame_limit_bytes)

    def take_up(self, restored: Restored) -> None:
        """Have what an earlier start left: answers to commands that may come again, and answers that go on."""
        for kept in restored.answers:
            self.answers.restore(kept)
        for turn in restored.turns:
            quota = self.quotas.of(turn.key_id)
            quota.resume()
            self.spawn(charge(turn, quota), "charge of a turn")
        logger.info("sessions.restored", sessions=restored.num_sessions, answers_going_on=len(restored.turns))

    @property
    def manager(self) -> SessionManager:
        """The sessions.

        Raises:
            Unavailable: As `check_loaded`.
        """
        self.check_loaded()
        assert self._manager is not None, "the daemon is loaded without its sessions"
        return self._manager

    def check_loaded(self) -> None:
        """Refuse what cannot be done or known yet.

        Raises:
            Unavailable: Still loading, or stopping for want of an engine; says which phase.
        """
        if self._manager is None:
            phase, progress = self._loading
            raise Unavailable(
                f"the daemon is loading: {self._failed or phase} {progress:.0%}",
                code="loading",
                hint="GET /ready tells how far it is",
                retry_after_ms=LOADING_RETRY_MS,
            )

    @property
    def pool(self) -> PoolHub:
        """Who looks at the block pool."""
        assert self._pool is not None, "the daemon is not open"
        return self._pool

    @property
    def engine(self) -> EngineClient | None:
        """The engine's front side, once there is one."""
        return self._engine

    def tell_engine(self, message: FrontMessage) -> None:
        """Send the engine what holds from now on, once there is one."""
        if self._engine is not None:
            self._engine.send(message)
        else:
            self._to_tell.append(message)

    @property
    def latest_pool_frame(self) -> PoolFrame | None:
        """The engine's last frame, None before the first."""
        return self._pool.latest if self._pool is not None else None

    @property
    def sessions(self) -> SessionManager | None:
        """As `manager`, None while there is none."""
        return self._manager

    @property
    def readiness(self) -> Readiness:
        """Whether turns are taken, and if not, why."""
        if self.draining:
            return Readiness("draining", "draining", 1.0)
        if self._failed is not None:
            return Readiness("failed", self._failed, 0.0)
        if self._manager is None or self._engine is None:
            return Readiness("starting", *self._loading)
        state = str(self._engine.state)
        return Readiness(state, *self._engine.phase)

    def check_accepting(self) -> None:
        """Refuse new work while the daemon stops.

        Raises:
            Unavailable: It stops.
        """
        if self.draining:
            raise Unavailable("the daemon is stopping", code="draining", retry_after_ms=5000)

    @property
    def frame_limit_bytes(self) -> int:
        """Largest websocket frame."""
        context = self._manager.model.context if self._manager is not None else 0
        return frame_limit_bytes(context)

    # Who is connected.

    def quota_of(self, principal: Principal) -> KeyQuota:
        """Return what a caller's key has used."""
        return self.quotas.of(principal.key_id)

    def close_key(self, key_id: str) -> None:
        """End everything that a key has open: it was revoked or changed."""
        for connection in list(self.connections):
            if connection.principal.key_id == key_id:
                connection.close(CLOSE_UNAUTHENTICATED, "the key was revoked")
        for stream in list(self.streams):
            if stream.key_id == key_id:
                stream.cancel()
        self.quotas.forget(key_id)
        self._end_answers(key_id)

    def _end_answers(self, key_id: str) -> None:
        """End what a key has in progress on the native door, unless it is still its owner's."""
        if self._manager is None:
            return
        key = self.keys.get(key_id)
        owner = None if key is None else owner_of(Principal.of(key))
        num_ended = self._manager.end_answers_of(key_id, owner)
        if num_ended:
            logger.info("key.answers_ended", key=key_id, answers=num_ended)

    async def watch_keys(self) -> None:
        """Read the keys file again when it changes, until cancelled."""
        while True:
            await asyncio.sleep(KEYS_POLL_S)
            self.refresh_keys()

    def refresh_keys(self) -> None:
        """Read the keys file again if it changed, and close what its lost keys have open."""
        try:
            gone = self.keys.refresh()
        except ConfigError as error:
            logger.error("keys.unreadable", error=error.message)
            return
        for key_id in gone:
            logger.info("key.revoked", key=key_id)
            self.close_key(key_id)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run something that outlives who asked for it; `shutdown` waits for it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def new_request_id() -> str:
        """Return the id of a request that came without one."""
        return f"req_{secrets.token_hex(12)}"

    # The end.

    @property
    def num_inflight(self) -> int:
        """Answers in progress on either door."""
        turns = self._manager.num_in_flight if self._manager is not None else 0
        return max(turns, len(self.streams))

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new, tell everybody, and wait until no answer is in progress; see `SessionManager.drain`."""
        self.draining = True
        logger.info("server.draining", inflight=self.num_inflight, deadline_s=deadline_s)
        for connection in list(self.connections):
            connection.deliver(ServerDraining(deadline_s=deadline_s))
        if self._manager is not None:
            await self._manager.drain(deadline_s)

    async def shutdown(self) -> None:
        """End the tasks that are left."""
        if self._pool is not None:
            self._pool.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def charge(turn: Turn, quota: KeyQuota) -> None:
    """Charge a turn's tokens to the key that asked for it, when it has ended; cached ones are free."""
    num_tokens = 0
    try:
        await turn.ended.wait()
        usage = turn.answer.usage if turn.answer is not None else None
        if usage is not None:
            num_tokens = usage.input_tokens - usage.cached_tokens + usage.output_tokens
    finally:
        quota.finish(num_tokens)
