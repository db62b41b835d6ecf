"""The whole engine on a GPU: what the host does for a step, what a cached prompt saves, tokens a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy.typing as npt
import torch

from chatd.bench.gpu.models import QWEN3_8B, RandomModel, RawConfig
from chatd.bench.gpu.parts import Bench, Row, Rows
from chatd.bench.gpu.steps import blocks_of
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.cost_model import GPU_COST
from chatd.engine.decode_graphs import bucket_sizes
from chatd.engine.gpu_runner import GpuRunner
from chatd.engine.messages import Done, LeaseId, Submit, Tokens, encode
from chatd.engine.plan import Plan, RequestId, StepInFlight, StepOutput
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.prefix_index import Namespace
from chatd_kernels.stream import DeviceMemory, Ended, Stream, Work

_NAMESPACE = Namespace("bench", "bf16", "bf16", 1, None, None)
_WARM_UP_STEPS = 5


class TimedStream:
    """Another stream, and how long the host has waited for it.

    Attributes:
        waited_s: Seconds so far.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.device, self.name, self.has_bfloat16 = stream.device, stream.name, stream.has_bfloat16
        self.waited_s = 0.0

    def run(self, work: Work) -> Ended:
        """Put work in."""
        return _TimedEnd(self, self._stream.run(work))

    def capture(self, work: Work) -> Work:
        """Return what replays the work."""
        return self._stream.capture(work)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host that the device reaches."""
        return self._stream.pinned(shape, dtype)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a copy on the device."""
        return self._stream.upload(array)

    def synchronize(self) -> None:
        """Wait for everything."""
        self._stream.synchronize()

    def memory(self) -> DeviceMemory:
        """Return what is free now."""
        return self._stream.memory()

    def peak_bytes(self, work: Work) -> int:
        """Run work, and return how much memory it took."""
        return self._stream.peak_bytes(work)


class _TimedEnd:
    def __init__(self, stream: TimedStream, ended: Ended) -> None:
        self._stream = stream
        self._ended = ended

    def wait(self) -> None:
        start = time.perf_counter()
        self._ended.wait()
        self._stream.waited_s += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        return self._ended.seconds


