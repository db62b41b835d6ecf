"""A front that believes nothing that an engine core tells it.

Each session's ids are kept here as well. The runner's attention compares its slots with them, every token that arrives
is compared with the one that follows from the ids, and every invariant of the engine is checked after every step.
"""

from __future__ import annotations

import msgspec
import xxhash

from chatd.engine.messages import (
    Beams,
    Cancel,
    Done,
    EngineMessage,
    Finish,
    FinishReason,
    Fork,
    FrontMessage,
    LeaseId,
    LeaseLost,
    PoolFrame,
    Release,
    RequestClass,
    SetTenant,
    Started,
    Submit,
    Tokens,
    Trim,
)
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.kvcache.prefix_index import HashFunction
from chatd.testing.engine import find_beams
from chatd.testing.witnessed_engine import WitnessedEngine
from chatd.testing.witnessed_sessions import Job, Session, Shape


class Witness(WitnessedEngine):
    """The front of a witnessed engine: asks it, and compares what it says with what it must say.

    `submit` starts turns, `sample` more answers to the prompt of one, and `submit(beam=…)` searches: every table of a
    beam is checked as any other, and what is found is compared with a search in which no engine takes part.

    Args:
        shape: Sizes.
        hash_function: Of the prefix index.
        keep_log: Keep the decision log, for comparing two runs.
    """

    def __init__(
        self,
        shape: Shape | None = None,
        hash_function: HashFunction = xxhash.xxh3_128_digest,
        *,
        keep_log: bool = False,
    ) -> None:
        self._ended: set[RequestId] = set()
        self._next_id = 1
        self._replies: list[FrontMessage] = []
        super().__init__(shape, hash_function, keep_log=keep_log)

    def die(self) -> None:
        """Lose the engine with all that it held, and have another one go on with each answer where it was.

        What the old one has said was heard; it may be in the middle of a step.
        """
        self.count_engine()
        self._start()
        self.counts["died"] += 1
        jobs = list(self.jobs.values())
        self.jobs.clear()
        for job in jobs:
            session = job.session
            request = RequestId(self._next_id)
            self._next_id += 1
            job.num_answered = len(session.token_ids) - job.num_prompt
            self.counts["went on"] += job.num_answered > 0
            job.submit = msgspec.structs.replace(
                job.submit,
                request=request,
                base_len=0,
                new_ids=list(session.token_ids),
                sample_of=None,
                num_answered=job.num_answered,
                is_suspect=job.is_started,
            )
            job.request, job.is_started = request, False
            self.jobs[request] = job
            self.send(job.submit)
            if job.trim_to is not None and session.job is job:
                self.send(Trim(session.lease, job.trim_to))

    # What a front does.

    def send(self, message: FrontMessage) -> None:
        """Hand the engine a message."""
        if isinstance(message, SetTenant):
            self.gap.restart()
        self.hear(self.core.handle(message, self.clock.now))

    def open_session(self, tenant: str) -> Session:
        """Return a new, empty session of a tenant; "" is the public one."""
        session = Session(self._new_lease(), tenant)
        self.sessions.append(session)
        return session

    def submit(
        self,
        session: Session,
        base_len: int,
        new_ids: list[int],
        params: SamplingParams,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        *,
        keep_lease: bool = True,
        sample_of: RequestId | None = None,
        compute_only: bool = False,
        beam: BeamSearch | None = None,
    ) -> Job:
        """Start a turn of an idle session; what does not fit is shortened until it does.

        Args:
            session: Idle.
            base_len: What the lease keeps.
            new_ids: Appended.
            params: How tokens are drawn.
            request_class: Its place in the schedule.
            keep_lease: As in `Submit`.
            compute_only: As in `Submit`.
            sample_of: A request whose prompt this may be another sample of. `sample` makes the sessions too.
            beam: Search; what is found is compared with a search that no engine takes part in.
        """
        if base_len + len(new_ids) + 1 > self.config.max_model_len:
            base_len, new_ids = 0, new_ids[: self.shape.block_size] or [1]
        request = RequestId(self._next_id)
        self._next_id += 1
        submit = Submit(
            request,
            session.lease,
            session.tenant,
            base_len,
            new_ids,
            params,
            request_class,
            keep_lease,
            sample_of=sample_of,
            compute_only=compute_only,
            beam=beam,
        )
        session.cut(base_len)
        session.extend(new_ids)
        session.job = job = Job(request, session, submit, len(session.token_ids))
        self.jobs[request] = job
        self.counts["submitted"] += 1
        self.send(submit)
        return job

    def sample(self, job: Job, num_more: int, params: SamplingParams) -> list[Job]:
        """Draw more answers to the prompt of a job that was just submitted, each in a fork of its session.

        What the lease had before this turn is shared by `Fork`; the rest of the prompt is sent with each, as a front
        does that wants `n` choices.
        """
        session, at = job.session, job.submit.base_len
        new_ids = session.token_ids[at : job.num_prompt]
        jobs = []
        for _ in range(num_more):
            fork = self.fork(session, at)
            jobs.append(self.submit(fork, at, new_ids, params, job.submit.request_class, sample_of=job.request))
            self.counts["sampled"] += 1
        return jobs

    def fork(self, session: Session, at: int) -> Session:
        """Fork a session, idle or not."""
        fork = Session(self._new_lease(), session.tenant, session.token_ids[:at], session.chains[:at])
        self.sessions.append(fork)
        self.send(Fork(session.lease, fork.lease, at))
        self.counts["forked"] += 1
        return fork

    def trim(self, session: Session, length: int) -> None:
        """Cut a session; one that is busy is cut when its turn has ended."""
        job = session.job
        if job is None:
            session.cut(length)
        else:
            job.trim_to = length if job.trim_to is None else min(length, job.trim_to)
            self.counts["trimmed busy"] += 1
        self.send(Trim(session.lease, length))

    def cancel(self, job: Job) -> None:
        """Cancel a request, twice."""
        self.send(Cancel(job.request))
        self.send(Cancel(job.request))
        self.counts["cancelled"] += 1

    def finish_at(self, job: Job, length: int) -> None:
        """End a request where its answer is said to end, twice."""
        job.session.cut(length)
        self.send(Finish(job.request, job.session.lease, length))
        self.send(Finish(job.request, job.session.lease, length))
        self.counts["finished"] += 1

    def release(self, session: Session) -> None:
        """Release a session, idle or not, twice."""
        self.sessions.remove(session)
        self.send(Release(session.lease))
        self.send(Release(session.lease))

    def ask_in_vain(self, submit: Submit, code: str) -> None:
        """Submit what must be refused at once."""
        said = self.core.handle(submit, self.clock.now)
        ends = [(end.request, end.reason, end.error_code) for end in said if isinstance(end, Done)]
        expected = [(submit.request, FinishReason.FAILED, code)]
        assert ends == expected, f"I19: {submit} was answered with {said}"
        self.hear([message for message in said if not isinstance(message, Done)])

    def _new_lease(self) -> LeaseId:
        self._next_id += 1
        return LeaseId(self._next_id)

    # A step.

    def drain(self) -> None:
        """Let everything come to its end, and check that nothing is left over."""
        self.runner.failing.clear()
        self.runner.not_finite.clear()
        self.runner.max_rows = None
        for _ in range(100_000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.jobs, f"I13: {sorted(self.jobs)} never ended"
        for session in list(self.sessions):
            self.send(Release(session.lease))
        self.sessions.clear()
        self.core.check_invariants()
        if self.core.has_work:  # A step in flight that nobody wants any more.
            self.step()
        assert self.core.pool.num_active == 0, "I18: blocks are held by nobody"
        assert not len(self.core.leases), "a lease is left over"

    def step(self) -> None:
        """Run one step of the engine and check everything."""
        core = self.core
        waited, ran = len(core.scheduler.waiting), len(core.scheduler.running)
        self._plan, self._has_run = None, False
        self._tainted = []
        self.counts["steps"] += 1
        floors = self._protected()
        said = core.step(self.clock.now)
        if self.runner.violation is not None:
            raise self.runner.violation
        for block_id in self._tainted:
            block = core.pool.blocks[block_id]
            assert block.entry is None or block.account is core.pool.public, (
                f"S7: {block} may hold NaN and can be found"
            )
        for account, least, leases in floors:
            # A lease that is forgotten since there are too many leaves what can be found of it to the cache: less than
            # its full blocks where it hung on a public block that has gone.
            if all(core.leases.get(lease_id) is not None for lease_id in leases):
                assert account.num_resident >= least, f"{account.tenant} was taken below its floor by others"
            self.counts["floors held"] += account.num_resident <= account.floor
        if waited and not ran:
            moved = self._plan is not None or self._has_run or any(isinstance(message, Done) for message in said)
            moved |= core.scheduler.moves.num_restoring > 0
            assert moved, "I14: work waits, nothing runs, and the step did nothing"
        if not core.has_work:
            said += core.idle(self.clock.now)
        self.hear(said)
        core.check_invariants()
        self.gap.check()
        self._poison()
        if self.counts["steps"] % 8 == 0:
            self._compare_ids()

    # What the front hears.

    def hear(self, said: list[EngineMessage]) -> None:
        """Compare messages with what they must say."""
        for message in said:
            if isinstance(message, Tokens):
                for delta in message.deltas:
                    self._hear_token(delta.request, delta.ids)
            elif isinstance(message, Started):
                job = self.jobs[message.request]
                assert not job.is_started, f"request {message.request} started twice"
                job.is_started = True
                assert message.num_prompt_tokens == job.num_prompt, f"request {message.request} has another prompt"
                most = job.num_prompt - (not job.submit.compute_only and not job.num_answered)
                assert 0 <= message.num_cached_tokens <= most, "I8: all was cached"
                self.counts["prompt_tokens"] += message.num_prompt_tokens
                self.counts["cached_tokens"] += message.num_cached_tokens
            elif isinstance(message, Beams):
                self._hear_beams(message)
            elif isinstance(message, Done):
                self._hear_end(message)
            elif isinstance(message, PoolFrame):
                self._hear_frame(message)
            elif isinstance(message, LeaseLost):
                self.counts["lost"] += 1
                job = self.jobs[message.request]
                whole = list(job.session.token_ids)
                job.submit = msgspec.structs.replace(job.submit, base_len=0, new_ids=whole)
                self._replies.append(job.submit)
        while self._replies:
            self.send(self._replies.pop(0))

    def _hear_token(self, request: RequestId, ids: list[int]) -> None:
        job = self.jobs[request]
        session = job.session
        for token_id in ids:
            expected = self.runner.next_token(session.chains[-1])
            assert token_id == expected, f"I20: request {request} drew {token_id}, its prefix gives {expected}"
            session.extend([token_id])
        self.counts["output_tokens"] += len(ids)

    def _hear_frame(self, frame: PoolFrame) -> None:
        assert frame.num_free + frame.num_cached + frame.num_active == frame.num_blocks, "I1: a frame does not add up"
        pool = self.core.pool
        if frame.states:
            assert frame.states == pool.states, "a frame shows another pool"
            counted = [frame.states.count(state) for state in range(4)]
            told = [frame.num_free, frame.num_cached, frame.num_active - frame.num_shared, frame.num_shared]
            assert counted == told, f"a frame's map counts {counted}, its numbers are {told}"
        for row, account in zip(frame.tenants, pool.accounts, strict=True):
            assert (row.tenant, row.num_active) == (account.tenant, account.num_active), "a frame's rows are wrong"
        self.counts["frames"] += 1

    def _hear_beams(self, message: Beams) -> None:
        job = self.jobs[message.request]
        search, params, session = job.submit.beam, job.submit.params, job.session
        assert search is not None, f"request {message.request} found beams and did not search"
        expected = find_beams(self.runner, session.token_ids, search, params, self.config.max_model_len)
        found = [(tuple(sequence.ids), sequence.score) for sequence in message.sequences]
        assert found == expected, f"I20: search {message.request} found {found}, not {expected}"
        session.extend(list(found[0][0]))
        self.counts["searched"] += 1

    def _hear_end(self, done: Done) -> None:
        assert done.request >= 0, f"the end of beam {done.request} was told"
        assert done.request not in self._ended, f"I13: request {done.request} ended twice"
        self._ended.add(done.request)
        job = self.jobs.pop(done.request)
        session = job.session
        self.runner.failing.discard(done.request)
        self.runner.not_finite.discard(done.request)
        self.counts[f"end {done.reason}"] += 1
        if done.error_code == "context_length_exceeded":
            # The others' floors were raised since the sizes of this run were chosen.
            usable = self.core.pool.usable_blocks(session.tenant or None) * self.shape.block_size
            assert job.num_prompt + job.num_answered + 1 > usable, f"request {done.request} was refused and fits"
        if done.error_code in ("unavailable", "context_length_exceeded"):
            # Nothing of the submission was done; the lease still has what this turn would have replaced.
            session.cut(job.submit.base_len)
            if job.is_started and job.trim_to is not None:
                session.cut(job.trim_to)  # A search that had begun: its lease is cut as at any end.
            self._replies.append(Trim(session.lease, job.submit.base_len))
        else:
            assert done.num_output_tokens == len(session.token_ids) - job.num_prompt, "I17: usage is not what was kept"
            self._check_reason(done, job)
            if job.trim_to is not None:
                session.cut(job.trim_to)
        session.job = None
        is_gone = self.core.leases.get(session.lease) is None
        if is_gone and session in self.sessions:
            self.sessions.remove(session)

    def _check_reason(self, done: Done, job: Job) -> None:
        params, ids = job.submit.params, job.session.token_ids
        answer = ids[job.num_prompt :]
        stops = [
            n for n, token_id in enumerate(answer, 1) if token_id in params.stop_token_ids and n > params.min_tokens
        ]
        match done.reason:
            case FinishReason.STOP:
                assert stops == [len(answer)], f"request {done.request} went on after its stop id"
            case FinishReason.MAX_OUTPUT_TOKENS:
                assert len(answer) == params.max_tokens, f"request {done.request} has {len(answer)} tokens"
            case FinishReason.CONTEXT:
                assert len(ids) == self.config.max_model_len, f"request {done.request} ended at {len(ids)}"
            case FinishReason.COMPUTED:
                assert job.submit.compute_only and not answer, f"request {done.request} only computed its prompt"  # noqa: PT018
                length = len(ids) if job.trim_to is None else min(len(ids), job.trim_to)
                held = -(-length // self.shape.block_size) if job.submit.keep_lease else 0
                assert done.num_blocks == held, f"request {done.request} left {done.num_blocks} blocks of {held}"
            case FinishReason.FAILED:
                assert job.may_fail, f"request {done.request} failed with nothing wrong: {done.error_message}"
            case FinishReason.KV_EXHAUSTED:
                self.counts["exhausted"] += 1
            case _:
                pass
        assert len(stops) <= 1, f"request {done.request} passed a stop id"
        assert not stops or done.reason in (
            FinishReason.STOP,
            FinishReason.STOP_STRING,
        ), f"request {done.request} has a stop id and ended as {done.reason}"

    def _compare_ids(self) -> None:
        for session in self.sessions:
            lease = self.core.leases.get(session.lease)
            is_searching = session.job is not None and session.job.submit.beam is not None
            if lease is not None and not is_searching:
                assert list(lease.token_ids) == session.token_ids, f"I25: lease {session.lease} holds other ids"
