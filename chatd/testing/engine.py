"""Fakes that the tests of several parts share; nothing in the daemon imports this.

The `ProvenanceRunner` stands where the model runner stands and gets the very same plans. Its KV records where each slot
came from, and its attention refuses a block table that does not spell exactly the request's own prefix. So any wrong
reuse, stale slot, second writer or early registration fails at once, in the step that commits it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chatd.engine.beam_search import BeamSearcher, num_candidates
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.cost_model import CostParameters, num_pairs
from chatd.engine.messages import (
    Beams,
    BeamSequence,
    Done,
    EngineMessage,
    FrontMessage,
    LeaseId,
    LeaseLost,
    RequestClass,
    Submit,
    Tokens,
)
from chatd.engine.plan import BlockId, BlockMove, Chunk, DeviceFault, Plan, RequestId, StepOutput, StepTooLarge
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.kvcache.disk import Disk
from chatd.kvcache.prefix_index import Namespace

POISON = -1
EMPTY_PREFIX = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

NAMESPACE = Namespace("weights-0", "fp16", "float16", 1, None, None)


class FakeClock:
    """Time that moves when it is told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def extend_chain(chain: int, token_id: int) -> int:
    """Return the fingerprint of a prefix from that of the prefix without its last token."""
    mixed = (chain * 6364136223846793005 + token_id * 1442695040888963407 + 1013904223) & _MASK
    return mixed ^ (mixed >> 29)


def chains_of(token_ids: Iterable[int]) -> list[int]:
    """Return the fingerprint of every prefix, from the first token's on."""
    chains, chain = [], EMPTY_PREFIX
    for token_id in token_ids:
        chain = extend_chain(chain, token_id)
        chains.append(chain)
    return chains


@dataclass(slots=True)
class Truth:
    """What a request is, by those who asked for it: its tenant, and the fingerprints of its prefixes."""

    tenant: str | None
    chains: Sequence[int]


class HostContent(NamedTuple):
    """What one slot of the host's buffer holds: that of the pool's slots that were stored in it."""

    chains: list[int]
    tenants: list[str | None]
    token_ids: list[int]


