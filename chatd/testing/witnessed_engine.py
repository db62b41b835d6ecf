"""An engine core whose runner looks at each plan before it runs it, and at what came of it.

What a plan reads, writes and draws is compared with the ids that the front knows: the runner's attention compares its
slots with them, and a slot that holds nobody's token cannot be read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import xxhash

from chatd.engine.core import Decision, EngineConfig, EngineCore, TenantLimits
from chatd.engine.cost_model import CostParameters
from chatd.engine.plan import PENDING_TOKEN, BlockId, Plan, RequestId, SampleSpec, StepInFlight, StepOutput
from chatd.engine.transfer_costs import TransferCosts
from chatd.kvcache.block_pool import Account
from chatd.kvcache.lease import LeaseState
from chatd.kvcache.prefix_index import MAX_ENTRIES_PER_KEY, HashFunction
from chatd.testing.constant_hash import constant_hash
from chatd.testing.disk import FakeDisk
from chatd.testing.engine import NAMESPACE, POISON, FakeClock, ProvenanceRunner, Truth, chains_of
from chatd.testing.fairness_gap import FairnessGap
from chatd.testing.pipelined_runner import PipelinedProvenanceRunner
from chatd.testing.witnessed_sessions import VOCAB_SIZE, Job, Session, Shape


@dataclass(slots=True, eq=False)
class _WitnessedStep:
    """A step in flight that is looked at when its result comes."""

    engine: WitnessedEngine
    plan: Plan
    step: StepInFlight
    block_ids: set[BlockId]
    is_void: bool = False

    def result(self) -> StepOutput:
        return self.engine.take_result(self)


class WitnessedEngine:
    """An engine core on a provenance runner, of which every plan, write and result is looked at.

    Whoever is the front says in `sessions` and `jobs` what should be true.

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
        self._plan: Plan | None = None
        self._has_run = False
        self._tainted: list[BlockId] = []
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

    def count_engine(self) -> None:
        """Add up what the engine has counted in its life."""
        core, counts = self.core, self.counts
        counts["preempted"] += core.scheduler.num_preemptions
        counts["joined"] += core.scheduler.joins.num_joins
        counts["swapped"] += core.scheduler.num_swapped
        counts["evicted"] += core.pool.num_evictions
        counts["from disk"] += 0 if self.disk is None else self.disk.num_loaded

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

    # What is checked between steps.

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
