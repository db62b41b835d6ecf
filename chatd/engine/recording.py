"""An engine core that writes a decision log: what goes in and what comes out, at its boundary.

Nothing inside the core knows of it. What is recorded is generic: the calls of the loop, what clock and runner answer,
the scheduler's decisions, and the messages; so whatever a core learns to do is in the log already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

import chatd
from chatd.engine.core import Decision, EngineConfig, EngineCore
from chatd.engine.decision_log import Call, ChunkRecord, Header, ResultRecord, RunRecord, Writer
from chatd.engine.disk_record import DiskAnswer, RecordedDisk
from chatd.engine.messages import EngineMessage, FrontMessage, PoolFrame
from chatd.engine.plan import BlockId, BlockMove, PipelinedRunner, Plan, RequestId, Runner, StepInFlight, StepOutput
from chatd.engine.token_mask import TokenMask
from chatd.kvcache.disk import Disk

SAID_BY_PLANS = frozenset({"run"})
"""Decisions that are not logged, since a plan says the same."""


class PlanEncoder:
    """Makes the records of one plan after another; each block table is told as a change to its last one."""

    def __init__(self) -> None:
        self._tables: dict[RequestId, list[BlockId]] = {}

    def encode(self, plan: Plan) -> RunRecord:
        """Return the record of a plan, without its output. Reads the plan now and keeps nothing of it."""
        tables = self._tables
        chunks = []
        for chunk in plan.chunks:
            request, blocks, sample = chunk.request_id, chunk.block_ids, chunk.sample
            known = tables.get(request)
            if known is None or known != blocks[: len(known)]:
                kept, new = 0, list(blocks)
                tables[request] = new.copy()
            else:
                kept, new = len(known), list(blocks[len(known) :])
                known += new
            position = -1 if sample is None else sample.output_position
            chunks.append(ChunkRecord(request, chunk.start, len(chunk.token_ids), position, kept, new))
        if len(tables) > 2 * len(chunks) + 64:
            self._tables = {chunk.request: tables[chunk.request] for chunk in chunks}
        return RunRecord(
            plan.step,
            chunks,
            [(copy.source, copy.target) for copy in plan.copies],
            _moves(plan.stores),
            _moves(plan.loads),
            None,
        )


def _moves(moves: Sequence[BlockMove]) -> list[tuple[int, int]]:
    return [(move.block_id, move.slot) for move in moves]


class _RecordedStep:
    """A launched step whose result is noted."""

    def __init__(self, number: int, step: StepInFlight, hear: Callable[[int, StepOutput | None, str], None]) -> None:
        self._number = number
        self._step = step
        self._hear = hear

    def result(self) -> StepOutput:
        try:
            output = self._step.result()
        except Exception as error:
            self._hear(self._number, None, type(error).__name__)
            raise
        self._hear(self._number, output, "")
        return output


def condensed(message: EngineMessage) -> EngineMessage:
    """Return a message as it is logged: a frame's map and rows of leases, which are large, are told by their hash."""
    if not isinstance(message, PoolFrame) or not (message.states or message.leases):
        return message
    shown = msgspec.msgpack.encode((message.states, message.owners, message.leases))
    return msgspec.structs.replace(message, states=xxhash.xxh3_128_digest(shown), owners=b"", leases=[])


class RecordingCore(EngineCore):
    """An engine core whose calls are written to a log.

    Args:
        config: As `EngineCore`.
        runner: As `EngineCore`.
        clock: As `EngineCore`.
        make_writer: Opens the log with this header.
        log: As `EngineCore`.
        disk: As `EngineCore`.
        options: The other arguments of `EngineCore`.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | PipelinedRunner,
        clock: Callable[[], float],
        *,
        make_writer: Callable[[Header], Writer],
        log: Callable[[Decision], None] | None = None,
        disk: Disk | None = None,
        **options: Any,
    ) -> None:
        self._mask = TokenMask(config.vocab_size)
        self._plans = PlanEncoder()
        self._recorded_runner = runner
        self._recorded_clock = clock
        self._also = log
        self._clock_reads: list[float] = []
        self._decisions: list[Decision] = []
        self._runs: list[RunRecord] = []
        self._results: list[ResultRecord] = []
        self._disk_answers: list[DiskAnswer] = []
        recorded_disk = None if disk is None else RecordedDisk(disk, self._hear_disk)
        super().__init__(config, self, self._read_clock, log=self._decide, disk=recorded_disk, **options)
        self._writer = make_writer(Header(chatd.__version__, self._mask.config(config), disk is not None))

    def handle(self, message: FrontMessage, now: float) -> list[EngineMessage]:
        """As `EngineCore.handle`."""
        return self._record("handle", now, self._mask.front(message), lambda: EngineCore.handle(self, message, now))

    def step(self, now: float) -> list[EngineMessage]:
        """As `EngineCore.step`."""
        return self._record("step", now, None, lambda: EngineCore.step(self, now))

    def idle(self, now: float) -> list[EngineMessage]:
        """As `EngineCore.idle`."""
        return self._record("idle", now, None, lambda: EngineCore.idle(self, now))

    def close(self) -> None:
        """As `EngineCore.close`; the log is whole after it."""
        super().close()
        self._writer.close()

    def execute(self, plan: Plan) -> StepOutput:
        """Stand where the runner stands: pass a plan on, and note what came of it."""
        run = self._plans.encode(plan)
        try:
            output = self._recorded_runner.execute(plan)
        except Exception as error:
            self._runs.append(msgspec.structs.replace(run, error=type(error).__name__))
            raise
        self._runs.append(msgspec.structs.replace(run, output=self._mask.output(output)))
        return output

    def launch(self, plan: Plan) -> StepInFlight:
        """As `execute`, for a runner that takes a second plan while the first one runs."""
        run = self._plans.encode(plan)
        launch = getattr(self._recorded_runner, "launch", None)
        assert launch is not None, f"{type(self._recorded_runner).__name__} does not run two steps at a time"
        try:
            step: StepInFlight = launch(plan)
        except Exception as error:
            self._runs.append(msgspec.structs.replace(run, error=type(error).__name__))
            raise
        self._runs.append(run)
        return _RecordedStep(plan.step, step, self._hear_result)

    def _hear_result(self, step: int, output: StepOutput | None, error: str) -> None:
        masked = None if output is None else self._mask.output(output)
        self._results.append(ResultRecord(step, masked, error))

    def _record(
        self, verb: str, now: float, message: FrontMessage | None, call: Callable[[], list[EngineMessage]]
    ) -> list[EngineMessage]:
        # What was asked since the last call, to look at the core from outside, is nothing that it decided by.
        self._clock_reads, self._decisions, self._runs, self._disk_answers = [], [], [], []
        self._results = []
        said: list[EngineMessage] = []
        error = ""
        try:
            said = call()
        except Exception as raised:
            error = type(raised).__name__
            raise
        finally:
            masked = [condensed(self._mask.engine(each)) for each in said]
            reads, decisions, runs, answers = self._clock_reads, self._decisions, self._runs, self._disk_answers
            self._writer.write(Call(verb, now, message, reads, decisions, runs, answers, masked, error, self._results))
        return said

    def _hear_disk(self, answer: DiskAnswer) -> None:
        self._disk_answers.append(answer)

    def _read_clock(self) -> float:
        now = self._recorded_clock()
        self._clock_reads.append(now)
        return now

    def _decide(self, decision: Decision) -> None:
        if self._also is not None:
            self._also(decision)
        if decision.verb not in SAID_BY_PLANS:
            self._decisions.append(decision)
