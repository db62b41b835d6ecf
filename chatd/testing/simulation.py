"""Everything at once, at random: a witness that is told by a seed what to ask an engine core for."""

from __future__ import annotations

import random
from typing import Any

import xxhash

from chatd.engine.messages import RequestClass, Retain, Submit, WatchPool
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.kvcache.prefix_index import HashFunction
from chatd.testing.witness import STOP_ID, VOCAB_SIZE, Session, Shape, Witness

SHAPES = (
    Shape(),
    Shape(num_blocks=26, max_model_len=80, max_num_seqs=4, max_leases=8, max_sessions=12),
    Shape(num_blocks=90, block_size=1, max_model_len=60, max_num_batched_tokens=9, floors=(20, 10, 0)),
    Shape(num_blocks=64, block_size=3, max_num_seqs=12, max_num_batched_tokens=64, max_sessions=14, max_leases=20),
    Shape(num_blocks=14, block_size=8, max_num_seqs=3, floors=(2, 2, 2), weights=(1.0, 1.0, 4.0)),
    Shape(num_blocks=60, max_num_batched_tokens=128, max_num_seqs=16, max_sessions=20, max_leases=24),
    Shape(num_blocks=40, tenants=("acme",), floors=(0,), weights=(1.0,), max_num_batched_tokens=8, target_step_s=1.0),
    Shape(host_slots=30, floors=(4, 0, 0)),
    Shape(num_blocks=30, max_sessions=16, max_leases=18, host_slots=50, disk_blocks=90, preemption="swap"),
    Shape(num_blocks=24, block_size=2, max_model_len=40, host_slots=9, disk_blocks=40),
)


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
            self.step()
            self.clock.advance(self.rng.random() * 0.01)

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
        elif dice < 0.63 and len(self.sessions) < self.shape.max_sessions:
            session = rng.choice(self.sessions)
            self.fork(session, rng.randrange(len(session.token_ids) + 1))
        elif dice < 0.68:
            session = rng.choice(self.sessions)
            self.trim(session, rng.randrange(len(session.token_ids) + 2))
        elif dice < 0.74 and busy:
            self.cancel(rng.choice(busy))
        elif dice < 0.80 and busy:
            job = rng.choice(busy)
            self.finish_at(job, rng.randint(job.num_prompt, len(job.session.token_ids)))
        elif dice < 0.85 and len(self.sessions) > 3:
            self.release(rng.choice(self.sessions))
        elif dice < 0.88 and self.faults:
            self._break()
        elif dice < 0.96:
            self._misbehave()
        elif dice < 0.98:
            self.send(Retain(rng.choice(self.sessions).lease, rng.random() < 0.5))
        else:
            self.send(WatchPool(rng.choice((0.0, 0.01)), rng.random() < 0.5, rng.random() < 0.5))

    def _open(self) -> None:
        rng = self.rng
        session = self.open_session(rng.choice(self.shape.tenants) if rng.random() < 0.93 else "")
        system = rng.choice(self._systems)
        self._submit(session, 0, system + self._message() if session.tenant else list(system))

    def _turn(self, session: Session) -> None:
        rng = self.rng
        length = len(session.token_ids)
        base_len = length if rng.random() < 0.8 else rng.randrange(length + 1)
        self._submit(session, base_len, self._message() if rng.random() < 0.9 or not base_len else [])

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
        request_class = rng.choice(list(RequestClass))
        job = self.submit(
            session,
            base_len,
            new_ids,
            params,
            request_class,
            keep_lease=keep_lease,
            compute_only=compute_only,
            beam=self._search() if not compute_only and rng.random() < 0.1 else None,
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

    def _break(self) -> None:
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
            return
        if dice < 0.4 or not jobs:
            self.runner.raise_next = True
            return
        job = self.rng.choice(jobs)
        job.may_fail = True
        (self.runner.failing if dice < 0.7 else self.runner.not_finite).add(job.request)

    def _misbehave(self) -> None:
        """Ask for what must be refused, and change nothing."""
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


def simulate(seed: int, num_steps: int, **options: Any) -> Simulation:
    """Run a simulation to its end and return it."""
    simulation = Simulation(seed, **options)
    simulation.run(num_steps)
    simulation.drain()
    return simulation
