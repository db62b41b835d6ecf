"""What the engine says, brought to the turns and sessions that it is about. Sends nothing to the engine itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from chatd.engine.client import EngineDied, EngineEvent
from chatd.engine.messages import (
    Beams,
    Done,
    EngineStats,
    Erased,
    Forked,
    Inspected,
    LeaseId,
    LeaseLost,
    LeaseTier,
    PoolFrame,
    Preempted,
    Prefill,
    Ready,
    Started,
    Tier,
    TokenDelta,
    Tokens,
    Waiting,
)
from chatd.engine.plan import RequestId
from chatd.errors import EngineError
from chatd.protocol import ResponsePreempted, ResponsePrefill, ResponseQueued, ResponseResumed, SessionTier
from chatd.sessions.conversation import Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.inspections import Inspections
from chatd.sessions.public_prompts import PublicPrompts
from chatd.sessions.session import Session
from chatd.sessions.turns import TurnRunner

_log = logging.getLogger(__name__)


class LeaseHolder(NamedTuple):
    """To which session a row of the pool belongs.

    Attributes:
        owner: Whose it is.
        session_id: Its id.
        title: As its owner reads it.
        hidden: It was made by stateless requests.
        release_s: Seconds until its KV is given up for want of use; None where that is not by time.
    """

    owner: Owner
    session_id: str
    title: str
    hidden: bool
    release_s: float | None = None


ReleaseIn = Callable[[Session], "float | None"]


class LeaseSessions(Mapping[LeaseId, LeaseHolder]):
    """A live view of who holds which lease."""

    def __init__(self, sessions: Mapping[LeaseId, Session], release_in: ReleaseIn) -> None:
        self._sessions = sessions
        self._release_in = release_in

    def __getitem__(self, lease: LeaseId) -> LeaseHolder:
        session = self._sessions[lease]
        return LeaseHolder(session.owner, session.id, session.title, session.hidden, self._release_in(session))

    def __iter__(self) -> Iterator[LeaseId]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)


PoolListener = Callable[[PoolFrame, LeaseSessions], None]


class EngineEvents:
    """Hands on what the engine says.

    Args:
        runner: Runs the turns.
        requests: Says which turn a request is of.
        by_lease: Every session, hidden ones too, by its lease; read at each message.
        public: Prompts that are computed by an engine that knows nothing yet.
        inspections: Questions about single blocks.
        release_in: Tells in how many seconds a session's KV is given up for want of use.
    """

    def __init__(
        self,
        runner: TurnRunner,
        requests: EngineRequests,
        by_lease: Mapping[LeaseId, Session],
        public: PublicPrompts,
        inspections: Inspections,
        release_in: ReleaseIn,
    ) -> None:
        self.engine_stats: EngineStats | None = None
        self.lease_sessions = LeaseSessions(by_lease, release_in)
        self._runner = runner
        self._requests = requests
        self._by_lease = by_lease
        self._public = public
        self._inspections = inspections
        self._pool_listeners: list[PoolListener] = []

    def add_pool_listener(self, listener: PoolListener) -> Callable[[], None]:
        """Call `listener` with every pool frame; returns what removes it."""
        self._pool_listeners.append(listener)
        return lambda: self._pool_listeners.remove(listener) if listener in self._pool_listeners else None

    def take(self, batch: Sequence[EngineEvent]) -> None:
        """Take in what one read brought; several steps' tokens of a request become one delta."""
        merged: dict[RequestId, TokenDelta] = {}
        for message in batch:
            if type(message) is Tokens:
                for delta in message.deltas:
                    known = merged.get(delta.request)
                    merged[delta.request] = delta if known is None else _merge(known, delta)
                continue
            if merged:
                self._take_tokens(merged, message)
            try:
                self._take(message)
            except Exception:
                _log.exception("a message of the engine could not be handled: %s", type(message).__name__)
                self._fail_after_exception(getattr(message, "request", None))
        for delta in merged.values():
            self._take_delta(delta)

    def _take_tokens(self, merged: dict[RequestId, TokenDelta], before: EngineEvent) -> None:
        """Handle the tokens that have to come before a message."""
        if isinstance(before, EngineDied):
            deltas = list(merged.values())
            merged.clear()
        else:
            delta = merged.pop(getattr(before, "request", RequestId(0)), None)
            deltas = [] if delta is None else [delta]
        for delta in deltas:
            self._take_delta(delta)

    def _take_delta(self, delta: TokenDelta) -> None:
        try:
            self._runner.progress.on_tokens(delta.request, delta.ids, delta.logprobs)
        except Exception:
            _log.exception("tokens could not be handled")
            self._fail_after_exception(delta.request)

    def _fail_after_exception(self, request: RequestId | None) -> None:
        """End the turn in which the front itself failed; every other one goes on."""
        if request is None:
            return
        try:
            self._runner.progress.fail_request(
                request, EngineError("the answer could not be delivered", code="internal_error")
            )
        except Exception:
            _log.exception("a turn could not be ended")

    def _take(self, message: EngineEvent) -> None:
        match message:
            case Beams():
                self._runner.progress.on_beams(message)
            case Done():
                self._note_blocks(message)
                self._runner.progress.on_done(message)
                self._requests.ahead.on_computed(message.request, message)
            case Started():
                self._on_started(message)
            case Prefill():
                self._on_prefill(message)
            case Waiting():
                self._on_waiting(message)
            case Preempted():
                self._on_preempted(message)
            case Forked():
                self._requests.on_forked(message)
            case Erased():
                self._requests.on_erased(message)
            case LeaseLost():
                self._runner.progress.on_lease_lost(message.request)
                self._requests.ahead.on_computed(message.request, None)
            case LeaseTier():
                self._on_tier(message)
            case PoolFrame():
                self._on_pool(message)
            case Inspected():
                self._inspections.on_inspected(message)
            case EngineStats():
                self.engine_stats = message
            case Ready():
                self._runner.on_ready(message)
                self._public.compute()
            case EngineDied():
                self._on_died(message)
            case _:
                pass

    def _note_blocks(self, message: Done) -> None:
        turn = self._requests.turn_of(message.request)
        if turn is not None:
            turn.session.latest.blocks_held, turn.session.latest.blocks_shared = message.num_blocks, message.num_shared

    def _on_started(self, message: Started) -> None:
        turn = self._requests.turn_of(message.request)
        if turn is None:
            return
        turn.num_cached_tokens, turn.is_running = message.num_cached_tokens, True
        session = turn.session
        session.latest.queued = None
        if turn.is_interrupted:
            turn.is_interrupted = False
            session.listeners.tell(ResponseResumed(session=session.id))
        self._set_tier(session, Tier.DEVICE, "used")
        self._tell_prefill(session, message.num_cached_tokens, message.num_prompt_tokens, message.num_cached_tokens)

    def _on_prefill(self, message: Prefill) -> None:
        turn = self._requests.turn_of(message.request)
        if turn is not None:
            self._tell_prefill(turn.session, message.done, message.total, turn.num_cached_tokens)

    def _tell_prefill(self, session: Session, done: int, total: int, cached: int) -> None:
        session.latest.prefill = {"done": done, "total": total, "cached": cached}
        session.listeners.tell(ResponsePrefill(session=session.id, done=done, total=total, cached=cached))

    def _on_waiting(self, message: Waiting) -> None:
        turn = self._requests.turn_of(message.request)
        if turn is not None:
            turn.session.latest.queued = {"position": message.position, "why": str(message.why)}
            turn.session.listeners.tell(
                ResponseQueued(session=turn.session.id, position=message.position, why=str(message.why))
            )

    def _on_preempted(self, message: Preempted) -> None:
        turn = self._requests.turn_of(message.request)
        if turn is not None:
            event = ResponseResumed if message.resumed else ResponsePreempted
            turn.session.listeners.tell(event(session=turn.session.id))
            if message.resumed:
                self._set_tier(turn.session, Tier.DEVICE, "used")

    def _on_tier(self, message: LeaseTier) -> None:
        session = self._by_lease.get(message.lease)
        if session is not None:
            self._set_tier(session, message.tier, message.why)
        else:
            self._public.on_tier(message)

    def _set_tier(self, session: Session, tier: Tier, why: str) -> None:
        if session.latest.tier is not tier:
            session.latest.tier = tier
            session.listeners.tell(SessionTier(session=session.id, tier=str(tier), why=why))

    def _on_died(self, message: EngineDied) -> None:
        self._inspections.on_died()
        self._runner.on_died(message.reason, message.alone)
        for session in list(self._by_lease.values()):
            session.latest.blocks_held = session.latest.blocks_shared = 0
            self._set_tier(session, Tier.TOKENS, "restart")

    def _on_pool(self, frame: PoolFrame) -> None:
        self._inspections.num_held = frame.num_held
        for row in frame.leases:
            session = self._by_lease.get(row.lease)
            if session is None:
                continue
            latest = session.latest
            if (latest.blocks_held, latest.blocks_shared) != (row.num_blocks, row.num_shared):
                latest.blocks_held, latest.blocks_shared = row.num_blocks, row.num_shared
                if len(session.listeners):
                    session.emit_usage()
        for listener in list(self._pool_listeners):
            listener(frame, self.lease_sessions)


def _merge(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Return the tokens of two steps of one request as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return TokenDelta(first.request, [*first.ids, *second.ids], logprobs)