class ProvenanceRunner:
    """A runner whose KV slots know their whole prefix, and whose next token is a function of it.

    Args:
        num_blocks: Of the pool.
        block_size: Tokens of a block.
        vocab_size: Tokens drawn are below this.
        truth: What the requests really are; None checks that tables are consistent in themselves.
        cost: How long a step takes, told as `model_s`.
        clock: Is advanced by that.
        num_host_slots: Of the host's buffer.
        move_s: How long the move of a block takes, told as `move_s`.

    Attributes:
        host: By slot of the host's buffer, what was stored in it by a step that did not fail.
        chains: By slot, the fingerprint of the prefix that ends there; `POISON` where nothing was written.
        tenants: By slot, whose request wrote it.
        plans: Executed so far.
        num_rows: Computed so far.
        num_stored: Blocks stored so far.
        num_loaded: Likewise.
        answer_ids: What answers are made of, in place of the whole vocabulary; one that is there twice comes twice as
            often.
        before_write: Called with each block that a plan writes to, before it is written.
        failing: Requests whose presence in a plan makes the step raise, after it has written.
        not_finite: Requests whose logits are not finite.
        raise_next: The next step raises.
        max_rows: A step with more rows is too large for the device; None is no limit.
        device_fails: The next step finds a device that cannot be used any more.
        violation: What a plan did that no plan may do.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 97,
        truth: Callable[[RequestId], Truth] | None = None,
        cost: CostParameters | None = None,
        clock: FakeClock | None = None,
        num_host_slots: int = 0,
        move_s: float = 0.0,
    ) -> None:
        self.host: list[HostContent | None] = [None] * num_host_slots
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.chains = [POISON] * (num_blocks * block_size)
        self.tenants: list[str | None] = [None] * (num_blocks * block_size)
        self.token_ids = [POISON] * (num_blocks * block_size)
        self.plans = 0
        self.num_rows = self.num_stored = self.num_loaded = 0
        self.answer_ids: Sequence[int] = ()
        self.before_write: Callable[[BlockId], None] | None = None
        self.failing: set[RequestId] = set()
        self.not_finite: set[RequestId] = set()
        self.raise_next = False
        self.max_rows: int | None = None
        self.device_fails = False
        self.violation: AssertionError | None = None
        self._truth = truth
        self._cost = cost
        self._clock = clock
        self._move_s = move_s

    def next_token(self, chain: int) -> int:
        """Return the token that follows a prefix."""
        if self.answer_ids:
            return self.answer_ids[(chain >> 33) % len(self.answer_ids)]
        return (chain >> 33) % self.vocab_size

    def candidates(self, chain: int, count: int, forbidden: Collection[int] = ()) -> list[tuple[int, float]]:
        """Return the likeliest tokens after a prefix: each has a weight that follows from the prefix and itself."""
        weights = [1 + (extend_chain(chain, token_id) >> 40) % 1000 for token_id in range(self.vocab_size)]
        total = sum(weights)
        allowed = [token_id for token_id in range(self.vocab_size) if token_id not in forbidden]
        ranked = sorted(allowed, key=lambda token_id: (-weights[token_id], token_id))
        return [(token_id, math.log(weights[token_id] / total)) for token_id in ranked[:count]]

    def poison(self, block_id: int, start: int = 0) -> None:
        """Make a block's slots from offset `start` on unreadable."""
        size = self.block_size
        for slot in range(block_id * size + start, (block_id + 1) * size):
            self.chains[slot] = POISON

    def execute(self, plan: Plan) -> StepOutput:
        """Run a plan as a model would: stores, copies and loads, then all writes, then attention and sampling."""
        try:
            return self._execute(plan)
        except AssertionError as error:
            # The engine takes any exception for a failed step, so whoever tests has to look here.
            self.violation = error
            raise

    def _execute(self, plan: Plan) -> StepOutput:
        self.plans += 1
        size = self.block_size
        self._store(plan.stores)
        for copy in plan.copies:
            self._copy(copy.source, copy.target)
        loaded = self._load(plan.loads)
        written: dict[int, RequestId] = {}
        for chunk in plan.chunks:
            assert chunk.num_tokens >= 1, f"request {chunk.request_id} has an empty chunk"
            end = chunk.start + chunk.num_tokens
            written_places = range(chunk.start // size, len(chunk.block_ids))
            assert not any(chunk.block_ids[place] in loaded for place in written_places), "a loaded block is written"
            assert len(chunk.block_ids) == -(-end // size), f"request {chunk.request_id}'s table does not end at {end}"
            self._write(chunk, written)
        sampled: dict[RequestId, int] = {}
        candidates: dict[RequestId, list[tuple[int, float]]] = {}
        for chunk in plan.chunks:
            chain = self._attend(chunk)
            if chunk.sample is None or chunk.request_id in self.not_finite:
                continue
            if chunk.sample.num_candidates:
                candidates[chunk.request_id] = self.candidates(
                    chain, chunk.sample.num_candidates, chunk.sample.stop_token_ids
                )
            else:
                sampled[chunk.request_id] = self.next_token(chain)
        rows = sum(chunk.num_tokens for chunk in plan.chunks)
        self.num_rows += rows
        model_s = 0.0
        if self._cost is not None:
            pairs = sum(num_pairs(chunk.start, chunk.num_tokens) for chunk in plan.chunks)
            model_s = self._cost.step_s(rows, pairs)
            if self._clock is not None:
                self._clock.advance(model_s)
        move_s = self._move_s * (len(plan.stores) + len(plan.loads))
        if self._clock is not None:
            self._clock.advance(move_s)
        if self.raise_next or (self.failing and any(chunk.request_id in self.failing for chunk in plan.chunks)):
            self.raise_next = False
            self._lose(plan)
            raise RuntimeError("the step failed as it was told to")
        if self.max_rows is not None and rows > self.max_rows:
            self._lose(plan)
            raise StepTooLarge(f"{rows} rows, there is memory for {self.max_rows}")
        if self.device_fails:
            raise DeviceFault("an illegal memory access was encountered")
        failed = {
            chunk.request_id: "logits are not finite"
            for chunk in plan.chunks
            if chunk.sample is not None and chunk.request_id in self.not_finite
        }
        return StepOutput(sampled, failed=failed, model_s=model_s, move_s=move_s, candidates=candidates)

    def _lose(self, plan: Plan) -> None:
        """Have nothing of a step that fails where it should be: how far it got, nobody knows."""
        for move in plan.stores:
            self.host[move.slot] = None
        for copy in plan.copies:
            self.poison(copy.target)

    def _store(self, stores: Sequence[BlockMove]) -> None:
        size = self.block_size
        slots = [move.slot for move in stores]
        assert len(set(slots)) == len(slots), "two blocks are stored in one slot"
        for move in stores:
            part = slice(move.block_id * size, (move.block_id + 1) * size)
            content = HostContent(self.chains[part], self.tenants[part], self.token_ids[part])
            assert POISON not in content.chains, f"block {move.block_id} is stored and not full"
            self.host[move.slot] = content
            self.num_stored += 1

    def _load(self, loads: Sequence[BlockMove]) -> set[int]:
        size = self.block_size
        for move in loads:
            content = self.host[move.slot]
            assert content is not None, f"slot {move.slot} is loaded with nothing in it"
            part = slice(move.block_id * size, (move.block_id + 1) * size)
            self._will_write(move.block_id)
            self.chains[part], self.tenants[part], self.token_ids[part] = content
            self.num_loaded += 1
        targets = {int(move.block_id) for move in loads}
        assert len(targets) == len(loads), "a block is loaded twice"
        return targets

    def _copy(self, source: int, target: int) -> None:
        size = self.block_size
        assert source != target, f"block {source} is copied to itself"
        for slots in (self.chains, self.tenants, self.token_ids):
            items: list[Any] = slots
            items[target * size : (target + 1) * size] = items[source * size : (source + 1) * size]

    def _write(self, chunk: Chunk, written: dict[int, RequestId]) -> None:
        size = self.block_size
        truth = self._truth_of(chunk.request_id)
        tenant = None if truth is None else truth.tenant
        chain = EMPTY_PREFIX
        if chunk.start:
            chain = self.chains[chunk.block_ids[(chunk.start - 1) // size] * size + (chunk.start - 1) % size]
        for place in range(chunk.start // size, (chunk.start + chunk.num_tokens - 1) // size + 1):
            self._will_write(chunk.block_ids[place])
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            slot = chunk.block_ids[position // size] * size + position % size
            assert slot not in written, f"slot {slot} is written by {written[slot]} and {chunk.request_id}"
            written[slot] = chunk.request_id
            chain = extend_chain(chain, token_id)
            self.chains[slot] = chain
            self.tenants[slot] = tenant
            self.token_ids[slot] = token_id

    def _attend(self, chunk: Chunk) -> int:
        """Return the fingerprint at the chunk's end, having read every slot up to there."""
        size = self.block_size
        end = chunk.start + chunk.num_tokens
        chains: list[int] = []
        for block_id in chunk.block_ids:
            chains += self.chains[block_id * size : (block_id + 1) * size]
        del chains[end:]
        who = f"request {chunk.request_id}"
        truth = self._truth_of(chunk.request_id)
        if truth is None:
            token_ids = [
                self.token_ids[chunk.block_ids[position // size] * size + position % size] for position in range(end)
            ]
            assert chains == chains_of(token_ids), f"{who}'s table does not spell one prefix"
            return chains[-1]
        if chains != truth.chains[:end]:
            wrong = next(i for i in range(end) if i >= len(truth.chains) or chains[i] != truth.chains[i])
            raise AssertionError(f"I10: {who} reads another prefix's KV at position {wrong} of {end}")
        for block_id in chunk.block_ids:
            owner = self.tenants[block_id * size]
            assert owner in (None, truth.tenant), f"I9: {who} of {truth.tenant} reads KV of {owner}"
        return chains[-1]

    def _truth_of(self, request_id: RequestId) -> Truth | None:
        return None if self._truth is None else self._truth(request_id)

    def _will_write(self, block_id: BlockId) -> None:
        if self.before_write is not None:
            self.before_write(block_id)


def find_beams(
    runner: ProvenanceRunner, prompt: Sequence[int], search: BeamSearch, params: SamplingParams, max_model_len: int
) -> list[tuple[tuple[int, ...], float]]:
    """Return the (ids, score) pairs that a search of the fake model finds, with no engine in between."""
    max_length = min(params.max_tokens, max_model_len - len(prompt))
    searcher = BeamSearcher(search, params.stop_token_ids, max_length)
    count = num_candidates(search.width, len(params.stop_token_ids))
    prompt_chain = chains_of(prompt)[-1]
    answers: list[tuple[int, ...]] = [()]
    while True:
        options = []
        for answer in answers:
            chain = prompt_chain
            for token_id in answer:
                chain = extend_chain(chain, token_id)
            forbidden = params.stop_token_ids if len(answer) < params.min_tokens else ()
            options.append(runner.candidates(chain, count, forbidden))
        children = searcher.advance(answers, options)
        if not children:
            return [(found.ids, float(found.score)) for found in searcher.finished[: search.num_returned]]
        answers = [(*answers[child.parent], child.token_id) for child in children]


def engine_config(**overrides: Any) -> EngineConfig:
    """Return a small engine's configuration: 64 blocks of 4 tokens."""
    values: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "namespace": NAMESPACE,
    }
    return EngineConfig(**(values | overrides))


def sampling_params(max_tokens: int = 8, **overrides: Any) -> SamplingParams:
    """Return greedy parameters."""
    return SamplingParams(max_tokens=max_tokens, **overrides)


@dataclass
class EngineHarness:
    """An engine core on a provenance runner, with a front that keeps what it is told.

    Attributes:
        config: Of the core.
        core: Under test.
        runner: Its fake.
        clock: Of both.
        messages: All that the core has said.
        outputs: The ids of each request's answer.
        runner_class: Of the fake; a config with two steps in flight needs the pipelined one.
        done: The end of each request that has ended.
        lost: Requests that were answered with `LeaseLost`.
        beams: What each search found.
    """

    config: EngineConfig = field(default_factory=engine_config)
    clock: FakeClock = field(default_factory=FakeClock)
    runner: ProvenanceRunner = field(init=False)
    core: EngineCore = field(init=False)
    messages: list[EngineMessage] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    beams: dict[int, list[BeamSequence]] = field(default_factory=dict)
    core_options: dict[str, Any] = field(default_factory=dict)
    runner_options: dict[str, Any] = field(default_factory=dict)
    runner_class: type[ProvenanceRunner] = ProvenanceRunner
    make_disk: Callable[[ProvenanceRunner], Disk] | None = None

    def __post_init__(self) -> None:
        """Build runner and core."""
        self.runner = self.runner_class(
            self.config.num_blocks,
            self.config.block_size,
            clock=self.clock,
            num_host_slots=self.config.host_slots,
            **self.runner_options,
        )
        disk = None if self.make_disk is None else self.make_disk(self.runner)
        self.core = EngineCore(self.config, self.runner, self.clock, disk=disk, **self.core_options)

    def send(self, message: FrontMessage) -> list[EngineMessage]:
        """Hand a message to the core."""
        return self._keep(self.core.handle(message, self.clock.now))

    def submit(
        self,
        request: int,
        new_ids: Sequence[int],
        *,
        lease: int | None = None,
        base_len: int = 0,
        tenant: str = "acme",
        params: SamplingParams | None = None,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        keep_lease: bool = True,
        **more: Any,
    ) -> list[EngineMessage]:
        """Submit a request on a lease that has the request's number unless it is given.

        `more` are further fields of `Submit`, such as `sample_of` or `num_answered`.
        """
        return self.send(
            Submit(
                RequestId(request),
                LeaseId(request if lease is None else lease),
                tenant,
                base_len,
                list(new_ids),
                params or sampling_params(),
                request_class,
                keep_lease,
                **more,
            )
        )

    def step(self, num_steps: int = 1) -> list[EngineMessage]:
        """Run steps, each followed by all invariants."""
        said: list[EngineMessage] = []
        for _ in range(num_steps):
            said += self._keep(self.core.step(self.clock.now))
            if self.runner.violation is not None:
                raise self.runner.violation
            self.core.check_invariants()
        return said

    def run(self, max_steps: int = 10_000) -> list[EngineMessage]:
        """Run until nothing is left to do."""
        said: list[EngineMessage] = []
        while self.core.has_work:
            assert max_steps > 0, "the engine does not come to an end"
            max_steps -= 1
            said += self.step()
        return said

    def generate(self, request: int, new_ids: Sequence[int], **options: Any) -> list[int]:
        """Submit, run to the end, and return the answer."""
        self.submit(request, new_ids, **options)
        self.run()
        return self.outputs.get(request, [])

    def settle(self, max_slices: int = 10_000) -> None:
        """Let an engine without requests do all that it does when idle."""
        while not self.core.is_checked:
            assert max_slices > 0, "an idle engine does not come to rest"
            max_slices -= 1
            self._keep(self.core.idle(self.clock.now))
            if self.runner.violation is not None:
                raise self.runner.violation
            self.core.check_invariants()

    def length(self, lease: int) -> int:
        """Return the length of a lease, or -1."""
        held = self.core.leases.get(lease)
        return -1 if held is None else len(held.token_ids)

    def _keep(self, said: list[EngineMessage]) -> list[EngineMessage]:
        self.messages += said
        for message in said:
            if isinstance(message, Tokens):
                for delta in message.deltas:
                    assert delta.request not in self.done, f"request {delta.request} goes on after its end"
                    self.outputs.setdefault(delta.request, []).extend(delta.ids)
            elif isinstance(message, Done):
                assert message.request not in self.done, f"request {message.request} ends twice"
                self.done[message.request] = message
            elif isinstance(message, LeaseLost):
                self.lost.add(message.request)
            elif isinstance(message, Beams):
                assert message.request not in self.done, f"request {message.request} finds beams after its end"
                self.beams[message.request] = message.sequences
        return said