class _Watched:
    """A runner, and how long each step took on the device."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.device_s: list[float] = []

    def execute(self, plan: Plan) -> StepOutput:
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> StepInFlight:
        return _WatchedStep(self, self._runner.launch(plan))


class _WatchedStep:
    def __init__(self, runner: _Watched, step: StepInFlight) -> None:
        self._runner = runner
        self._step = step

    def result(self) -> StepOutput:
        output = self._step.result()
        self._runner.device_s.append(output.model_s)
        return output


class BenchEngine:
    """An engine core on a model of random weights, stepped by hand.

    Args:
        stream: Of the device.
        raw: As config.json.
        max_num_seqs: Requests that run at a time.
        max_model_len: Tokens of a context.
        max_num_batched_tokens: Rows of a step.

    Attributes:
        stream: Counts waits.
        core: The engine core, once `start` was called.
        runner: Counts seconds on the device, likewise.
        first_s: When each request's first token came out, by `time.perf_counter`.
        last_s: When the last token so far came out.
        num_tokens: That came out so far.
        done: Requests that have ended.
    """

    core: EngineCore
    runner: _Watched

    def __init__(
        self, stream: Stream, raw: RawConfig, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self.stream = TimedStream(stream)
        # Prompts lie in the cache beside those of the requests before, so that there is no preemption.
        num_blocks = 2 * max_num_seqs * (blocks_of(max_model_len, 16) + 1)
        self._model = RandomModel(
            self.stream,
            raw,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self._model.capture(bucket_sizes(max_num_seqs))
        self._limits = (max_num_seqs, max_model_len, max_num_batched_tokens)
        self._next = 0

    def start(self, steps_in_flight: Literal[1, 2]) -> None:
        """Begin anew with an empty pool."""
        max_num_seqs, max_model_len, max_num_batched_tokens = self._limits
        config = EngineConfig(
            num_blocks=self._model.num_blocks,
            namespace=_NAMESPACE,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            cost=GPU_COST,
            target_step_s=0.0,
            vocab_size=self._model.config.vocab_size,
            steps_in_flight=steps_in_flight,
        )
        self.runner = _Watched(self._model.runner)
        self.core = EngineCore(config, self.runner, time.perf_counter)
        self.first_s: dict[RequestId, float] = {}
        self.last_s = 0.0
        self.num_tokens = 0
        self.done: set[RequestId] = set()

    def submit(self, ids: Sequence[int], max_tokens: int) -> RequestId:
        """Ask for so many tokens after a prompt, the likeliest ones."""
        request = RequestId(self._next)
        self._next += 1
        params = SamplingParams(max_tokens=max_tokens)
        message = Submit(request, LeaseId(request), "bench", 0, list(ids), params, keep_lease=False)
        for answer in self.core.handle(message, time.perf_counter()):
            assert not isinstance(answer, Done), f"a request was refused: {answer}"
        return request

    def step(self) -> None:
        """Run one step, and encode what it says for the front."""
        messages = self.core.step(time.perf_counter())
        for message in messages:
            encode(message)
        now = time.perf_counter()
        for message in messages:
            if isinstance(message, Tokens):
                for delta in message.deltas:
                    self.first_s.setdefault(delta.request, now)
                    self.num_tokens += len(delta.ids)
                self.last_s = now
            elif isinstance(message, Done):
                self.done.add(message.request)

    def run_to_first_tokens(self, requests: Sequence[RequestId]) -> None:
        """Step until each of these requests has a token."""
        while not all(request in self.first_s for request in requests):
            assert self.core.has_work, "the engine has nothing to do"
            self.step()

    def finish(self) -> None:
        """Step until all requests have ended."""
        while self.core.has_work:
            self.step()


def prompts(batch: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, which share none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (batch, length), generator=generator).tolist()


def host_rows(
    bench: Bench,
    raw: RawConfig = QWEN3_8B,
    *,
    batch: int = 256,
    prompt: int = 128,
    num_steps: int = 60,
    max_num_batched_tokens: int = 2048,
) -> Rows:
    """Yield what a decode step of the engine takes on the host and the device, with one and two steps in flight."""
    num_tokens = num_steps + 2 * _WARM_UP_STEPS + blocks_of(batch * prompt, max_num_batched_tokens) + batch
    engine = BenchEngine(
        bench.stream,
        raw,
        max_num_seqs=batch,
        max_model_len=prompt + num_tokens + 1,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    in_flight: Literal[1, 2]
    for in_flight in (1, 2):
        engine.start(in_flight)
        requests = [engine.submit(ids, num_tokens) for ids in prompts(batch, prompt, raw["vocab_size"], in_flight)]
        engine.run_to_first_tokens(requests)
        for _ in range(_WARM_UP_STEPS):
            engine.step()
        walls, hosts = [], []
        engine.runner.device_s.clear()
        for _ in range(num_steps):
            waited_s, start = engine.stream.waited_s, time.perf_counter()
            engine.step()
            wall_s = time.perf_counter() - start
            walls.append(wall_s)
            hosts.append(wall_s - (engine.stream.waited_s - waited_s))
        wall_s, device_s = statistics.median(walls), statistics.median(engine.runner.device_s)
        yield {
            "steps in flight": in_flight,
            "sequences": batch,
            "step ms": wall_s * 1e3,
            "device ms": device_s * 1e3,
            "host ms": statistics.median(hosts) * 1e3,
            "not hidden ms": (wall_s - device_s) * 1e3,
        }
        engine.core.close()


def prefix_rows(
    bench: Bench,
    raw: RawConfig = QWEN3_8B,
    *,
    system: int = 4096,
    own: int = 32,
    repeats: int = 3,
    max_num_batched_tokens: int = 2048,
) -> Rows:
    """Yield the time to the first token of a prompt, and of another that begins with the same system prompt."""
    engine = BenchEngine(
        bench.stream,
        raw,
        max_num_seqs=repeats + 1,
        max_model_len=system + own + 8,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    engine.start(2)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(repeats + 1):
        [shared] = prompts(1, system, raw["vocab_size"], number)
        for is_cached in (False, True):
            [rest] = prompts(1, own, raw["vocab_size"], 1000 + 2 * number + is_cached)
            start = time.perf_counter()
            request = engine.submit(shared + rest, 2)
            engine.run_to_first_tokens([request])
            if number:  # The first compiles what is not compiled yet.
                seconds[is_cached].append(engine.first_s[request] - start)
            engine.finish()
    cold, cached = statistics.median(seconds[False]), statistics.median(seconds[True])
    engine.core.close()
    yield {
        "system prompt": system,
        "own tokens": own,
        "first token ms": cold * 1e3,
        "cached ms": cached * 1e3,
        "saved %": (1.0 - cached / cold) * 100.0,
    }


def served_row(
    stream: Stream, raw: RawConfig, ids: Sequence[Sequence[int]], max_tokens: int, max_num_batched_tokens: int = 2048
) -> Row:
    """Return how fast the engine answers prompts that all come at once."""
    engine = BenchEngine(
        stream,
        raw,
        max_num_seqs=len(ids),
        max_model_len=max(map(len, ids)) + max_tokens + 1,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    engine.start(2)
    for prompt in ids:  # Compiles what is not compiled yet; prompts of the same tokens would be found cached.
        engine.submit([token ^ 1 for token in prompt], 2)
    engine.finish()
    engine.start(2)
    start = time.perf_counter()
    for prompt in ids:
        engine.submit(prompt, max_tokens)
    engine.finish()
    engine.core.close()
    seconds = engine.last_s - start
    return {"tokens": engine.num_tokens, "seconds": seconds, "tok/s": engine.num_tokens / seconds}
