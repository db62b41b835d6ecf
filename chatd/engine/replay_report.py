"""What a replay shows a person: sums by tenant, why requests waited, and the life of one request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from chatd.engine.core import EngineCore
from chatd.engine.decision_log import Call
from chatd.engine.explanations import explain_waiting
from chatd.engine.messages import Done, Prefill, Started, Submit, Tokens, WaitReason
from chatd.engine.plan import RequestId

PUBLIC = "(public)"

NUM_LONGEST = 5
"""Requests that are named for their waits."""


@dataclass(slots=True)
class TenantTally:
    """What one tenant asked for and got.

    Attributes:
        submitted: Requests.
        ended: Requests by the reason of their end.
        prompt_tokens: Of the requests that were admitted.
        cached_tokens: Of those, found computed.
        output_tokens: Of the answers that ended.
        preemptions: Of its requests.
        waited_s: Seconds that requests waited, by reason.
    """

    submitted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    waited_s: dict[str, float] = field(default_factory=dict)

    def add(self, other: TenantTally) -> None:
        """Add another tenant's sums."""
        self.submitted += other.submitted
        self.ended += other.ended
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.preemptions += other.preemptions
        for reason, seconds in other.waited_s.items():
            self.wait(reason, seconds)

    def wait(self, reason: str, seconds: float) -> None:
        """Add to the seconds of a reason."""
        self.waited_s[reason] = self.waited_s.get(reason, 0.0) + seconds


class Tally:
    """Counts what happens from one step on.

    Args:
        first_step: What lies before is not counted.

    Attributes:
        num_calls: Of the core.
        num_steps: Plans that were computed.
        num_failed_steps: Plans that were given up.
        num_rows: Computed.
        tenants: By name.
        waited_s: Seconds that each request waited.
    """

    def __init__(self, first_step: int = 0) -> None:
        self.num_calls = self.num_steps = self.num_failed_steps = self.num_rows = 0
        self.tenants: dict[str, TenantTally] = {}
        self.seconds = 0.0
        self.waited_s: dict[RequestId, float] = {}
        self._first_step = first_step
        self._tenant_of: dict[RequestId, str] = {}
        self._waits: list[tuple[RequestId, str, str]] = []
        self._waits_since = 0.0
        self._before: float | None = None

    def see(self, call: Call, core: EngineCore) -> None:
        """Count a call."""
        if isinstance(call.message, Submit):
            self._tenant_of[call.message.request] = call.message.tenant or PUBLIC
        if core.scheduler.step >= self._first_step:
            self._count(call)
        self._count_waits(call, core)

    def total(self) -> TenantTally:
        """Return the sums over all tenants."""
        total = TenantTally()
        for tally in self.tenants.values():
            total.add(tally)
        return total

    def lines(self) -> list[str]:
        """Return the summary as text."""
        total = self.total()
        lines = [
            f"{self.num_steps} steps in {self.seconds:.1f} s, {self.num_failed_steps} of them given up; {self.num_rows}"
            f" rows, {self.num_calls} calls",
        ]
        rows = sorted(self.tenants.items())
        for name, tally in [*rows, *([("all", total)] if len(rows) != 1 else [])]:
            ended = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.ended.items())) or "none"
            hit_rate = f"{tally.cached_tokens / tally.prompt_tokens:.1%}" if tally.prompt_tokens else "–"
            lines += [
                f"{name}: {tally.submitted} {'request' if tally.submitted == 1 else 'requests'}, ended: {ended}",
                f"  {tally.prompt_tokens} prompt tokens, hit rate {hit_rate}; {tally.output_tokens} output tokens;"
                f" {tally.preemptions} preemptions",
            ]
            longest = sorted(tally.waited_s.items(), key=lambda item: -item[1])
            waits = ", ".join(f"{reason} {seconds:.3f} s" for reason, seconds in longest)
            lines.append(f"  waited: {waits or 'never'}")
        longest_waits = sorted(self.waited_s.items(), key=lambda item: -item[1])[:NUM_LONGEST]
        if longest_waits:
            each = ", ".join(f"request {request} {seconds:.3f} s" for request, seconds in longest_waits)
            lines.append(f"longest waits: {each}")
        return lines

    def _of(self, request: RequestId) -> TenantTally:
        return self.tenants.setdefault(self._tenant_of.get(request, PUBLIC), TenantTally())

    def _count(self, call: Call) -> None:
        self.num_calls += 1
        if self._before is not None:
            self.seconds += call.now - self._before
        self._before = call.now
        if isinstance(call.message, Submit):
            self._of(call.message.request).submitted += 1
        for run in call.runs:
            self.num_steps += 1
            self.num_failed_steps += bool(run.error)
            self.num_rows += sum(chunk.num_tokens for chunk in run.chunks)
        self.num_failed_steps += sum(bool(result.error) for result in call.results)
        for decision in call.decisions:
            if decision.verb == "preempt":
                self._of(RequestId(decision.request_id)).preemptions += 1
        for message in call.said:
            if isinstance(message, Started):
                tally = self._of(message.request)
                tally.prompt_tokens += message.num_prompt_tokens
                tally.cached_tokens += message.num_cached_tokens
            elif isinstance(message, Done):
                tally = self._of(message.request)
                tally.ended[message.reason.value] += 1
                tally.output_tokens += message.num_output_tokens

    def _count_waits(self, call: Call, core: EngineCore) -> None:
        """Whoever waited after one call waited until the next one, for what it waited for then."""
        if core.scheduler.step >= self._first_step:
            seconds = call.now - self._waits_since
            for request, tenant, reason in self._waits:
                self.waited_s[request] = self.waited_s.get(request, 0.0) + seconds
                self.tenants.setdefault(tenant, TenantTally()).wait(reason, seconds)
        self._waits_since = call.now
        if call.verb == "step" or self._waits:
            self._waits = [
                (request.request_id, request.tenant or PUBLIC, why.value)
                for request, _, why in explain_waiting(core.scheduler.waiting)
            ]


