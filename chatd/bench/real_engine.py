"""The real model under the engine core, in a process with the environment that the engine's own gets.

A benchmark that times it calls `run_in_engine_process`, which runs the same benchmark once more with `--in-child`; that
one builds a `RealEngine` and prints its figures as JSON. Only there torch is loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from chatd.engine.engine_process import engine_environment
from chatd.engine.messages import Done, EngineMessage, FrontMessage, LeaseId, RequestClass, Submit, Tokens
from chatd.engine.plan import Plan, RequestId, Runner, StepOutput
from chatd.engine.sampling import SamplingParams
from chatd_kernels.cpus import available_cpus

if TYPE_CHECKING:
    from chatd.engine.core import EngineCore


def run_in_engine_process(name: str, arguments: Sequence[str], in_child: str = "") -> Any:
    """Run `python -m chatd.bench NAME --in-child [IN_CHILD] ARGUMENTS` and return what it prints."""
    command = [sys.executable, "-m", "chatd.bench", name, "--in-child", *([in_child] if in_child else []), *arguments]
    environment = engine_environment(available_cpus())
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


class CountingRunner:
    """Executes plans on another runner, and counts.

    Attributes:
        num_rows: Computed so far.
        num_stored: Blocks copied out of the pool so far.
        num_loaded: Blocks copied into it so far.
        move_s: Seconds that these copies took.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_rows = self.num_stored = self.num_loaded = 0
        self.move_s = 0.0

    def execute(self, plan: Plan) -> StepOutput:
        """Run a step."""
        output = self._runner.execute(plan)
        self.num_rows += plan.num_tokens
        self.num_stored += len(plan.stores)
        self.num_loaded += len(plan.loads)
        self.move_s += output.move_s
        return output


class RealEngine:
    """An engine core on a real model, stepped by hand; all times are `time.perf_counter`'s.

    Args:
        model: A built-in name, a folder, or a hub id.
        quantization: Format of the weights.
        options: More fields of `EngineOptions`.

    Attributes:
        core: The engine core.
        ready: What it said at start.
        runner: Counts what plans do.
        submitted_s: When each request was submitted.
        first_token_s: When each request's first token came out.
        last_token_s: When each request's last token so far came out.
        done_s: When each request ended.
        done: The end of each request that has ended.
        outputs: The ids of each answer.
    """

    def __init__(self, model: str, quantization: str, **options: Any) -> None:
        # Here, and not above: torch must load in the child's environment only.
        from chatd.engine.options import EngineOptions
        from chatd.engine.startup import build_engine
        from chatd.models.registry import resolve

        files = resolve(model)
        engine_options = EngineOptions(
            model_id=files.id,
            model_path=str(files.path),
            model_digest=files.digest,
            quantization=quantization,  # type: ignore[arg-type]
            **options,
        )
        self.core: EngineCore
        self.core, self.ready = build_engine(engine_options, time.perf_counter, lambda _phase, _progress: None)
        self.runner = CountingRunner(self.core.pipeline.runner)
        self.core.pipeline.runner = self.runner
        self.submitted_s: dict[int, float] = {}
        self.first_token_s: dict[int, float] = {}
        self.last_token_s: dict[int, float] = {}
        self.done_s: dict[int, float] = {}
        self.done: dict[int, Done] = {}
        self.outputs: dict[int, list[int]] = {}

    def submit(
        self,
        request: int,
        ids: Sequence[int],
        *,
        max_tokens: int,
        tenant: str = "bench",
        lease: int | None = None,
        base_len: int = 0,
        keep_lease: bool = False,
        request_class: RequestClass = RequestClass.INTERACTIVE,
    ) -> None:
        """Submit a request that answers with exactly `max_tokens` greedy tokens."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        lease_id = LeaseId(request if lease is None else lease)
        self.submitted_s[request] = time.perf_counter()
        self.send(Submit(RequestId(request), lease_id, tenant, base_len, list(ids), params, request_class, keep_lease))

    def send(self, message: FrontMessage) -> None:
        """Hand a message to the core."""
        self._see(self.core.handle(message, time.perf_counter()))

    def step(self) -> float:
        """Run one step and return its seconds."""
        started = time.perf_counter()
        said = self.core.step(started)
        self._see(said)
        return time.perf_counter() - started

    def run(self) -> float:
        """Run until nothing is left to do and return the seconds."""
        started = time.perf_counter()
        while self.core.has_work:
            self.step()
        return time.perf_counter() - started

    def ttft_s(self, request: int) -> float:
        """Return the seconds from a request's submission to its first token."""
        return self.first_token_s[request] - self.submitted_s[request]

    def _see(self, said: Iterable[EngineMessage]) -> None:
        now = time.perf_counter()
        for message in said:
            if isinstance(message, Tokens):
                for delta in message.deltas:
                    self.first_token_s.setdefault(delta.request, now)
                    self.last_token_s[delta.request] = now
                    self.outputs.setdefault(delta.request, []).extend(delta.ids)
            elif isinstance(message, Done):
                self.done_s[message.request] = now
                self.done[message.request] = message
                assert not message.error_code, f"request {message.request} failed: {message.error_message}"
