"""What the engine computes ahead of time and nobody waits for: a log's rest, what is being typed, public prompts.

It runs at the lowest priority, under a session's lease or one of its own, and a turn of the session ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatd.engine.messages import Cancel, Done, FinishReason, LeaseId, RequestClass, Submit, Trim
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.errors import Unavailable
from chatd.sessions.engine_line import EngineLine
from chatd.sessions.leases import Lease
from chatd.sessions.logs import Node, common_length, log_between, log_of, num_equal_ids
from chatd.sessions.session import Session

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


class ComputedAhead:
    """Requests that only compute, by number.

    Args:
        line: To the engine.
    """

    def __init__(self, line: EngineLine) -> None:
        self._line = line
        self._computations: dict[RequestId, Computation] = {}

    def compute_ahead(self, session: Session) -> None:
        """Have the engine compute what it lacks of an idle session's log, when nothing else wants the machine.

        The session's next turn ends it, wherever it is then.
        """
        assert session.turn is None, "a busy session's log is computed ahead"
        lease = session.lease
        node = lease.node
        if node is None or not self._line.holds(lease) or not 0 < lease.num_tokens < node.num_tokens:
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
        self._line.tell(Trim(lease.id, base_len, forget=True))
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
        if lease.epoch != self._line.epoch:
            lease.renew(self._line.epoch)
        if lease.fork_of is not None:
            return False  # The first turn of a fork shares more than a draft would bring.
        self.stop(lease)
        length = 0 if node is None else node.num_tokens
        base_len = min(common_length(lease.node, node), lease.num_tokens)
        log = [*log_between(node, base_len), *ids]
        if base_len == lease.num_tokens == length:
            num_equal = num_equal_ids(lease.draft_ids, log)
            base_len, log = base_len + num_equal, log[num_equal:]
        if lease.draft_ids and base_len < lease.num_tokens + len(lease.draft_ids):
            self._line.tell(Trim(lease.id, base_len, forget=True))
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
        if lease.draft_ids and lease.epoch == self._line.epoch:
            self.stop(lease)
            self._line.tell(Trim(lease.id, lease.num_tokens, forget=True))
        lease.draft_ids = []

    def use_draft(self, lease: Lease, base_len: int, answer: Node) -> int:
        """Return how much of an answer's log the lease has with what was typed ahead, and give up the rest of that."""
        if not lease.draft_ids:
            return base_len
        end = lease.num_tokens + len(lease.draft_ids)
        if base_len == lease.num_tokens:
            num_equal = num_equal_ids(lease.draft_ids, log_between(answer, base_len))
            base_len = min(base_len + num_equal, answer.num_tokens - 1)
        if base_len < end:
            self._line.tell(Trim(lease.id, base_len, forget=True))
        lease.draft_ids = []
        return base_len

    def stop(self, lease: Lease) -> None:
        """Have the engine end what computes on a lease ahead of time; what was computed stays."""
        if lease.ahead is not None:
            self._line.send(Cancel(lease.ahead))
            lease.ahead = None

    def compute(self, lease: LeaseId, computation: Computation) -> RequestId | None:
        """Have the engine compute ids under a lease of their own; None where it takes nothing."""
        return self._compute(computation, lease, 0, list(computation.log()))

    def _compute(self, computation: Computation, lease: LeaseId, base_len: int, new_ids: list[int]) -> RequestId | None:
        request = self._line.new_request()
        try:
            self._line.send(
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

    def on_died(self) -> None:
        """Forget what an engine computed that is gone; nobody waits for it."""
        self._computations.clear()
