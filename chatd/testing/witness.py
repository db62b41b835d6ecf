"""A front that believes nothing that an engine core tells it.

Each session's ids are kept here as well. The runner's attention compares its slots with them, every token that arrives
is compared with the one that follows from the ids, and every invariant of the engine is checked after every step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import xxhash

from chatd.engine.core import Decision, EngineConfig, EngineCore, TenantLimits
from chatd.engine.cost_model import CostParameters
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
from chatd.engine.plan import PENDING_TOKEN, BlockId, Plan, RequestId, SampleSpec, StepInFlight, StepOutput
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.engine.transfer_costs import TransferCosts
from chatd.kvcache.block_pool import Account
from chatd.kvcache.leases import LeaseState
from chatd.kvcache.prefix_index import MAX_ENTRIES_PER_KEY, HashFunction
from chatd.testing.disk import FakeDisk
from chatd.testing.engine import (
    EMPTY_PREFIX,
    NAMESPACE,
    POISON,
    FakeClock,
    ProvenanceRunner,
    Truth,
    chains_of,
    extend_chain,
    find_beams,
)
from chatd.testing.fairness_gap import FairnessGap
from chatd.testing.pipelined_runner import PipelinedProvenanceRunner

VOCAB_SIZE = 11
STOP_ID = 0


def constant_hash(data: bytes) -> bytes:
    """Return the same key for everything: the index must still be right."""
    return b"0"


@dataclass(slots=True, eq=False)
class Session:
    """A conversation as the front knows it."""

    lease: LeaseId
    tenant: str
    token_ids: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    job: Job | None = None

    def extend(self, token_ids: list[int]) -> None:
        """Append ids."""
        chain = self.chains[-1] if self.chains else EMPTY_PREFIX
        for token_id in token_ids:
            chain = extend_chain(chain, token_id)
            self.chains.append(chain)
        self.token_ids += token_ids

    def cut(self, length: int) -> None:
        """Forget ids beyond a length."""
        del self.token_ids[length:]
        del self.chains[length:]


@dataclass(slots=True, eq=False)
class Job:
    """A request as the front knows it."""

    request: RequestId
    session: Session
    submit: Submit
    num_prompt: int
    num_answered: int = 0
    may_fail: bool = False
    is_started: bool = False
    trim_to: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How large everything is in one run, and how full.

    Attributes:
        public: The part of sessions that are public.
        backlog: Requests that the first two tenants keep waiting, the one with long answers, the other long prompts;
            then nothing is done that leaves either without, or changes their weights.
        steps_in_flight: 2 plans one step ahead.
        is_eager: Then steps run when they are launched, and not when their result is asked for.
    """

    num_blocks: int = 40
    block_size: int = 4
    max_model_len: int = 72
    max_num_seqs: int = 5
    max_num_batched_tokens: int = 24
    max_leases: int = 14
    max_sessions: int = 10
    tenants: tuple[str, ...] = ("acme", "blue", "crow")
    floors: tuple[int, ...] = (6, 0, 0)
    weights: tuple[float, ...] = (1.0, 2.0, 1.0)
    target_step_s: float = 0.0
    public: float = 0.07
    backlog: int = 0
    host_slots: int = 0
    disk_blocks: int = 0
    disk_queue: int = 256
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    steps_in_flight: Literal[1, 2] = 1
    is_eager: bool = False


@dataclass(slots=True, eq=False)
class _WitnessedStep:
    """A step in flight that is looked at when its result comes."""

    witness: Witness
    plan: Plan
    step: StepInFlight
    block_ids: set[BlockId]
    is_void: bool = False

    def result(self) -> StepOutput:
        return self.witness.take_result(self)


