"""How long a device stands still between two steps: `python -m chatd.bench ahead`.

A real engine core plans decodes for a device that takes a fixed time for each step and computes nothing. The device is
idle from the end of a step until the next one is launched: with one step in flight for all that the engine does in
between, one step ahead for what of that does not fit into a step of the device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chatd.bench.echo_runner import EchoRunner
from chatd.bench.record import write_json
from chatd.bench.tables import markdown_table
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import LeaseId, Submit, encode
from chatd.engine.plan import Plan, RequestId, StepOutput
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.prefix_index import Namespace

BATCH_SIZES = (64, 256)
DEVICE_MS = (1.0, 2.0, 5.0, 10.0)
_CONTEXT = 512
_WARM_UP_STEPS = 10
_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)


@dataclass(slots=True)
class _PacedStep:
    runner: PacedRunner
    plan: Plan
    done_at: float

    def result(self) -> StepOutput:
        wait_s = self.done_at - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        return self.runner.answer(self.plan)


class PacedRunner:
    """A device that takes a fixed time for each step, one after another.

    Args:
        device_s: Seconds of a step.

    Attributes:
        idle_s: For each step but the first, seconds from the end of the one before until it was launched.
    """

    def __init__(self, device_s: float) -> None:
        self.idle_s: list[float] = []
        self._device_s = device_s
        self._done_at = -1.0
        self._echo = EchoRunner()

    def answer(self, plan: Plan) -> StepOutput:
        """Return what comes of a plan."""
        return self._echo.execute(plan)

    def launch(self, plan: Plan) -> _PacedStep:
        """Start a step behind the one in flight."""
        now = time.perf_counter()
        if self._done_at >= 0:
            self.idle_s.append(max(0.0, now - self._done_at))
        self._done_at = max(now, self._done_at) + self._device_s
        return _PacedStep(self, plan, self._done_at)

    def execute(self, plan: Plan) -> StepOutput:
        """Start a step and wait for its end."""
        return self.launch(plan).result()


def ahead_figures(batch_size: int, device_s: float, steps_in_flight: Literal[1, 2], num_steps: int) -> dict[str, float]:
    """Return medians over decode steps: milliseconds of CPU a step, and of the device standing still."""
    length = _CONTEXT + num_steps + 2 * _WARM_UP_STEPS + 64
    config = EngineConfig(
        num_blocks=batch_size * (length // 16 + 2),
        namespace=_NAMESPACE,
        max_model_len=length,
        max_num_seqs=batch_size,
        max_num_batched_tokens=batch_size * _CONTEXT,
        steps_in_flight=steps_in_flight,
    )
    runner = PacedRunner(device_s)
    core = EngineCore(config, runner, time.perf_counter)
    params = SamplingParams(max_tokens=num_steps + 2 * _WARM_UP_STEPS)
    for number in range(batch_size):
        ids = [number + 1, *range(_CONTEXT - 1)]
        core.handle(Submit(RequestId(number), LeaseId(number), "acme", 0, ids, params), 0.0)
    for _ in range(_WARM_UP_STEPS):
        core.step(time.perf_counter())
    assert all(request.is_decode or steps_in_flight == 2 for request in core.scheduler.running)
    gc.collect()
    gc.freeze()
    gc.disable()
    runner.idle_s.clear()
    cpu_ms = []
    for _ in range(num_steps):
        started = time.process_time()
        for message in core.step(time.perf_counter()):
            encode(message)
        cpu_ms.append((time.process_time() - started) * 1e3)
    gc.enable()
    gc.unfreeze()
    core.close()
    idle_ms = [seconds * 1e3 for seconds in runner.idle_s]
    return {
        "cpu_ms": round(statistics.median(cpu_ms), 3),
        "idle_ms": round(statistics.median(idle_ms), 3),
        "idle_p90_ms": round(sorted(idle_ms)[int(len(idle_ms) * 0.9)], 3),
    }


def ahead_table(figures: dict[str, Any]) -> str:
    """Return how long a device stands still after each step, with one step in flight and with two."""
    heads = ["sequences", "a step of the device", "CPU for a step", "it stands still", "one step ahead", "p90"]
    rows = []
    steps = figures["steps"]
    for batch, device_ms in dict.fromkeys((row["batch"], row["device_ms"]) for row in steps):
        same = {row["steps_in_flight"]: row for row in steps if (row["batch"], row["device_ms"]) == (batch, device_ms)}
        alone, ahead = same[1], same[2]
        rows.append(
            [
                str(batch),
                f"{device_ms:.0f} ms",
                f"{ahead['cpu_ms']:.2f} ms",
                f"{alone['idle_ms']:.2f} ms",
                f"{ahead['idle_ms']:.2f} ms",
                f"{ahead['idle_p90_ms']:.2f} ms",
            ]
        )
    return markdown_table(heads, rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench ahead", description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="decode steps of each measurement")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCH_SIZES), help="sequences that decode")
    parser.add_argument("--device-ms", nargs="+", type=float, default=list(DEVICE_MS), help="what a step takes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print(f"{'sequences':>10}{'device, ms':>12}{'in flight':>11}{'CPU, ms':>10}{'device idle, ms':>17}{'p90':>8}")
    for batch in options.batch:
        for device_ms in options.device_ms:
            for in_flight in (1, 2):
                figures = ahead_figures(batch, device_ms / 1e3, 1 if in_flight == 1 else 2, options.steps)
                rows.append({"batch": batch, "device_ms": device_ms, "steps_in_flight": in_flight, **figures})
                idle = f"{figures['idle_ms']:17.3f}{figures['idle_p90_ms']:8.3f}"
                print(f"{batch:10}{device_ms:12.1f}{in_flight:11}{figures['cpu_ms']:10.3f}{idle}")
    write_json(options.json, "ahead", {"steps": rows})
    return 0
