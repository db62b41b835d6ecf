"""What the engine was given: the requests in flight, and what it holds for each session's lease.

Here, and in `computed_ahead` for what nobody waits for, a conversation's log becomes messages to the engine. A
submission names how much of the log the lease has and brings the rest, so the ids that are kept are the ids that were
computed (I25), and a turn costs only what is new.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from chatd.engine.messages import (
    Cancel,
    Erase,
    Erased,
    EraseTenant,
    Finish,
    Fork,
    Forked,
    FrontMessage,
    LeaseId,
    Release,
    Retain,
    Submit,
    Tier,
    Trim,
)
from chatd.engine.plan import RequestId
from chatd.errors import Unavailable
from chatd.sessions.computed_ahead import ComputedAhead
from chatd.sessions.engine_line import EngineLine
from chatd.sessions.logs import Node, common_length, common_prefix, log_between
from chatd.sessions.ports import EngineGateway
from chatd.sessions.session import Session
from chatd.sessions.turn import Turn


class EngineRequests:
    """Requests in flight by number, and the leases of sessions.

    Args:
        engine: Where messages go.

    Attributes:
        ahead: What is computed that nobody waits for.
    """

    def __init__(self, engine: EngineGateway) -> None:
        self._line = EngineLine(engine)
        self.ahead = ComputedAhead(self._line)
        self._turns: dict[RequestId, Turn] = {}
        self._forks: dict[LeaseId, asyncio.Future[Forked]] = {}
        self._erasures: dict[LeaseId, asyncio.Future[Erased]] = {}

    @property
    def epoch(self) -> int:
        """Counts engine processes; what was computed in an earlier one is gone."""
        return self._line.epoch

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
        if lease.epoch != self._line.epoch:
            lease.renew(self._line.epoch)
        self.ahead.stop(lease)
        if whole:
            lease.num_tokens = 0
            lease.draft_ids = []
        elif lease.fork_of is not None:
            source, at = lease.fork_of
            self._line.send(Fork(source, lease.id, at))
        lease.fork_of = None
        base_len = min(common_prefix(lease.node, answer), lease.num_tokens)
        base_len = self.ahead.use_draft(lease, base_len, answer)
        answered = () if turn.text is None else turn.text.ids
        # Samples of a prompt that is computed already are requests of their own.
        sample_of = turn.sample_of if not turn.is_interrupted else None
        request = self._line.new_request()
        self._line.send(
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

    def forget(self, turn: Turn) -> None:
        """Take a turn out: what the engine still says of its request is about nothing."""
        if turn.request is not None:
            self._turns.pop(turn.request, None)
            turn.request = None

    def tell(self, message: FrontMessage) -> None:
        """Send what only matters to an engine that is there."""
        self._line.tell(message)

    def cancel(self, turn: Turn) -> None:
        """Have the engine end a turn's request, where it has one."""
        if turn.request is not None:
            self.tell(Cancel(turn.request))

    def roll_back(self, turn: Turn) -> None:
        """Have the engine forget what a turn added that failed; its request is over, or was cancelled."""
        lease, answer, first = turn.session.lease, turn.answer, turn.first_node
        if answer is None or first is None or lease.node is not answer or lease.epoch != self._line.epoch:
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
        if source.lease.epoch != self._line.epoch or held == 0:
            return
        lease = session.lease
        lease.epoch, lease.node, lease.num_tokens = self._line.epoch, node, held
        lease.fork_of = (source.lease.id, held)

    def share_prompt(self, source: Session, answer: Node, session: Session) -> None:
        """Let a session that answers the prompt of `answer` as well share that prompt, but for the last id.

        As `share`; the last id's row is computed for its logits.
        """
        held = min(source.lease.num_tokens, answer.num_tokens_before + len(answer.prompt_ids) - 1)
        if source.lease.epoch != self._line.epoch or source.lease.node is not answer or held <= 0:
            return
        lease = session.lease
        lease.epoch, lease.node, lease.num_tokens = self._line.epoch, answer, held
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
            self._line.send(Fork(source_lease, lease.id, at))
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
        self.ahead.take_back_draft(session)
        gone = Erased(lease.id, 0, 0, 0)
        each = iter(logs)
        for log in itertools.chain((next(each, ()),), each):  # The lease goes too where there is no log.
            answer: asyncio.Future[Erased] = asyncio.get_running_loop().create_future()
            self._erasures[lease.id] = answer
            try:
                self._line.send(Erase(lease.id, session.owner.tenant, list(log)))
                lease.renew(lease.epoch)
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
            self._line.send(EraseTenant(lease, tenant, list(names)))
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
        self.ahead.take_back_draft(session)
        if self.holds(session):
            self.tell(Release(lease.id))
        lease.renew(lease.epoch)
        lease.id = new_lease
        session.latest.tier = Tier.TOKENS
        session.latest.blocks_held = session.latest.blocks_shared = 0

    def retain(self, session: Session) -> None:
        """Tell the engine whether anybody is attached, where it has something to value by that."""
        if self.holds(session):
            self.tell(Retain(session.lease.id, len(session.listeners) > 0))

    def on_died(self) -> None:
        """Forget what the engine held; its requests are over, and their turns are to be ended or submitted again."""
        self._line.epoch += 1
        self.ahead.on_died()
        for lease in self._forks:
            self.on_forked(Forked(lease, 0, 0))
        for answer in self._erasures.values():
            if not answer.done():
                answer.set_exception(_no_engine())

    def holds(self, session: Session) -> bool:
        """Return whether this engine was told of a session's lease."""
        return self._line.holds(session.lease)


def _no_engine() -> Unavailable:
    return Unavailable("the engine ended while it erased", code="engine_unavailable", retry_after_ms=1000)
