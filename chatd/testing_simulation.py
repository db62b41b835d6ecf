"""A front that asks an engine core for everything at once, at random, and believes nothing that it is told.

Each session's ids are kept here as well. The runner's attention compares its slots with them, every token that arrives
is compared with the one that follows from the ids, and every invariant of the engine is checked after every step. A
seed replays a run.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import xxhash

from chatd.engine.core import Decision, EngineConfig, EngineCore, TenantLimits
from chatd.engine.cost_model import CostParameters
from chatd.engine.messages import (
    Cancel,
    Done,
    EngineMessage,
    Finish,
    FinishReason,
    Fork,
    FrontMessage,
    LeaseId,
    LeaseLost,
    Release,
    RequestClass,
    Retain,
    Started,
    Submit,
    Tokens,
    Trim,
    WatchPool,
)
from chatd.engine.plan import BlockId, Plan, RequestId, StepOutput
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.prefix_index import HashFunction
from chatd.testing import NAMESPACE, POISON, FakeClock, ProvenanceRunner, Truth, extend_chain

VOCAB_SIZE = 11
STOP_ID = 0
_FIRST_CHAIN = 0x9E3779B97F4A7C15


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
        chain = self.chains[-1] if self.chains else _FIRST_CHAIN
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
    may_fail: bool = False
    is_started: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """How large everything is in one run, and how full."""

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


SHAPES = (
    Shape(),
    Shape(num_blocks=26, max_model_len=80, max_num_seqs=4, max_leases=8, max_sessions=12),
    Shape(num_blocks=90, block_size=1, max_model_len=60, max_num_batched_tokens=9, floors=(20, 10, 0)),
    Shape(num_blocks=64, block_size=3, max_num_seqs=12, max_num_batched_tokens=64, max_sessions=14, max_leases=20),
    Shape(num_blocks=14, block_size=8, max_num_seqs=3, floors=(2, 2, 2), weights=(1.0, 1.0, 4.0)),
    Shape(num_blocks=40, tenants=("acme",), floors=(0,), weights=(1.0,), max_num_batched_tokens=128),
)


class Simulation:
    """One seeded run.

    Args:
        seed: Of everything random.
        shape: Sizes.
        hash_function: Of the prefix index.
        keep_log: Keep the decision log, for comparing two runs.
        faults: Steps fail and logits are not finite now and then.
    """

    def __init__(
        self,
        seed: int,
        shape: Shape | None = None,
        hash_function: HashFunction = xxhash.xxh3_128_digest,
        *,
        keep_log: bool = False,
        faults: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.shape = shape or Shape()
        self.clock = FakeClock()
        self.faults = faults
        self.log: list[Decision] = []
        self.sessions: list[Session] = []
        self.jobs: dict[RequestId, Job] = {}
        self.counts: Counter[str] = Counter()
        self._ended: set[RequestId] = set()
        self._next_id = 1
        self._plan: Plan | None = None
        shape = self.shape
        cost = CostParameters(1e-3, 2e-4, 1e-6)
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
            cost=cost,
            tenants={
                name: TenantLimits(weight, floor)
                for name, weight, floor in zip(shape.tenants, shape.weights, shape.floors, strict=True)
            },
        )
        self.runner = ProvenanceRunner(
            shape.num_blocks, shape.block_size, VOCAB_SIZE, self._truth, CostParameters(1.2e-3, 3e-4, 2e-6), self.clock
        )
        self.core = EngineCore(
            self.config,
            self,
            self.clock,
            log=self.log.append if keep_log else None,
            hash_function=hash_function,
            # A constant hash has one key for all; the list under it must not be what limits the hits.
            max_entries_per_key=8 if hash_function is not constant_hash else shape.num_blocks,
        )
        self.runner.before_write = self._check_write
        size = shape.block_size
        fixed = random.Random(7)
        self._systems = [[fixed.randrange(VOCAB_SIZE) for _ in range(n)] for n in (3 * size, 3 * size + 1, 5 * size - 1)]
        lengths = (1, 1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 4 * size + 1)
        self._messages = [[fixed.randrange(VOCAB_SIZE) for _ in range(max(1, n))] for n in lengths]

    # The runner's place: look at each plan, then pass it on.

    def execute(self, plan: Plan) -> StepOutput:
        """Check a plan as a whole and run it."""
        self._plan = plan
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens, f"I12: {plan.num_tokens} rows in a step"
        ids = [chunk.request_id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids), "a request has two chunks in one step"
        for chunk in plan.chunks:
            assert (chunk.sample is not None) == (
                chunk.start + chunk.num_tokens == len(self.jobs[chunk.request_id].session.token_ids)
            ), f"request {chunk.request_id} samples in the middle of its prompt, or not at its end"
        if self.runner.raise_next:
            # A retry that fails as well is a failure of whoever is in it.
            self.jobs[ids[-1]].may_fail |= len(ids) == 1
        return self.runner.execute(plan)

    def _truth(self, request_id: RequestId) -> Truth:
        session = self.jobs[request_id].session
        return Truth(session.tenant or None, session.chains)

    def _check_write(self, block_id: BlockId) -> None:
        block = self.core.pool.blocks[block_id]
        assert block.entry is None, f"I4: registered {block} is written"
        assert block.ref_count == 1, f"I4: shared {block} is written"

    # One step of the run.

    def run(self, num_steps: int) -> None:
        """Act and step so many times."""
        for _ in range(num_steps):
            for _ in range(self.rng.choice((0, 0, 1, 1, 2, 4))):
                self.act()
            self.step()

    def finish(self) -> None:
        """Let everything come to its end, and check that nothing is left over."""
        self.runner.failing.clear()
        self.runner.not_finite.clear()
        for _ in range(100_000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.jobs, f"I13: {sorted(self.jobs)} never ended"
        for session in list(self.sessions):
            self.send(Release(session.lease))
        self.sessions.clear()
        self.core.check_invariants()
        assert self.core.pool.num_active == 0, "I18: blocks are held by nobody"
        assert not len(self.core.leases), "a lease is left over"

    def step(self) -> None:
        """Run one step of the engine and check everything."""
        core = self.core
        waited, ran = len(core.scheduler.waiting), len(core.scheduler.running)
        self._plan = None
        self.counts["steps"] += 1
        said = core.step(self.clock.now)
        if waited and not ran:
            moved = self._plan is not None or any(isinstance(message, Done) for message in said)
            assert moved, "I14: work waits, nothing runs, and the step did nothing"
        self.hear(said)
        self.clock.advance(self.rng.random() * 0.01)
        core.check_invariants()
        self._poison()
        if self.counts["steps"] % 8 == 0:
            self._compare_ids()

    def act(self) -> None:
        """Ask the engine for something."""
        rng = self.rng
        idle = [session for session in self.sessions if session.job is None]
        busy = list(self.jobs.values())
        dice = rng.random()
        if dice < 0.22 or not self.sessions:
            if len(self.sessions) < self.shape.max_sessions:
                self._open()
        elif dice < 0.55 and idle:
            self._turn(rng.choice(idle))
        elif dice < 0.63:
            self._fork(rng.choice(self.sessions))
        elif dice < 0.68 and idle:
            session = rng.choice(idle)
            length = rng.randrange(len(session.token_ids) + 2)
            self.send(Trim(session.lease, length))
            session.cut(length)
        elif dice < 0.74 and busy:
            job = rng.choice(busy)
            self.send(Cancel(job.request))
            self.send(Cancel(job.request))
            self.counts["cancelled"] += 1
        elif dice < 0.80 and busy:
            self._finish(rng.choice(busy))
        elif dice < 0.85 and len(self.sessions) > 3:
            self._release(rng.choice(self.sessions))
        elif dice < 0.88 and self.faults:
            self._break()
        elif dice < 0.96:
            self._misbehave()
        elif dice < 0.98:
            session = rng.choice(self.sessions)
            self.send(Retain(session.lease, rng.random() < 0.5))
        else:
            self.send(WatchPool(rng.choice((0.0, 0.01)), rng.random() < 0.5, rng.random() < 0.5))

    def send(self, message: FrontMessage) -> None:
        """Hand the engine a message."""
        self.hear(self.core.handle(message, self.clock.now))

    # What the front asks.

    def _open(self) -> None:
        rng = self.rng
        tenant = rng.choice(self.shape.tenants) if rng.random() < 0.93 else ""
        session = Session(self._new_lease(), tenant)
        self.sessions.append(session)
        system = rng.choice(self._systems)
        self._submit(session, 0, system if not tenant else system + self._message())

    def _turn(self, session: Session) -> None:
        rng = self.rng
        length = len(session.token_ids)
        base_len = length if rng.random() < 0.8 else rng.randrange(length + 1)
        new_ids = self._message() if rng.random() < 0.9 or not base_len else []
        self._submit(session, base_len, new_ids)

    def _message(self) -> list[int]:
        if self.rng.random() < 0.7:
            return list(self.rng.choice(self._messages))
        size = self.shape.block_size
        length = max(1, self.rng.choice((1, 2, 3)) * size + self.rng.choice((-1, 0, 1)))
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(length)]

    def _submit(self, session: Session, base_len: int, new_ids: list[int]) -> None:
        rng = self.rng
        if base_len + len(new_ids) + 1 > self.config.max_model_len:
            base_len, new_ids = 0, new_ids[: self.shape.block_size] or [1]
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 9, 17, 40)),
            stop_token_ids=(STOP_ID,) if rng.random() < 0.6 else (),
            min_tokens=rng.choice((0, 0, 1)),
        )
        request = RequestId(self._next_id)
        self._next_id += 1
        request_class = rng.choice(list(RequestClass))
        submit = Submit(
            request, session.lease, session.tenant, base_len, new_ids, params, request_class, rng.random() < 0.9
        )
        session.cut(base_len)
        session.extend(new_ids)
        job = Job(request, session, submit, len(session.token_ids))
        self.jobs[request] = session_job = job
        session.job = session_job
        self.counts["submitted"] += 1
        self.send(submit)

    def _fork(self, session: Session) -> None:
        if len(self.sessions) >= self.shape.max_sessions:
            return
        at = self.rng.randrange(len(session.token_ids) + 1)
        fork = Session(self._new_lease(), session.tenant, session.token_ids[:at], session.chains[:at])
        self.sessions.append(fork)
        self.send(Fork(session.lease, fork.lease, at))
        self.counts["forked"] += 1

    def _finish(self, job: Job) -> None:
        session = job.session
        length = self.rng.randint(job.num_prompt, len(session.token_ids))
        session.cut(length)
        self.send(Finish(job.request, session.lease, length))
        self.send(Finish(job.request, session.lease, length))
        self.counts["finished"] += 1

    def _release(self, session: Session) -> None:
        self.sessions.remove(session)
        self.send(Release(session.lease))
        self.send(Release(session.lease))

    def _break(self) -> None:
        dice = self.rng.random()
        jobs = list(self.jobs.values())
        if dice < 0.4 or not jobs:
            self.runner.raise_next = True
            return
        job = self.rng.choice(jobs)
        job.may_fail = True
        (self.runner.failing if dice < 0.7 else self.runner.not_finite).add(job.request)

    def _misbehave(self) -> None:
        """Ask for what must be refused at once, and change nothing."""
        session = self.rng.choice(self.sessions)
        request, job = RequestId(self._next_id), session.job
        self._next_id += 1
        length = len(session.token_ids)
        params = SamplingParams(max_tokens=2)
        kind = self.rng.randrange(4)
        if kind == 0:
            ids = [1] * (self.config.max_model_len - self.rng.randrange(1))
            submit, code = Submit(request, self._new_lease(), session.tenant, 0, ids, params), "context_length_exceeded"
        elif kind == 1 and job is not None:
            submit, code = Submit(request, session.lease, session.tenant, length, [1], params), "conflict"
        elif kind == 2:
            if self.core.leases.get(session.lease) is None:
                return
            submit, code = Submit(request, session.lease, "nobody", 0, [1], params), "not_found"
        else:
            ids = [VOCAB_SIZE] if self.rng.random() < 0.5 else []
            submit, code = Submit(request, self._new_lease(), session.tenant, 0, ids, params), "invalid_request"
        said = self.core.handle(submit, self.clock.now)
        ends = [message for message in said if isinstance(message, Done)]
        assert [(end.request, end.reason, end.error_code) for end in ends] == [
            (request, FinishReason.FAILED, code)
        ], f"I19: {submit} was answered with {said}"
        self.hear([message for message in said if not isinstance(message, Done)])

    def _new_lease(self) -> LeaseId:
        self._next_id += 1
        return LeaseId(self._next_id)

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
                assert 0 <= message.num_cached_tokens < message.num_prompt_tokens == job.num_prompt, "I8: all was cached"
                self.counts["prompt_tokens"] += message.num_prompt_tokens
                self.counts["cached_tokens"] += message.num_cached_tokens
            elif isinstance(message, Done):
                self._hear_end(message)
            elif isinstance(message, LeaseLost):
                job = self.jobs[message.request]
                self.counts["lost"] += 1
                whole = job.session.token_ids
                job.submit = Submit(
                    message.request, message.lease, job.session.tenant, 0, list(whole), job.submit.params
                )
                self.send(job.submit)

    def _hear_token(self, request: RequestId, ids: list[int]) -> None:
        job = self.jobs[request]
        session = job.session
        for token_id in ids:
            expected = self.runner.next_token(session.chains[-1])
            assert token_id == expected, f"I20: request {request} drew {token_id}, its prefix gives {expected}"
            session.extend([token_id])
        self.counts["output_tokens"] += len(ids)

    def _hear_end(self, done: Done) -> None:
        assert done.request not in self._ended, f"I13: request {done.request} ended twice"
        self._ended.add(done.request)
        job = self.jobs.pop(done.request)
        session = job.session
        self.runner.failing.discard(done.request)
        self.runner.not_finite.discard(done.request)
        self.counts[f"end {done.reason}"] += 1
        if done.error_code == "unavailable":
            session.cut(job.submit.base_len)
        else:
            assert done.num_output_tokens == len(session.token_ids) - job.num_prompt, "I17: usage is not what was kept"
            self._check_reason(done, job)
        session.job = None
        if (not job.submit.keep_lease or done.error_code == "unavailable") and session in self.sessions:
            if not job.submit.keep_lease:
                self.sessions.remove(session)
            elif self.core.leases.get(session.lease) is None:
                self.sessions.remove(session)

    def _check_reason(self, done: Done, job: Job) -> None:
        params, ids = job.submit.params, job.session.token_ids
        answer = ids[job.num_prompt :]
        stops = [n for n, token_id in enumerate(answer, 1) if token_id in params.stop_token_ids and n > params.min_tokens]
        match done.reason:
            case FinishReason.STOP:
                assert stops == [len(answer)], f"request {done.request} went on after its stop id"
            case FinishReason.MAX_OUTPUT_TOKENS:
                assert len(answer) == params.max_tokens, f"request {done.request} has {len(answer)} tokens"
            case FinishReason.CONTEXT:
                assert len(ids) == self.config.max_model_len, f"request {done.request} ended at {len(ids)}"
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
            if offset:
                block = pool.blocks[table.block_ids[-1]]
                if block.ref_count == 1 and block.entry is None:
                    if runner.chains[block.block_id * size + offset] != POISON:
                        runner.poison(block.block_id, offset)

    def _compare_ids(self) -> None:
        for session in self.sessions:
            lease = self.core.leases.get(session.lease)
            if lease is not None:
                assert list(lease.token_ids) == session.token_ids, f"I25: lease {session.lease} holds other ids"


def simulate(seed: int, num_steps: int, **options: Any) -> Simulation:
    """Run a simulation to its end and return it."""
    simulation = Simulation(seed, **options)
    simulation.run(num_steps)
    simulation.finish()
    return simulation
