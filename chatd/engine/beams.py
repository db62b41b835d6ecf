"""Beam search inside the engine: each beam is a request on a lease of its own, and a row of the one batch.

```
prompt computed      head                               the request that the front asked for
first advance        head   -1   -2   -3                forks of its lease at the prompt's end
later                head   -1   -2   -3                a beam without a child becomes a fork of one that has two
over                 head                               holds the best sequence; the others are gone
```
A beam that has its candidates waits, holding its blocks, until all of its group have theirs; one that is preempted
meanwhile is set aside. So a group goes on whatever happens to its beams, at the pace of the slowest. The numbers of
beams and their leases are negative, the front has none such, and nothing is said about them.
"""

from __future__ import annotations

from chatd.engine.beam_search import BeamSearcher, Candidates, Finished, num_candidates
from chatd.engine.fairness import WaitingRequests
from chatd.engine.messages import BeamSequence, FinishReason
from chatd.engine.plan import RequestId
from chatd.engine.request import Request, RequestStatus
from chatd.engine.sampling import BeamSearch
from chatd.errors import Unavailable
from chatd.kvcache.lease import Lease, LeaseState
from chatd.kvcache.leases import LeaseTable


class BeamGroup:
    """The beams of one search.

    Attributes:
        head: The front's request, always one of the beams.
        search: What it asked for.
        searcher: Decides which beams go on.
        members: The beams, best first.
        candidates: What they may go on with, of those that were computed since the last advance.
        num_candidates: How many each of them needs.
        best: Holds the KV of the best finished sequence, for as long as nobody needs the blocks more.
    """

    __slots__ = ("best", "best_of", "candidates", "head", "members", "num_candidates", "search", "searcher")

    def __init__(self, head: Request, search: BeamSearch, max_model_len: int) -> None:
        self.head = head
        self.search = search
        room = max_model_len - head.num_prompt_tokens
        self.searcher = BeamSearcher(search, head.stop_ids, min(head.params.max_tokens, room))
        self.members = [head]
        self.candidates: dict[RequestId, Candidates] = {}
        self.num_candidates = num_candidates(search.width, len(head.stop_ids))
        self.best: Lease | None = None
        self.best_of: Finished | None = None

    @property
    def num_running(self) -> int:
        """Beams that hold a slot."""
        return sum(member.status is RequestStatus.RUNNING for member in self.members)

    def sequences(self, max_model_len: int) -> list[BeamSequence]:
        """Return the results, best first."""
        head = self.head
        results = []
        for sequence in self.searcher.finished[: self.search.num_returned]:
            ids = list(sequence.ids)
            if ids[-1] in head.stop_ids:
                reason = FinishReason.STOP
            elif len(ids) >= head.params.max_tokens:
                reason = FinishReason.MAX_OUTPUT_TOKENS
            else:
                assert head.num_prompt_tokens + len(ids) >= max_model_len, "a sequence ended for no reason"
                reason = FinishReason.CONTEXT
            results.append(BeamSequence(ids, float(sequence.score), reason))
        return results


