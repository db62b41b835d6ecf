import math
from dataclasses import replace

import pytest
import torch

from chatd.engine.core import EngineCore
from chatd.engine.messages import Cancel, FinishReason, Fork, Release, Submit, Trim
from chatd.engine.plan import BlockCopy, Chunk, Plan, RequestId, SampleSpec, StepOutput
from chatd.engine.sampling import SamplingParams
from chatd.models.quantization import PackedLinear
from chatd.testing.engine import ProvenanceRunner

NUM_LAYERS = 3
GREEDY = SampleSpec(SamplingParams(max_tokens=8), 0)


def plan(*chunks, copies=()):
    return Plan(0, chunks, copies, 16)


@pytest.fixture
def linear_calls(monkeypatch):
    """The number of rows of each linear product, in order."""
    calls = []
    original = PackedLinear.__call__

    def counted(self, x, out=None):
        calls.append(x.shape[0])
        return original(self, x, out)

    monkeypatch.setattr(PackedLinear, "__call__", counted)
    return calls


def test_a_step_runs_four_products_a_layer_and_one_more_whatever_it_mixes(load_tiny, real_engine, linear_calls):
    model = load_tiny("fp16")
    runner = real_engine(model).runner
    prefills = [
        Chunk(i, 0, list(range(3, 3 + n)), [2 * i, 2 * i + 1][: -(-n // 16)], None) for i, n in ((0, 20), (1, 5))
    ]
    decodes = [Chunk(i, 4, [7], [2 * i], GREEDY) for i in range(2, 8)]
    for chunks in (prefills, decodes, [*decodes[:3], *prefills, *decodes[3:]], decodes[:1]):
        linear_calls.clear()
        runner.execute(plan(*chunks))
        assert len(linear_calls) == 4 * NUM_LAYERS + 1
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        num_logits = sum(chunk.sample is not None for chunk in chunks)
        assert linear_calls == [num_rows] * (4 * NUM_LAYERS) + [num_logits]


def test_every_step_of_a_busy_engine_runs_as_many_products(load_tiny, real_engine, linear_calls):
    engine = real_engine(load_tiny("int8"), {"max_num_batched_tokens": 64, "max_num_seqs": 8})
    for request, length in enumerate((5, 150, 40, 300, 1)):
        engine.submit(request, list(range(3, 3 + length)))
    while engine.core.has_work:
        linear_calls.clear()
        engine.step()
        assert len(linear_calls) == 4 * NUM_LAYERS + 1


def test_blocks_are_copied_before_the_step_writes(load_tiny, real_engine):
    engine = real_engine(load_tiny("fp16"))
    runner, cache = engine.runner, engine.model.decoder.kv_cache
    cache.data.zero_()
    runner.execute(plan(Chunk(1, 0, [5, 6, 7], [3], None)))
    original = cache.data[3].clone()
    runner.execute(plan(Chunk(2, 2, [9], [8], None), copies=[BlockCopy(3, 8)]))
    assert torch.equal(cache.data[3], original)
    for slot, same in ((0, True), (1, True), (2, False)):
        copied, kept = cache.read_slot(8 * 16 + slot, 0), cache.read_slot(3 * 16 + slot, 0)
        assert torch.equal(copied[0], kept[0]) == same


def test_a_plan_of_copies_alone_is_executed(load_tiny, real_engine):
    engine = real_engine(load_tiny("fp16"))
    cache = engine.model.decoder.kv_cache
    cache.data[4] = 1.5
    out = engine.runner.execute(plan(copies=[BlockCopy(4, 5)]))
    assert out.sampled == {}
    assert torch.equal(cache.data[5], cache.data[4])


def test_logits_that_are_not_finite_fail_their_request_only(load_tiny, real_engine):
    model = load_tiny("fp16")
    prompts = {1: list(range(10, 30)), 2: list(range(50, 75)), 3: list(range(100, 120))}
    alone = {}
    for request, prompt in prompts.items():
        engine = real_engine(model)
        engine.submit(request, prompt)
        alone[request] = engine.run().ids[request]
    engine = real_engine(model)
    for request, prompt in prompts.items():
        engine.submit(request, prompt)
    while len(engine.ids.get(2, [])) < 3:
        engine.step()
    block = engine.core.scheduler.requests[2].lease.table.block_ids[0]
    model.decoder.kv_cache.data[block] = math.nan
    engine.run()
    assert engine.done[2].reason is FinishReason.FAILED
    assert engine.done[2].error_code == "engine_error"
    assert engine.done[1].reason is FinishReason.MAX_OUTPUT_TOKENS
    assert {1: engine.ids[1], 3: engine.ids[3]} == {1: alone[1], 3: alone[3]}
    model.decoder.kv_cache.data.zero_()


def test_a_step_that_fails_raises_and_the_next_one_works(load_tiny, real_engine, monkeypatch):
    engine = real_engine(load_tiny("fp16"))
    one = plan(Chunk(1, 0, [5, 6, 7], [3], GREEDY))
    expected = engine.runner.execute(one).sampled
    with monkeypatch.context() as patched:
        patched.setattr(PackedLinear, "__call__", lambda *_: torch.empty(10**15))
        with pytest.raises(RuntimeError):
            engine.runner.execute(one)
    assert engine.runner.execute(one).sampled == expected


class Recorder:
    """Executes plans on a runner and keeps them; time is what the fake says it is, so that both decide alike."""

    def __init__(self, runner, timer):
        self.runner = runner
        self.timer = timer
        self.plans = []
        self.outputs = []

    def execute(self, step):
        # A chunk's lists are the engine's own and change after the step.
        self.plans.append(
            replace(
                step,
                chunks=[
                    replace(chunk, token_ids=list(chunk.token_ids), block_ids=list(chunk.block_ids), sample=None)
                    for chunk in step.chunks
                ],
                copies=list(step.copies),
            )
        )
        output = self.runner.execute(step)
        self.outputs.append(output)
        return replace(output, model_s=self.timer(step), move_s=0.0)


class Script:
    """A fake that checks provenance and answers with recorded tokens."""

    def __init__(self, fake, outputs):
        self.fake = fake
        self.outputs = iter(outputs)

    def execute(self, step):
        self.fake.execute(step)
        recorded = next(self.outputs)
        return StepOutput(recorded.sampled, recorded.logprobs)


def step_seconds(step):
    return 0.004 + 0.001 * step.num_tokens


def drive(core, clock, script):
    """Hand each message over at its step, and run to the end."""
    said = []
    for step in range(1000):
        for at, message in script:
            if at == step:
                said += core.handle(message, clock())
        if core.has_work:
            clock.advance(0.01)
            said += core.step(clock())
    assert not core.has_work
    return said


def test_the_fake_and_the_real_runner_are_given_the_same_plans(load_tiny, real_engine):
    def submit(request, lease, base_len, ids, tenant="acme", **params):
        return Submit(request, lease, tenant, base_len, ids, SamplingParams(**({"max_tokens": 20} | params)))

    system = list(range(3, 53))
    script = [
        (0, submit(1, 1, 0, [*system, 60, 61])),
        (0, submit(2, 2, 0, [*system, 70], temperature=1.0, seed=4)),
        (3, submit(3, 3, 0, list(range(100, 330)), tenant="zoo")),
        (5, submit(4, 4, 0, [*system, 80, 81, 82], tenant="zoo")),
        (9, Cancel(2)),
        (40, submit(5, 1, 72, [90, 91])),
        (41, Fork(1, 9, 60)),
        (60, submit(6, 9, 60, [92])),
        (60, submit(7, 5, 0, list(range(200, 330)))),
        (61, submit(8, 6, 0, list(range(150, 290)))),
        (62, submit(10, 7, 0, list(range(120, 290)), tenant="zoo", max_tokens=60)),
        (90, Trim(4, 30)),
        (91, Release(3)),
        (95, submit(11, 4, 30, list(range(300, 380)), tenant="zoo")),
        # Two that outgrow the pool together.
        (130, submit(12, 12, 0, list(range(30, 110)), max_tokens=220)),
        (130, submit(13, 13, 0, list(range(230, 310)), max_tokens=220)),
    ]
    config = {"num_blocks": 30, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    made = []

    def record(runner):
        made.append(Recorder(runner, step_seconds))
        return made[-1]

    real = real_engine(load_tiny("fp16"), config, wrap=record)
    (recorded,) = made
    said = drive(real.core, real.clock, script)

    fake = real_engine(real.model, config)
    fake_runner = Recorder(Script(ProvenanceRunner(30, 16), recorded.outputs), step_seconds)
    fake.core = EngineCore(fake.core.config, fake_runner, fake.clock)
    assert drive(fake.core, fake.clock, script) == said
    assert fake_runner.plans == recorded.plans
    assert len(recorded.plans) > 80
    assert sum(len(step.copies) for step in recorded.plans) >= 1
    assert real.core.stats().num_preemptions >= 1
    assert {type(m).__name__ for m in said} >= {"Started", "Tokens", "Done", "Preempted"}
    assert all(isinstance(chunk.request_id, int) for step in recorded.plans for chunk in step.chunks)
    assert RequestId(11) in {chunk.request_id for step in recorded.plans for chunk in step.chunks}
