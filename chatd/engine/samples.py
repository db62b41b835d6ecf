"""Parallel samples of one prompt: it is computed once, and each sample begins as a fork at its end.

```
first    [ 7 ][ 2 ][ 9 ][ 4.          the last token's row gave its logits
others   [ 7 ][ 2 ][ 9 ][ 4.          all but that one token are computed; whoever appends to the shared block copies it
```
A sample that has to wait for the first one's prompt is set aside. It computes one row then, the prompt's last, and
draws from it by its own seed. It holds no more than its lease did, so nothing can lock up.
"""

from __future__ import annotations

from chatd.engine.fairness import WaitingRequests
from chatd.engine.messages import WaitReason
from chatd.engine.plan import RequestId
from chatd.engine.request import Request
from chatd.kvcache.leases import LeaseTable


class Samples:
    """Who waits for whose prompt.

    Args:
        leases: In which prompts are shared.
        waiting: Where samples are set aside.
    """

    def __init__(self, leases: LeaseTable, waiting: WaitingRequests) -> None:
        self._leases = leases
        self._waiting = waiting
        self._others: dict[RequestId, list[Request]] = {}
        self._first_of: dict[RequestId, RequestId] = {}

    def follow(self, request: Request, first: Request) -> None:
        """Let a request that was just queued share another one's prompt, now or as soon as it is computed.

        Where that cannot be, since the prompts differ or the other one has lost its blocks, it goes on as any request.
        """
        length = request.num_prompt_tokens
        if first.tenant != request.tenant or first.num_prompt_tokens != length:
            return
        if first.lease.token_ids[:length] != request.lease.token_ids:
            return
        if first.is_preempted:
            return
        request.why = WaitReason.JOIN
        self._waiting.set_aside(request)
        if first.num_computed_tokens >= length:
            self._begin(request, first)
        else:
            # A sample of a sample waits for the same one.
            first_id = self._first_of.get(first.request_id, first.request_id)
            self._others.setdefault(first_id, []).append(request)
            self._first_of[request.request_id] = first_id

    def is_waiting(self, request: Request) -> bool:
        """Return whether a request waits for the prompt of another one."""
        return request.request_id in self._first_of

    def on_computed(self, first: Request) -> None:
        """Let the samples of a prompt begin that was just computed to its end."""
        for request in self._take_others(first):
            self._begin(request, first)

    def on_lost(self, request: Request) -> None:
        """Let the samples go on by themselves whose first one has ended, or lost its blocks, before that."""
        for other in self._take_others(request):
            self._put_back(other)
        first_id = self._first_of.pop(request.request_id, None)
        if first_id is not None:
            self._others[first_id].remove(request)

    def _begin(self, request: Request, first: Request) -> None:
        self._leases.share(request.lease, first.lease, first.num_prompt_tokens - 1)
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        request.why = WaitReason.FAIR_SHARE
        self._waiting.put_back(request)

    def _take_others(self, first: Request) -> list[Request]:
        others = self._others.pop(first.request_id, [])
        for request in others:
            del self._first_of[request.request_id]
        return others