class Beams:
    """All searches of a scheduler.

    Args:
        leases: All, those of the beams too.
        requests: The scheduler's own, of which beams are.
        running: Likewise.
        waiting: Likewise.
    """

    def __init__(
        self,
        leases: LeaseTable,
        requests: dict[RequestId, Request],
        running: list[Request],
        waiting: WaitingRequests,
    ) -> None:
        self._leases = leases
        self._requests = requests
        self._running = running
        self._waiting = waiting
        self._groups: dict[RequestId, BeamGroup] = {}
        self._last_id = 0

    def open(self, head: Request, search: BeamSearch, max_model_len: int) -> None:
        """Make a request the head of a group."""
        head.group = self._groups[head.request_id] = BeamGroup(head, search, max_model_len)

    def num_slots(self) -> int:
        """Return the slots that are taken: a group of which a beam runs has one for each of its beams to be."""
        taken = len(self._running)
        for group in self._groups.values():
            num_running = group.num_running
            if num_running:
                taken += group.search.width - num_running
        return taken

    def num_slots_of(self, request: Request) -> int:
        """Return the slots that a waiting request would take."""
        if request.group is None:
            return 1
        return 0 if request.group.num_running else request.group.search.width

    def take(self, request: Request, candidates: Candidates) -> bool:
        """Note what a beam may go on with; return whether its group can advance."""
        group = request.group
        assert group is not None, f"{request} is no beam"
        group.candidates[request.request_id] = candidates
        return len(group.candidates) == len(group.members)

    def advance(self, group: BeamGroup) -> bool:
        """Choose the next beams of a group that is complete; False where there are none: the search is over.

        Raises:
            Unavailable: There is no lease for a beam; the group is to be closed.
        """
        members = list(group.members)
        answers = [member.lease.token_ids[member.num_prompt_tokens :] for member in members]
        children = group.searcher.advance(answers, [group.candidates[member.request_id] for member in members])
        self._keep_best(group)
        group.candidates.clear()
        if not children:
            return False
        parents = {child.parent for child in children}
        spare = [member for place, member in enumerate(members) if place not in parents]
        chosen: list[Request] = []
        for child in children:
            parent = members[child.parent]
            if child.parent in parents:
                parents.remove(child.parent)
                chosen.append(parent)
            elif spare:
                chosen.append(spare.pop())
                self._leases.become(chosen[-1].lease, parent.lease)
            else:
                chosen.append(self._fork(group, parent))
        assert not spare, f"{len(spare)} beams have no place among {len(children)}"
        # Nothing is appended before all forks are made.
        for member, child in zip(chosen, children, strict=True):
            self._leases.append(member.lease, child.token_id)
            if self._waiting.is_aside(member):
                self._waiting.put_back(member)
        group.members = chosen
        return True

    def settle(self, group: BeamGroup) -> None:
        """Leave only the head of a search that is over; its lease gets the best sequence."""
        lease, best = group.head.lease, group.best
        best_of = group.best_of
        assert best_of is not None, "a search is over without a result"
        if best is not None and self._leases.get(best.lease_id) is best:
            self._leases.become(lease, best)
        self._leases.trim(lease, group.head.num_prompt_tokens + len(best_of.ids) - 1)
        held = len(lease.token_ids) - group.head.num_prompt_tokens
        if tuple(lease.token_ids[group.head.num_prompt_tokens :]) != best_of.ids[:held]:
            # It was forgotten for want of leases; what is cached of it will be found.
            self._leases.trim(lease, group.head.num_prompt_tokens)
            held = 0
        self._leases.extend(lease, best_of.ids[held:])
        self._leave(group)

    def close(self, group: BeamGroup) -> None:
        """Leave only the head of a search that is given up; its lease keeps the prompt."""
        self._leases.trim(group.head.lease, group.head.num_prompt_tokens)
        self._leave(group)

    def _keep_best(self, group: BeamGroup) -> None:
        """Let a lease hold the best finished sequence; like any idle one it goes where its blocks are needed."""
        finished = group.searcher.finished
        if not finished or finished[0] is group.best_of:
            return
        group.best_of = finished[0]
        if group.best is not None:
            self._leases.close(group.best)
        parent = group.members[finished[0].parent].lease
        group.best = self._leases.fork(parent, self._next_id(), len(parent.token_ids))
        if group.best is not None:
            self._leases.set_state(group.best, LeaseState.IDLE)

    def _fork(self, group: BeamGroup, parent: Request) -> Request:
        """Return a new beam with what another one has."""
        head, beam_id = group.head, self._next_id()
        lease = self._leases.fork(parent.lease, beam_id, parent.num_tokens)
        if lease is None:
            raise Unavailable("all leases are in use (max_leases)", retry_after_ms=1000)
        beam = Request(
            RequestId(beam_id),
            lease,
            head.params,
            head.request_class,
            keep_lease=False,
            stop_ids=head.stop_ids,
            arrival_s=head.arrival_s,
        )
        beam.group = group
        beam.num_prompt_tokens = beam.num_submitted_tokens = beam.num_charged_tokens = head.num_prompt_tokens
        beam.is_started = True
        beam.admission = head.admission
        beam.admitted_s = head.admitted_s
        self._requests[beam.request_id] = beam
        group.members.append(beam)
        if parent.status is RequestStatus.RUNNING:
            beam.status = RequestStatus.RUNNING
            self._running.append(beam)
        else:
            self._waiting.add(beam)
            self._leases.set_state(lease, LeaseState.QUEUED)
        return beam

    def _leave(self, group: BeamGroup) -> None:
        head = group.head
        for member in group.members:
            member.group = None
            if member is not head:
                if member.status is RequestStatus.RUNNING:
                    self._running.remove(member)
                else:
                    self._waiting.remove(member)
                member.status = RequestStatus.FINISHED
                del self._requests[member.request_id]
                self._leases.close(member.lease)
        if group.best is not None:
            self._leases.close(group.best)
        del self._groups[head.request_id]

    def _next_id(self) -> int:
        self._last_id -= 1
        return self._last_id
