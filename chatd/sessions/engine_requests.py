"""What the engine was given: the requests in flight, and what it holds for each session's lease.

The one place where a conversation's log becomes messages to the engine. A submission names how much of the log the
lease has and brings the rest, so the ids that are kept are the ids that were computed (I25), and a turn costs only what
is new.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from chatd.engine.messages import (
    Cancel,
    Done,
    Erase,
    Erased,
    EraseTenant,
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
    Trim,
)
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.errors import Unavailable
from chatd.sessions.logs import Node, common_length, common_prefix, log_between, log_of, num_equal_ids
from chatd.sessions.ports import EngineGateway
from chatd.sessions.session import Lease, Session
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
        self._erasures: dict[LeaseId, asyncio.Future[Erased]] = {}
        self._computations: dict[RequestId, Computation] = {}

    def turn_of(self, request: RequestId) -> Turn | None:
        """Return the turn whose request this is."""
        return self._turns.get(request)

    def turns(self) -> Sequence[Turn]:
        """Return the turns whose requests are in flight."""
        return list(self._turns.values())

    def submit(self, turn: Turn, *, whole: bool = False) -> None:
        """Send what the engine's lease lacks of the log; everything where `whole`. An answer goes on where it is.

        Raises:
            Unavailable: The engine takes nothing.
        """
        answer, lease = turn.answer, turn.session.lease
        assert answer is not None and answer.sampling is not None, "a turn without its answer is submitted"  # noqa: PT018
        if lease.epoch != self.epoch:
            _renew(lease, self.epoch)
        self._stop_computing(lease)
        if whole:
            lease.num_tokens = 0
            lease.draft_ids = []
        elif lease.fork_of is not None:
            source, at = lease.fork_of
            self._engine.send(Fork(source, lease.id, at))
        lease.fork_of = None
        base_len = min(common_prefix(lease.node, answer), lease.num_tokens)
        base_len = self._use_draft(lease, base_len, answer)
        answered = () if turn.text is None else turn.text.ids
        # Samples of a prompt that is computed already are requests of their own.
        sample_of = turn.sample_of if not turn.is_interrupted else None
        request = self._new_request()
        self._engine.send(
            Submit(
                request,
                lease.id,
                turn.session.owner.tenant,
                base_len,
                [*log_between(answer, base_len), *answered],
                answer.sampling,
                turn.request_class,
                sample_of=None if sample_of is None else sample_of.request,
                beam=turn.beam,
                num_answered=len(answered),
                is_suspect=turn.deaths.is_suspect(len(answered)),
            )
        )
        self.forget(turn)
        turn.request, turn.base_len, turn.num_submitted = request, base_len, len(answered)
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
        if node is None or not self.holds(session) or not 0 < lease.num_tokens < node.num_tokens:
            return

        def on_done(done: Done | None) -> None:
            if lease.ahead == request:
                lease.ahead = None
                if done is None:
                    lease.num_tokens = 0
                elif done.reason is FinishReason.COMPUTED:
                    lease.num_tokens = node.num_tokens

        tenant, base_len = session.owner.tenant, lease.num_tokens
        # What was computed and is in no prompt, as thoughts, is nowhere any more.
        self.tell(Trim(lease.id, base_len, forget=True))
        computation = Computation(tenant, lambda: log_of(node), on_done)
        # Until it has ended well, the lease counts as what it was: a submission may be refused.
        request = lease.ahead = self._compute(computation, lease.id, base_len, log_between(node, base_len))

    def compute_draft(
        self, session: Session, node: Node | None, ids: Sequence[int], on_done: Callable[[Done | None], None]
    ) -> bool:
        """Have the engine compute what is being typed, after the log up to `node`, in place of what it was before.

        The session's next turn takes over what it has in common with it; the rest is forgotten then, as it is when the
        draft changes.

        Returns:
            Whether the engine took it.
        """
        assert session.turn is None, "a draft is computed while the session is busy"
        lease = session.lease
        if lease.epoch != self.epoch:
            _renew(lease, self.epoch)
        if lease.fork_of is not None:
            return False  # The first turn of a fork shares more than a draft would bring.
        self._stop_computing(lease)
        length = 0 if node is None else node.num_tokens
        base_len = min(common_length(lease.node, node), lease.num_tokens)
        log = [*log_between(node, base_len), *ids]
        if base_len == lease.num_tokens == length:
            num_equal = num_equal_ids(lease.draft_ids, log)
            base_len, log = base_len + num_equal, log[num_equal:]
        if lease.draft_ids and base_len < lease.num_tokens + len(lease.draft_ids):
            self.tell(Trim(lease.id, base_len, forget=True))
        if not log:
            lease.draft_ids = list(ids)
            return True

        def on_end(done: Done | None) -> None:
            if lease.ahead == request:
                lease.ahead = None
                if done is None or done.reason is FinishReason.FAILED:
                    # Nothing of it was taken, or less was there than was thought.
                    lease.draft_ids = []
                    lease.num_tokens = 0 if done is None else min(lease.num_tokens, base_len)
            on_done(done)

        computation = Computation(session.owner.tenant, lambda: [*log_of(node), *ids], on_end)
        request = self._compute(computation, lease.id, base_len, log)
        if request is None:
            return False
        lease.ahead, lease.node, lease.num_tokens, lease.draft_ids = request, node, length, list(ids)
        return True

    def take_back_draft(self, session: Session) -> None:
        """Have the engine forget what was being typed in an idle session, in every tier."""
        lease = session.lease
        if lease.draft_ids and lease.epoch == self.epoch:
            self._stop_computing(lease)
            self.tell(Trim(lease.id, lease.num_tokens, forget=True))
        lease.draft_ids = []

    def _use_draft(self, lease: Lease, base_len: int, answer: Node) -> int:
        """Return how much of an answer's log the lease has with what was typed ahead, and give up the rest of that."""
        if not lease.draft_ids:
            return base_len
        end = lease.num_tokens + len(lease.draft_ids)
        if base_len == lease.num_tokens:
            num_equal = num_equal_ids(lease.draft_ids, log_between(answer, base_len))
            base_len = min(base_len + num_equal, answer.num_tokens - 1)
        if base_len < end:
            self.tell(Trim(lease.id, base_len, forget=True))
        lease.draft_ids = []
        return base_len

    def _stop_computing(self, lease: Lease) -> None:
        """Have the engine end what computes on a lease ahead of time; what was computed stays."""
        if lease.ahead is not None:
            self._engine.send(Cancel(lease.ahead))
            lease.ahead = None

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
            turn.request = None

    def cancel(self, turn: Turn) -> None:
        """Have the engine end a turn's request, where it has one."""
        if turn.request is not None:
            self.tell(Cancel(turn.request))

    def roll_back(self, turn: Turn) -> None:
        """Have the engine forget what a turn added that failed; its request is over, or was cancelled."""
        lease, answer, first = turn.session.lease, turn.answer, turn.first_node
        if answer is None or first is None or lease.node is not answer or lease.epoch != self.epoch:
            return
        length = min(common_prefix(first.parent, answer), lease.num_tokens)
        self.tell(Trim(lease.id, length, forget=True))
        lease.node, lease.num_tokens = first.parent, length
        if lease.node is None:
            self.tell(Release(lease.id))

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

    async def erase(self, session: Session, logs: Iterable[Sequence[int]]) -> Erased:
        """Have the engine forget an idle session's lease and everything that it computed of these logs, in every tier.

        Returns:
            What is gone, in all.

        Raises:
            Unavailable: No engine serves, or it ended meanwhile: what is on the disk can be found by an engine only.
        """
        assert session.turn is None, "a busy session is erased"
        lease = session.lease
        self.take_back_draft(session)
        gone = Erased(lease.id, 0, 0, 0)
        each = iter(logs)
        for log in itertools.chain((next(each, ()),), each):  # The lease goes too where there is no log.
            answer: asyncio.Future[Erased] = asyncio.get_running_loop().create_future()
            self._erasures[lease.id] = answer
            try:
                self._engine.send(Erase(lease.id, session.owner.tenant, list(log)))
                _renew(lease, lease.epoch)
                erased = await answer
            finally:
                self._erasures.pop(lease.id, None)
            gone = Erased(
                lease.id,
                gone.num_blocks + erased.num_blocks,
                gone.num_host_blocks + erased.num_host_blocks,
                gone.num_disk_blocks + erased.num_disk_blocks,
            )
        return gone

    async def erase_tenant(self, lease: LeaseId, tenant: str, names: Sequence[bytes]) -> Erased:
        """Have the engine forget a tenant, on whose sessions no turn is, and these blocks of its on the disk.

        Args:
            lease: Names the answer; nobody's.
            tenant: Which.
            names: Of blocks.

        Raises:
            Unavailable: No engine serves, or it ended meanwhile.
        """
        answer: asyncio.Future[Erased] = asyncio.get_running_loop().create_future()
        self._erasures[lease] = answer
        try:
            self._engine.send(EraseTenant(lease, tenant, list(names)))
            return await answer
        finally:
            self._erasures.pop(lease, None)

    def on_erased(self, erased: Erased) -> None:
        """Take in what is gone."""
        answer = self._erasures.get(erased.lease)
        if answer is not None and not answer.done():
            answer.set_result(erased)

    def lose(self, session: Session) -> None:
        """Note that the engine has less of a lease than it was taken to hold."""
        session.lease.num_tokens = 0
        session.lease.draft_ids = []

    def release(self, session: Session, new_lease: LeaseId) -> None:
        """Give up what the engine holds for an idle session; its next turn starts under a new lease."""
        assert session.turn is None, "a busy session's lease is released"
        lease = session.lease
        self.take_back_draft(session)
        if self.holds(session):
            self.tell(Release(lease.id))
        _renew(lease, lease.epoch)
        lease.id = new_lease
        session.latest.tier = Tier.TOKENS
        session.latest.blocks_held = session.latest.blocks_shared = 0

    def retain(self, session: Session) -> None:
        """Tell the engine whether anybody is attached, where it has something to value by that."""
        if self.holds(session):
            self.tell(Retain(session.lease.id, session.num_attached > 0))

    def tell(self, message: FrontMessage) -> None:
        """Send what only matters to an engine that is there."""
        try:
            self._engine.send(message)
        except Unavailable:
            _log.warning("the engine takes no %s", type(message).__name__)

    def on_died(self) -> None:
        """Forget what the engine held; its requests are over, and their turns are to be ended or submitted again."""
        self.epoch += 1
        self._computations.clear()
        for lease in self._forks:
            self.on_forked(Forked(lease, 0, 0))
        for answer in self._erasures.values():
            if not answer.done():
                answer.set_exception(_no_engine())

    def holds(self, session: Session) -> bool:
        """Return whether this engine was told of a session's lease."""
        lease = session.lease
        is_given = lease.node is not None or bool(lease.draft_ids)
        return lease.epoch == self.epoch and is_given and lease.fork_of is None


def _no_engine() -> Unavailable:
    return Unavailable("the engine ended while it erased", code="engine_unavailable", retry_after_ms=1000)


def _renew(lease: Lease, epoch: int) -> None:
    """Note that an engine has nothing of a lease."""
    lease.epoch, lease.node, lease.num_tokens, lease.fork_of, lease.ahead = epoch, None, 0, None, None
    lease.draft_ids = []
