"""Everything at once, at random: a witness that is told by a seed what to ask an engine core for."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import xxhash

from chatd.engine.messages import Ping, PoolFrame, RequestClass, Retain, SetTenant, Submit, WatchPool
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.kvcache.prefix_index import HashFunction
from chatd.testing.pipelined_runner import PipelinedProvenanceRunner
from chatd.testing.witness import Witness
from chatd.testing.witnessed_sessions import STOP_ID, VOCAB_SIZE, Job, Session, Shape

SHAPES = (
    Shape(),
    Shape(num_blocks=26, max_model_len=80, max_num_seqs=4, max_leases=8, max_sessions=12, public=0.0),
    Shape(num_blocks=90, block_size=1, max_model_len=60, max_num_batched_tokens=9, floors=(20, 10, 0)),
    Shape(num_blocks=64, block_size=3, max_num_seqs=12, max_num_batched_tokens=64, max_sessions=14, max_leases=20),
    Shape(num_blocks=14, block_size=8, max_num_seqs=3, floors=(2, 2, 2), weights=(1.0, 1.0, 4.0), public=0.0),
    Shape(num_blocks=60, max_num_batched_tokens=128, max_num_seqs=16, max_sessions=20, max_leases=24),
    Shape(num_blocks=40, tenants=("acme",), floors=(0,), weights=(1.0,), max_num_batched_tokens=8, target_step_s=1.0),
    Shape(host_slots=30, floors=(4, 0, 0), public=0.0),
    Shape(num_blocks=30, max_sessions=16, max_leases=18, host_slots=50, disk_blocks=90, preemption="swap"),
    Shape(num_blocks=24, block_size=2, max_model_len=40, host_slots=9, disk_blocks=40, disk_queue=3),
)


BALLAST = "ballast"

_WEIGHT_OF = {
    "connect": 22,
    "turn": 33,
    "fork": 4,
    "edit": 6,
    "join": 3,
    "trim": 5,
    "cancel": 6,
    "finish": 6,
    "release": 5,
    "break": 3,
    "misbehave": 6,
    "disconnect": 3,
    "squeeze": 1,
    "jump": 1,
    "quota": 1,
    "corrupt": 1,
    "watch": 2,
    "die": 1,
}
VERBS = tuple(_WEIGHT_OF)
# What ends everything, changes weights or fills the pool: two tenants that wait cannot be compared across it.
_UNSTEADY = {"corrupt", "die", "quota", "squeeze"}
_VERBS, _WEIGHTS = list(_WEIGHT_OF), list(_WEIGHT_OF.values())


class Simulation(Witness):
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
        super().__init__(shape, hash_function, keep_log=keep_log)
        self.rng = random.Random(seed)
        self.faults = faults
        size = self.shape.block_size
        fixed = random.Random(7)
        lengths = [3 * size, 3 * size + 1, 5 * size - 1]
        self._systems = [[fixed.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
        lengths = [1, 1, 2, max(1, size - 1), size, size + 1, 2 * size - 1, 2 * size, 4 * size + 1]
        self._messages = [[fixed.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]

    def run(self, num_steps: int) -> None:
        """Act and step so many times."""
        for _ in range(num_steps):
            for _ in range(self.rng.choice((0, 0, 1, 1, 2, 4))):
                self.act()
            self._keep_waiting()
            self.step()
            self.clock.advance(self.rng.random() * 0.01)

    def act(self) -> None:
        """Ask the engine for something."""
        verb = self.rng.choices(_VERBS, _WEIGHTS)[0]
        if not (self.shape.backlog and verb in _UNSTEADY) and getattr(self, f"_{verb}")():
            self.counts[f"verb {verb}"] += 1

    def _keep_waiting(self) -> None:
        waiting = Counter(job.session.tenant for job in self.jobs.values() if not job.is_started)
        for tenant, length, max_tokens in zip(self.shape.tenants, (3, 33), (30, 1), strict=False):
            params = SamplingParams(max_tokens=max_tokens)
            for _ in range(self.shape.backlog - waiting[tenant]):
                ids = [self.rng.randrange(VOCAB_SIZE) for _ in range(length)]
                self.submit(self.open_session(tenant), 0, ids, params, keep_lease=False)

    # What can be asked for; each says whether there was something to ask it of.

    def _connect(self) -> bool:
        if not self._has_room():
            return False
        rng = self.rng
        session = self.open_session(rng.choice(self.shape.tenants) if rng.random() >= self.shape.public else "")
        system = rng.choice(self._systems)
        self._submit(session, 0, system + self._message() if session.tenant else list(system))
        return True

    def _turn(self) -> bool:
        session = self._any_idle()
        if session is None:
            return False
        length = len(session.token_ids)
        base_len = length if self.rng.random() < 0.8 else self._near_block(0, length)
        self._submit(session, base_len, self._message() if self.rng.random() < 0.9 or not base_len else [])
        return True

    def _fork(self) -> bool:
        if not self.sessions or not self._has_room():
            return False
        session = self.rng.choice(self.sessions)
        self.fork(session, self._near_block(0, len(session.token_ids)))
        return True

    def _edit(self) -> bool:
        """Go on otherwise from an earlier token; the old branch stays, or goes with nothing left of it."""
        if not self.sessions or not self._has_room():
            return False
        session = self.rng.choice(self.sessions)
        fork = self.fork(session, self._near_block(0, len(session.token_ids)))
        self._submit(fork, len(fork.token_ids), self._message())
        if session.job is None and self.rng.random() < 0.3:
            self.release(session)
        return True

    def _join(self) -> bool:
        """Ask the same of a tenant several times at once, as if a class had been told to."""
        rng = self.rng
        tenant = rng.choice(self.shape.tenants)
        prompt = rng.choice(self._systems) + self._message()
        idle = [session for session in self.sessions if session.job is None and session.tenant in self.shape.tenants]
        rng.shuffle(idle)
        joined = 0
        for _ in range(rng.randint(2, 5)):
            # Now and then another tenant asks the same; it must not join.
            wanted = tenant if rng.random() < 0.8 else rng.choice(self.shape.tenants)
            session = next((session for session in idle if session.tenant == wanted), None)
            if session is not None:
                idle.remove(session)
            elif self._has_room():
                session = self.open_session(wanted)
            else:
                continue
            # Some end alike, some go on otherwise.
            self._submit(session, 0, prompt + ([] if rng.random() < 0.5 else self._message()))
            joined += 1
        return joined > 1

    def _trim(self) -> bool:
        if not self.sessions:
            return False
        session = self.rng.choice(self.sessions)
        self.trim(session, self._near_block(0, len(session.token_ids) + 1))
        return True

    def _cancel(self) -> bool:
        job = self._any_job()
        if job is not None:
            self.cancel(job)
        return job is not None

    def _finish(self) -> bool:
        job = self._any_job()
        if job is not None:
            self.finish_at(job, self._near_block(job.num_prompt, len(job.session.token_ids)))
        return job is not None

    def _release(self) -> bool:
        if len(self.sessions) <= 3:
            return False
        self.release(self.rng.choice(self.sessions))
        return True

    def _disconnect(self) -> bool:
        """Nobody looks at a session any more, or somebody does again."""
        if not self.sessions:
            return False
        self.send(Retain(self.rng.choice(self.sessions).lease, self.rng.random() < 0.5))
        return True

    def _squeeze(self) -> bool:
        """A tenant that nobody counted on takes most of the pool, or gives it all back."""
        ballast = [session for session in self.sessions if session.tenant == BALLAST]
        for session in ballast:
            self.release(session)
        if ballast:
            return True
        rng, shape = self.rng, self.shape
        room = rng.uniform(0.5, 1.0) * shape.num_blocks * shape.block_size
        while room > 0 and self._has_room():
            length = min(int(room) + 1, self.config.max_model_len - 1)
            room -= length
            ids = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
            params = SamplingParams(max_tokens=1)
            self.submit(self.open_session(BALLAST), 0, ids, params, compute_only=rng.random() < 0.7)
        return True

    def _jump(self) -> bool:
        """The clock goes on by hours, or falls back."""
        self.clock.advance(self.rng.choice((1.0, 60.0, 3600.0, 90000.0, -0.5, -7200.0)))
        return True

    def _quota(self) -> bool:
        """An operator gives a tenant another part of the machine; all floors stay below half of the pool."""
        rng = self.rng
        floor = rng.choice((0.0, 0.05, 0.15, 0.45 / len(self.shape.tenants)))
        self.send(SetTenant(rng.choice(self.shape.tenants), rng.choice((0.5, 1.0, 3.0)), floor))
        return True

    def _corrupt(self) -> bool:
        """A counter of the pool is wrong: an idle engine finds it, and goes on from the ids alone."""
        if self.rng.random() < 0.6:
            return False
        core = self.core
        for job in list(self.jobs.values()):
            self.cancel(job)
        self.send(Ping(1))  # What was checked before counts no more.
        core.pool.num_shared += 1
        before = core.stats().integrity_errors
        for _ in range(1000):
            said = core.idle(self.clock.now)
            self.hear([message for message in said if not isinstance(message, PoolFrame)])
            if core.is_checked:
                break
        assert core.stats().integrity_errors == before + 1, "a broken pool was not found"
        core.check_invariants()
        return True

    def _watch(self) -> bool:
        self.send(WatchPool(self.rng.choice((0.0, 0.01)), self.rng.random() < 0.5, self.rng.random() < 0.5))
        return True

    def _die(self) -> bool:
        """The engine ends, now and then with a step of which nobody heard; another one goes on with every answer."""
        if self.rng.random() < 0.5:
            return False
        if self.rng.random() < 0.5:
            self.core.step(self.clock.now)
            if self.runner.violation is not None:
                raise self.runner.violation
        self.die()
        return True

    # Parts.

    def _has_room(self) -> bool:
        return len(self.sessions) < self.shape.max_sessions

    def _any_idle(self) -> Session | None:
        idle = [session for session in self.sessions if session.job is None]
        return self.rng.choice(idle) if idle else None

    def _any_job(self) -> Job | None:
        return self.rng.choice(list(self.jobs.values())) if self.jobs else None

    def _near_block(self, low: int, high: int) -> int:
        """Return a length from `low` to `high`, more often than not one at a block's edge or beside it."""
        rng, size = self.rng, self.shape.block_size
        if rng.random() < 0.4:
            return rng.randint(low, high)
        return min(high, max(low, rng.randint(low // size, high // size + 1) * size + rng.choice((-1, 0, 1))))

    def _message(self) -> list[int]:
        if self.rng.random() < 0.7:
            return list(self.rng.choice(self._messages))
        length = max(1, self.rng.choice((1, 2, 3)) * self.shape.block_size + self.rng.choice((-1, 0, 1)))
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(length)]

    def _submit(self, session: Session, base_len: int, new_ids: list[int]) -> None:
        rng = self.rng
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 9, 17, 40)),
            stop_token_ids=(STOP_ID,) if rng.random() < 0.6 else (),
            min_tokens=rng.choice((0, 0, 1)),
        )

        keep_lease = rng.random() < 0.9
        compute_only = rng.random() < 0.1
        beam = self._search() if not compute_only and rng.random() < 0.1 and not self.shape.backlog else None
        if beam is None and rng.random() < 0.1:
            params = msgspec.structs.replace(params, frequency_penalty=0.5)
        request_class = rng.choice(list(RequestClass))
        job = self.submit(
            session,
            base_len,
            new_ids,
            params,
            request_class,
            keep_lease=keep_lease,
            compute_only=compute_only,
            beam=beam,
            # A sample of what may be another prompt, or another tenant's: it goes on as any request.
            sample_of=rng.choice(list(self.jobs)) if self.jobs and rng.random() < 0.03 else None,
        )
        room = self.shape.max_sessions - len(self.sessions)
        if session.job is job and room > 0 and rng.random() < 0.15:
            self.sample(job, rng.randint(1, min(3, room)), params)

    def _search(self) -> BeamSearch:
        rng = self.rng
        width = rng.randint(1, 3)
        return BeamSearch(
            width=width,
            num_returned=rng.randint(1, width),
            length_penalty=rng.choice((0.0, 1.0, -0.5, 2.0)),
            early_stopping=rng.choice((True, False, "never")),
        )

    def _break(self) -> bool:
        """Steps fail, logits are not finite, and the disk is full or damaged."""
        if not self.faults:
            return False
        if self.shape.steps_in_flight > 1 and self.rng.random() < 0.3:
            return self._break_ahead()
        dice = self.rng.random()
        jobs = list(self.jobs.values())
        disk = self.disk
        if disk is not None and dice < 0.3:
            if dice < 0.15 and disk.digests:
                disk.damaged.add(self.rng.choice(disk.digests))
            elif dice < 0.2:
                disk.fails_writes = not disk.fails_writes
            elif dice < 0.25:
                disk.fails_reads = not disk.fails_reads
            else:
                disk.is_paused = not disk.is_paused
            self.counts["disk faults"] += 1
            return True
        if dice < 0.4 or not jobs:
            self.runner.raise_next = True
            return True
        job = self.rng.choice(jobs)
        job.may_fail = True
        (self.runner.failing if dice < 0.7 else self.runner.not_finite).add(job.request)
        return True

    def _break_ahead(self) -> bool:
        """A launch fails, or the device has too little memory for a while, or enough again."""
        runner = self.runner
        assert isinstance(runner, PipelinedProvenanceRunner)
        if self.rng.random() < 0.4:
            runner.fails_launch = True
        elif runner.max_rows is None:
            runner.max_rows = self.rng.choice((2, 3, 5, 9))
            self.counts["too large"] += 1
        else:
            runner.max_rows = None
        return True

    def _misbehave(self) -> bool:
        """Ask for what must be refused, and change nothing."""
        if not self.sessions:
            return False
        session = self.rng.choice(self.sessions)
        request = RequestId(self._next_id)
        self._next_id += 1
        params = SamplingParams(max_tokens=2)
        kind = self.rng.randrange(4)
        if kind == 0:
            ids = [1] * self.config.max_model_len
            self.ask_in_vain(
                Submit(request, self._new_lease(), session.tenant, 0, ids, params), "context_length_exceeded"
            )
        elif kind == 1 and session.job is not None:
            length = len(session.token_ids)
            self.ask_in_vain(Submit(request, session.lease, session.tenant, length, [1], params), "conflict")
        elif kind == 2 and self.core.leases.get(session.lease) is not None:
            self.ask_in_vain(Submit(request, session.lease, "nobody", 0, [1], params), "not_found")
        elif kind == 3:
            ids = [VOCAB_SIZE] if self.rng.random() < 0.5 else []
            self.ask_in_vain(Submit(request, self._new_lease(), session.tenant, 0, ids, params), "invalid_request")
        return True


def simulate(seed: int, num_steps: int, **options: Any) -> Simulation:
    """Run a simulation to its end and return it."""
    simulation = Simulation(seed, **options)
    simulation.run(num_steps)
    simulation.drain()
    return simulation