class Life:
    """Follows one request.

    Args:
        request: Which.
        first_step: What lies before is left out.
    """

    def __init__(self, request: RequestId, first_step: int = 0) -> None:
        self._request = request
        self._first_step = first_step
        self._began: float | None = None
        self._last_request = RequestId(0)
        self._now = 0.0
        self._step = 0
        self._lines: list[str] = []
        self._wait: _Wait | None = None
        self._decode_since: int | None = None
        self._num_tokens = 0
        self._launched: list[int] = []

    def see(self, call: Call, core: EngineCore) -> None:
        """Note what a call means for the request."""
        self._began = call.now if self._began is None else self._began
        self._now, self._step = call.now - self._began, core.scheduler.step
        if isinstance(call.message, Submit):
            self._last_request = max(self._last_request, call.message.request)
            if call.message.request == self._request:
                self._see_submit(call.message)
        for decision in call.decisions:
            self._see_decision(decision.verb, decision.request_id, decision.detail)
        for run in call.runs:
            if any(chunk.request == self._request for chunk in run.chunks):
                if run.error:
                    self._say(f"its step failed ({run.error}) and is tried again")
                elif run.output is None:
                    self._launched.append(run.step)
        for result in call.results:
            if result.step in self._launched:
                self._launched.remove(result.step)
                if result.error:
                    self._say(f"its step failed ({result.error}) and is tried again")
        for message in call.said:
            if isinstance(message, Tokens):
                if any(delta.request == self._request for delta in message.deltas):
                    self._see_token()
            elif getattr(message, "request", None) == self._request:
                self._see_message(message)
        if call.verb == "step":
            self._see_wait(core)

    def lines(self) -> list[str]:
        """Return the life as text, one line for each thing that happened."""
        if self._began is None or not self._lines:
            return [f"request {self._request} does not appear; the last one is {self._last_request}"]
        self._end_wait()
        self._end_decode()
        return self._lines

    def _say(self, text: str) -> None:
        if self._step >= self._first_step:
            self._lines.append(f"{self._now:10.3f} s  step {self._step:<6} {text}")

    def _see_submit(self, submit: Submit) -> None:
        self._say(
            f"submitted for {submit.tenant or PUBLIC} as {submit.request_class.value}: {len(submit.new_ids)} tokens"
            f" after {submit.base_len} of lease {submit.lease}, at most {submit.params.max_tokens} tokens of answer"
        )

    def _see_decision(self, verb: str, request: int, detail: tuple[float, ...]) -> None:
        if request != self._request:
            if verb == "preempt" and detail[1:2] == (self._request,):
                self._say(f"request {request} is preempted for it")
            return
        if verb in ("submit", "end"):
            return  # The messages say more.
        self._end_wait()
        self._end_decode()
        if verb == "admit":
            self._say(f"admitted with {int(detail[0])} tokens computed already; its first chunk has {int(detail[1])}")
        elif verb == "preempt":
            computed, winner, num_saved = map(int, detail)
            fate = f"{num_saved} full blocks of them are kept below the pool" if num_saved else "they are given up"
            self._say(f"preempted for request {winner}: it had {computed} computed tokens, and {fate}")
        elif verb == "load":
            self._say(f"loads {int(detail[1])} blocks from below the pool, up to token {int(detail[0])}")
        else:
            self._say(" ".join([verb, *(f"{number:g}" for number in detail)]))

    def _see_message(self, message: object) -> None:
        if isinstance(message, Started):
            self._say(f"started: {message.num_cached_tokens} of {message.num_prompt_tokens} prompt tokens were cached")
        elif isinstance(message, Prefill):
            self._say(f"computed {message.done} of {message.total} tokens")
        elif isinstance(message, Done):
            self._end_wait()
            self._end_decode()
            times = message.timings
            error = f" ({message.error_code}: {message.error_message})" if message.error_code else ""
            self._say(
                f"ended as {message.reason.value}{error} with {message.num_output_tokens} tokens of answer; queued"
                f" {times.queue_s:.3f} s, prefill {times.prefill_s:.3f} s, decode {times.decode_s:.3f} s,"
                f" {times.num_preemptions} preemptions"
            )
        elif type(message).__name__ not in ("Waiting", "Preempted"):
            self._say(type(message).__name__)

    def _see_token(self) -> None:
        if self._decode_since is None:
            self._decode_since = self._step
            self._num_tokens = 0
        self._num_tokens += 1

    def _end_decode(self) -> None:
        if self._decode_since is not None:
            self._say(f"drew {self._num_tokens} tokens from step {self._decode_since} on")
            self._decode_since = None

    def _see_wait(self, core: EngineCore) -> None:
        request = core.scheduler.requests.get(self._request)
        if request is None or request in core.scheduler.running:
            self._end_wait()
            return
        rows = explain_waiting(core.scheduler.waiting)
        mine = next((row for row in rows if row[0] is request), None)
        if mine is None:
            return
        _, place, why = mine
        if self._wait is not None and self._wait.why is not why:
            self._end_wait()
        if self._wait is None:
            self._wait = _Wait(why, place, self._now)
        self._wait.last_place = place

    def _end_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            places = f"place {wait.first_place}"
            if wait.last_place != wait.first_place:
                places += f", then {wait.last_place}"
            waited_s = self._now - wait.since_s
            self._say(f"waited {waited_s:.3f} s for {wait.why.value}, in {places} of its tenant's queue")


@dataclass(slots=True)
class _Wait:
    why: WaitReason
    first_place: int
    since_s: float
    last_place: int = 0
