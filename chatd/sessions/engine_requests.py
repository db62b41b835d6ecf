"""What the engine was given: the requests in flight, and what it holds for each session's lease.

The one place where a conversation's log becomes messages to the engine. A submission names how much of the log the
lease has and brings the rest, so the ids that are kept are the ids that were computed (I25), and a turn costs only what
is new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatd.engine.messages import (
    Cancel,
    Done,
    Finish,
    FinishReason,
    Fork,
    Forked,
    FrontMessage,
    LeaseId,
    Release,
    RequestClass,
    Retain,
    Submit,
    Tier,
)
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.errors import Unavailable
from chatd.sessions.conversation import Node, common_length, common_prefix, log_between, log_of
from chatd.sessions.ports import EngineGateway
from chatd.sessions.session import Session
from chatd.sessions.turn import Turn

_log = logging.getLogger(__name__)
_NOTHING_DRAWN = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Computation:
    """A request that only computes; nobody waits for it.

    Attributes:
        tenant: Whose blocks it makes; "" makes public ones.
        log: Gives all its ids.
        on_done: Called with its end; None where the engine no longer had the lease.
    """

    tenant: str
    log: Callable[[], Sequence[int]]
    on_done: Callable[[Done | None], None]


class EngineRequests:
    """Requests in flight by number, and the leases of sessions.

    Args:
        engine: Where messages go.
    """

    def __init__(self, engine: EngineGateway) -> None:
        self._engine = engine
        self.epoch = 0
        """Counts engine processes; a lease of an earlier one holds nothing."""
        self._last_request = 0
        self._turns: dict[RequestId, Turn] = {}
        self._forks: dict[LeaseId, asyncio.Future[Forked]] = {}
        self._computations: dict[RequestId, Computation] = {}

    def turn_of(self, request: RequestId) -> Turn | None:
        """Return the turn whose request this is."""
        return self._turns.get(request)

    def turns(self) -> Sequence[Turn]:
        """Return the turns whose requests are in flight."""
        return list(self._turns.values())

    def submit(self, turn: Turn, *, whole: bool = False) -> None:
        """Send what the engine's lease lacks of the log; everything where `whole`.

        Raises:
            Unavailable: The engine takes nothing.
        """
        answer, lease = turn.answer, turn.session.lease
        assert answer is not None and answer.sampling is not None, "a turn without its answer is submitted"  # noqa: PT018
        if lease.epoch != self.epoch:
            lease.epoch, lease.node, lease.num_tokens, lease.fork_of, lease.ahead = self.epoch, None, 0, None, None
        if lease.ahead is not None:
            # Not two requests on one lease; what was computed stays.
            self._engine.send(Cancel(lease.ahead))
            lease.ahead = None
        if whole:
            lease.num_tokens = 0
        elif lease.fork_of is not None:
            source, at = lease.fork_of
            self._engine.send(Fork(source, lease.id, at))
        lease.fork_of = None
        base_len = min(common_prefix(lease.node, answer), lease.num_tokens)
        request = self._new_request()
        self._engine.send(
            Submit(
                request,
                lease.id,
                turn.session.owner.tenant,
                base_len,
                log_between(answer, base_len),
                answer.sampling,
                turn.request_class,
                sample_of=None if turn.sample_of is None else turn.sample_of.request,
                beam=turn.beam,
            )
        )
        self.forget(turn)
        turn.request, turn.base_len = request, base_len
        lease.node, lease.num_tokens = answer, answer.num_tokens
        self._turns[request] = turn

    def _new_request(self) -> RequestId:
        self._last_request += 1
        return RequestId(self._last_request)

    # What is computed ahead.

    def compute_ahead(self, session: Session) -> None:
        """Have the engine compute what it lacks of an idle session's log, when nothing else wants the machine.

        The session's next turn ends it, wherever it is then.
        """
        assert session.turn is None, "a busy session's log is computed ahead"
        lease = session.lease
        node = lease.node
        if node is None or not self._is_known(session) or not 0 < lease.num_tokens < node.num_tokens:
            return

        def on_done(done: Done | None) -> None:
            if lease.ahead == request:
                lease.ahead = None
                if done is None:
                    lease.num_tokens = 0
                elif done.reason is FinishReason.COMPUTED:
                    lease.num_tokens = node.num_tokens

        tenant, base_len = session.owner.tenant, lease.num_tokens
        computation = Computation(tenant, lambda: log_of(node), on_done)
        # Until it has ended well, the lease counts as what it was: a submission may be refused.
        request = lease.ahead = self._compute(computation, lease.id, base_len, log_between(node, base_len))

    def compute(self, lease: LeaseId, computation: Computation) -> RequestId | None:
        """Have the engine compute ids under a lease of their own; None where it takes nothing."""
        return self._compute(computation, lease, 0, list(computation.log()))

    def _compute(self, computation: Computation, lease: LeaseId, base_len: int, new_ids: list[int]) -> RequestId | None:
        request = self._new_request()
        try:
            self._engine.send(
                Submit(
                    request,
                    lease,
                    computation.tenant,
                    base_len,
                    new_ids,
                    _NOTHING_DRAWN,
                    RequestClass.PREFILL_AHEAD,
                    compute_only=True,
                )
            )
        except Unavailable:
            return None
        self._computations[request] = computation
        return request

    def computation_of(self, request: RequestId) -> Computation | None:
        """Return what is computed by this request, where it is not a turn's."""
        return self._computations.get(request)

    def on_computed(self, request: RequestId, done: Done | None) -> None:
        """Take in the end of a request that only computes; None where its lease was lost."""
        computation = self._computations.pop(request, None)
        if computation is not None:
            computation.on_done(done)

    # Turns.

    def forget(self, turn: Turn) -> None:
        """Take a turn out: what the engine still says of its request is about nothing."""
        if turn.request is not None:
            self._turns.pop(turn.request, None)

    def cancel(self, turn: Turn) -> None:
        """Have the engine end a turn's request, where it has one."""
        if turn.request is not None:
            self.tell(Cancel(turn.request))

    def finish(self, turn: Turn, length: int) -> None:
        """End a turn's answer where the log has `length` ids."""
        assert turn.request is not None, "an answer without a request is finished"
        self.tell(Finish(turn.request, turn.session.lease.id, length))

    def share(self, source: Session, node: Node, session: Session) -> None:
        """Let a session that starts at `node` share what the lease of another one holds up to there.

        The fork is sent with its first submission. Where the source is gone by then, the engine says that the lease is
        lost, and the log is sent as a whole.
        """
        held = min(common_length(source.lease.node, node), source.lease.num_tokens)
        if source.lease.epoch != self.epoch or held == 0:
            return
        lease = session.lease
        lease.epoch, lease.node, lease.num_tokens = self.epoch, node, held
        lease.fork_of = (source.lease.id, held)

    def share_prompt(self, source: Session, answer: Node, session: Session) -> None:
        """Let a session that answers the prompt of `answer` as well share that prompt, but for the last id.

        As `share`; the last id's row is computed for its logits.
        """
        held = min(source.lease.num_tokens, answer.num_tokens_before + len(answer.prompt_ids) - 1)
        if source.lease.epoch != self.epoch or source.lease.node is not answer or held <= 0:
            return
        lease = session.lease
        lease.epoch, lease.node, lease.num_tokens = self.epoch, answer, held
        lease.fork_of = (source.lease.id, held)

    async def fork(self, source: Session, node: Node, session: Session) -> Forked:
        """Let a session that starts at `node` share what the lease of another one holds up to there, now.

        Returns:
            What they share, as the engine says; nothing where it holds nothing.
        """
        self.share(source, node, session)
        lease, nothing = session.lease, Forked(session.lease.id, 0, 0)
        if lease.fork_of is None:
            return nothing
        source_lease, at = lease.fork_of
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._forks[lease.id] = answer
        try:
            self._engine.send(Fork(source_lease, lease.id, at))
            lease.fork_of = None
            return await answer
        except Unavailable:
            lease.node, lease.num_tokens, lease.fork_of = None, 0, None
            return nothing
        finally:
            self._forks.pop(lease.id, None)

    def on_forked(self, forked: Forked) -> None:
        """Take in what a fork shares."""
        answer = self._forks.get(forked.lease)
        if answer is not None and not answer.done():
            answer.set_result(forked)

    def lose(self, session: Session) -> None:
        """Note that the engine has less of a lease than it was taken to hold."""
        session.lease.num_tokens = 0

    def release(self, session: Session, new_lease: LeaseId) -> None:
        """Give up what the engine holds for an idle session; its next turn starts under a new lease."""
        assert session.turn is None, "a busy session's lease is released"
        lease = session.lease
        if self._is_known(session):
            self.tell(Release(lease.id))
        lease.id, lease.node, lease.num_tokens, lease.fork_of, lease.ahead = new_lease, None, 0, None, None
        session.latest.tier = Tier.TOKENS
        session.latest.blocks_held = session.latest.blocks_shared = 0

    def retain(self, session: Session) -> None:
        """Tell the engine whether anybody is attached, where it has something to value by that."""
        if self._is_known(session):
            self.tell(Retain(session.lease.id, session.num_attached > 0))

    def tell(self, message: FrontMessage) -> None:
        """Send what only matters to an engine that is there."""
        try:
            self._engine.send(message)
        except Unavailable:
            _log.warning("the engine takes no %s", type(message).__name__)

    def on_died(self) -> None:
        """Forget what the engine held; its requests are over, and their turns are to be ended."""
        self.epoch += 1
        self._computations.clear()
        for lease in self._forks:
            self.on_forked(Forked(lease, 0, 0))

    def _is_known(self, session: Session) -> bool:
        """Return whether this engine was told of a session's lease."""
        lease = session.lease
        return lease.epoch == self.epoch and lease.node is not None and lease.fork_of is None