class Witness:
    """An engine core on a provenance runner, and what should be true of it.

    `submit` starts turns, `sample` more answers to the prompt of one, and `submit(beam=…)` searches: every table of a
    beam is checked as any other, and what is found is compared with a search in which no engine takes part.

    Args:
        shape: Sizes.
        hash_function: Of the prefix index.
        keep_log: Keep the decision log, for comparing two runs.

    Attributes:
        sessions: As the front knows them.
        jobs: Requests that have not ended.
        counts: What happened, for tests that ask whether it did.
    """

    def __init__(
        self,
        shape: Shape | None = None,
        hash_function: HashFunction = xxhash.xxh3_128_digest,
        *,
        keep_log: bool = False,
    ) -> None:
        self.shape = shape = shape or Shape()
        self.clock = FakeClock()
        self.log: list[Decision] = []
        self.sessions: list[Session] = []
        self.jobs: dict[RequestId, Job] = {}
        self.counts: Counter[str] = Counter()
        self._ended: set[RequestId] = set()
        self._next_id = 1
        self._plan: Plan | None = None
        self._has_run = False
        self._tainted: list[BlockId] = []
        self._replies: list[FrontMessage] = []
        self.config = EngineConfig(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_model_len=shape.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_leases=shape.max_leases,
            max_waiting=12,
            namespace=NAMESPACE,
            vocab_size=VOCAB_SIZE,
            cost=CostParameters(1e-3, 2e-4, 1e-6),
            target_step_s=shape.target_step_s,
            host_slots=shape.host_slots,
            transfer_costs=TransferCosts(1e-4, 2e-5, 2e-5),
            preemption=shape.preemption,
            steps_in_flight=shape.steps_in_flight,
            tenants={
                name: TenantLimits(weight, floor)
                for name, weight, floor in zip(shape.tenants, shape.weights, shape.floors, strict=True)
            },
        )
        self._hash_function = hash_function
        self._keep_log = keep_log
        self._start()

    def _start(self) -> None:
        """Start an engine that has nothing."""
        shape, hash_function = self.shape, self._hash_function
        self._in_flight: list[_WitnessedStep] = []
        # Steps take other times than the cost model starts with, so that it is fitted meanwhile.
        cost = CostParameters(1.2e-3, 3e-4, 2e-6)
        make_runner = ProvenanceRunner if shape.steps_in_flight == 1 else PipelinedProvenanceRunner
        self.runner = make_runner(
            shape.num_blocks, shape.block_size, VOCAB_SIZE, self._truth, cost, self.clock, shape.host_slots, 1e-5
        )
        if isinstance(self.runner, PipelinedProvenanceRunner):
            self.runner.is_eager = shape.is_eager
        self.disk = FakeDisk(self.runner, shape.disk_blocks, max_queued=shape.disk_queue) if shape.disk_blocks else None
        self.runner.before_write = self._check_write
        self.core = EngineCore(
            self.config,
            self,
            self.clock,
            log=self.log.append if self._keep_log else None,
            disk=self.disk,
            hash_function=hash_function,
            # A constant hash has one key for all; the list under it must not be what limits the hits.
            max_entries_per_key=shape.num_blocks if hash_function is constant_hash else MAX_ENTRIES_PER_KEY,
        )
        self.gap = FairnessGap(self.core)

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

    def count_engine(self) -> None:
        """Add up what the engine has counted in its life."""
        core, counts = self.core, self.counts
        counts["preempted"] += core.scheduler.num_preemptions
        counts["joined"] += core.scheduler.joins.num_joins
        counts["swapped"] += core.scheduler.num_swapped
        counts["evicted"] += core.pool.num_evictions
        counts["from disk"] += 0 if self.disk is None else self.disk.num_loaded

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

    # The runner's place: look at each plan, then pass it on.

    def execute(self, plan: Plan) -> StepOutput:
        """Check a plan as a whole and run it."""
        try:
            return self._execute(plan)
        except AssertionError as error:
            self.runner.violation = error
            raise

    def _execute(self, plan: Plan) -> StepOutput:
        self._check_plan(plan)
        output = self.runner.execute(plan)
        self._check_output(plan, output)
        return output

    def launch(self, plan: Plan) -> StepInFlight:
        """Check a plan as a whole and launch it."""
        assert isinstance(self.runner, PipelinedProvenanceRunner)
        try:
            self._check_plan(plan)
        except AssertionError as error:
            self.runner.violation = error
            raise
        block_ids = {block_id for chunk in plan.chunks for block_id in chunk.block_ids}
        step = _WitnessedStep(self, plan, self.runner.launch(plan), block_ids)
        self.counts["launched ahead"] += bool(self._in_flight)
        self._in_flight.append(step)
        return step

    def take_result(self, step: _WitnessedStep) -> StepOutput:
        """Let a step run that was launched, and check what came of it, if anybody may hear that."""
        self._in_flight.remove(step)
        self._has_run = True
        try:
            for block_id in step.block_ids:
                assert self.core.pool.blocks[block_id].ref_count, f"I2: block {block_id} is free and in use by a plan"
            output = step.step.result()
            if not step.is_void:
                self._check_output(step.plan, output)
        except AssertionError as error:
            self.runner.violation = error
            raise
        except Exception:
            for later in self._in_flight:
                later.is_void = True
            raise
        return output

    def _check_plan(self, plan: Plan) -> None:
        self._plan = plan
        assert plan.chunks or plan.stores or plan.loads, "a step does nothing"
        assert plan.num_tokens <= self.config.max_num_batched_tokens, f"I12: {plan.num_tokens} rows in a step"
        self.counts["moves alone"] += not plan.chunks
        self.counts["stored"] += len(plan.stores)
        self.counts["loaded"] += len(plan.loads)
        ids = [chunk.request_id for chunk in plan.chunks]
        suspects = [i for i in ids if self.core.scheduler.requests[i].is_suspect]
        assert not suspects or len(ids) == 1, f"suspect {suspects[0]} is computed beside others: {ids}"
        self.counts["alone"] += len(suspects)
        assert len(set(ids)) == len(ids), "a request has two chunks in one step"
        for chunk in plan.chunks:
            job = self._job_of(chunk.request_id)
            num_known = len(self._truth(chunk.request_id).chains)
            is_pending = chunk.start == num_known
            assert is_pending == (list(chunk.token_ids) == [PENDING_TOKEN]), f"{chunk} of {num_known} known tokens"
            is_end = chunk.start + chunk.num_tokens == num_known + is_pending
            assert (chunk.sample is not None) == (is_end and not job.submit.compute_only), (
                f"request {chunk.request_id} samples in the middle of its prompt, or not at its end"
            )
            if chunk.sample is not None and job.submit.beam is None:
                self._check_sample(chunk.sample, job, is_pending=is_pending)
        if self.runner.raise_next and len(ids) == 1:
            # A retry that fails as well is a failure of whoever is in it.
            self._job_of(ids[0]).may_fail = True

    def _check_output(self, plan: Plan, output: StepOutput) -> None:
        self.gap.count_step(plan, output)
        self._check_loads()
        self._tainted += [
            block_id
            for chunk in plan.chunks
            if chunk.request_id in output.failed and chunk.request_id in self.core.scheduler.requests
            for block_id in chunk.block_ids
        ]

    def _check_sample(self, sample: SampleSpec, job: Job, *, is_pending: bool) -> None:
        """Compare what a token is drawn by with the answer that it is for, also where that goes on from another run."""
        ids, at = job.session.token_ids, job.num_prompt
        number = len(ids) - at + is_pending
        assert sample.output_position == number, f"I21: request {job.request} draws number {sample.output_position}"
        is_short = number < sample.params.min_tokens
        assert bool(sample.stop_token_ids) == (is_short and bool(sample.params.stop_token_ids)), "min_tokens is wrong"
        if sample.params.needs_history:
            history = (list(sample.prompt_ids), list(sample.output_ids))
            assert history == (ids[:at], ids[at:]), f"I21: request {job.request} is penalized for another history"

    def _check_loads(self) -> None:
        """Compare what was loaded with what its request should have there."""
        runner, size = self.runner, self.shape.block_size
        for draft in next(iter(self.core.scheduler.flights)).drafts.values():
            if not draft.loads or draft.is_void:
                continue
            truth = self._truth(draft.request.request_id)
            for place in range(draft.start // size - len(draft.loads), draft.start // size):
                block_id = draft.request.lease.table.block_ids[place]
                chains = runner.chains[block_id * size : (block_id + 1) * size]
                assert chains == truth.chains[place * size : (place + 1) * size], (
                    f"I10: {draft.request} loads another prefix's KV into block {block_id}"
                )
                owner = runner.tenants[block_id * size]
                assert owner in (None, truth.tenant), f"I9: {draft.request} of {truth.tenant} loads KV of {owner}"

    def _job_of(self, request_id: RequestId) -> Job:
        """Return the job of a request, or the one for which a beam is computed."""
        request = self.core.scheduler.requests[request_id]
        return self.jobs[request_id if request.group is None else request.group.head.request_id]

    def _truth(self, request_id: RequestId) -> Truth:
        job = self._job_of(request_id)
        session = job.session
        if job.submit.beam is None:
            return Truth(session.tenant or None, session.chains)
        # What a beam goes on with is the engine's to say; whether that was right shows when the search is over.
        ids = self.core.scheduler.requests[request_id].lease.token_ids
        assert list(ids[: job.num_prompt]) == session.token_ids, f"beam {request_id} has another prompt"
        return Truth(session.tenant or None, chains_of(ids))

    def _check_write(self, block_id: BlockId) -> None:
        block = self.core.pool.blocks[block_id]
        assert block.entry is None, f"I4: registered {block} is written"
        assert block.ref_count == 1, f"I4: shared {block} is written"

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

    # What is checked from outside.

    def _poison(self) -> None:
        """Make every slot unreadable that holds no token of anybody."""
        runner, size, pool = self.runner, self.shape.block_size, self.core.pool
        for block_id, state in enumerate(pool.states):
            if not state and runner.chains[block_id * size] != POISON:
                runner.poison(block_id)
        for lease in self.core.leases:
            table = lease.table
            offset = table.num_computed_tokens % size
            is_over = lease.state is not LeaseState.ACTIVE
            if self.core.kv.is_in_flight(table) and (is_over or self.shape.is_eager):
                continue  # A row of a turn that was cut reads what is beyond; or what follows is written already.
            if offset:
                block = pool.blocks[table.block_ids[-1]]
                is_own = block.ref_count == 1 and block.entry is None
                if is_own and runner.chains[block.block_id * size + offset] != POISON:
                    runner.poison(block.block_id, offset)

    def _protected(self) -> list[tuple[Account, int, list[int]]]:
        """Return the blocks that a step must leave to the tenants that do nothing in it, and their leases."""
        pool = self.core.pool
        if pool.public.num_resident:
            return []  # What hangs on a public block goes with it.
        busy = {job.session.tenant for job in self.jobs.values()}
        # Blocks without a token go when the step ends that had a row for somebody who has ended.
        for flight in self.core.scheduler.flights:
            busy |= {draft.request.tenant or "" for draft in flight.drafts.values()}
        floored = [account for account in pool.accounts if account.floor and account.tenant not in busy]
        leases: dict[str | None, list[int]] = {}
        if floored:
            for lease in self.core.leases:
                leases.setdefault(lease.tenant, []).append(lease.lease_id)
        return [(a, min(a.floor, a.num_resident), leases.get(a.tenant, [])) for a in floored]

    def _compare_ids(self) -> None:
        for session in self.sessions:
            lease = self.core.leases.get(session.lease)
            is_searching = session.job is not None and session.job.submit.beam is not None
            if lease is not None and not is_searching:
                assert list(lease.token_ids) == session.token_ids, f"I25: lease {session.lease} holds other ids"
