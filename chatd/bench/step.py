"""Where the time of one decode step goes: `python -m chatd.bench step`.

A real engine core on the real model, in a process with the environment that the engine's own gets; requests of equal
context decode side by side, and each part of a step is timed around its calls. Each figure is a median over steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatd.engine.engine_process import engine_environment
from chatd_kernels.cpus import available_cpus

PARTS = ("linears", "attention", "rest of the model", "input batch", "sampling", "plan and commit", "delivery")
_WARM_UP_STEPS = 8
_BUSY_LOOP = "while True: pass"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says and return the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.in_child:
        print(json.dumps(_measure(args, args.quantization[0], args.batch[0])))
        return 0
    results = []
    with _neighbor(args.neighbor):
        for quantization in args.quantization:
            for batch in args.batch:
                results.append(_run_child(args, quantization, batch))
    print(step_table(results))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chatd.bench step", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name, a folder, or a hub id")
    parser.add_argument("--quantization", nargs="+", default=["fp16", "int8"], choices=["fp16", "int8", "fp32"])
    parser.add_argument("--batch", nargs="+", type=int, default=[16], help="requests that decode side by side")
    parser.add_argument("--context", type=int, default=550, help="tokens of each request before the first step")
    parser.add_argument("--shared", type=int, default=0, help="of those, how many all requests have in common")
    parser.add_argument("--steps", type=int, default=60, help="steps that are timed")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0, top_p is 0.9")
    parser.add_argument("--threads", type=int, default=0, help="0 takes what this process may use")
    parser.add_argument("--neighbor", action="store_true", help="beside a process that keeps one CPU busy")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run_child(args: argparse.Namespace, quantization: str, batch: int) -> dict[str, Any]:
    threads = args.threads or available_cpus()
    command = [sys.executable, "-m", "chatd.bench", "step", "--in-child", "--quantization", quantization]
    command += ["--batch", str(batch), "--model", args.model, "--context", str(args.context), "--threads", str(threads)]
    command += ["--shared", str(args.shared), "--steps", str(args.steps), "--temperature", str(args.temperature)]
    done = subprocess.run(command, env=engine_environment(threads), check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"neighbor": args.neighbor}


@contextmanager
def _neighbor(is_wanted: bool) -> Iterator[None]:
    """Keep one CPU busy meanwhile."""
    if not is_wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]) as busy:
        try:
            yield
        finally:
            busy.kill()


class _Timers:
    """Sums of seconds by part, for the step that runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def clear(self) -> None:
        self.seconds = dict.fromkeys(("linears", "attention", "forward", "input batch", "sampling", "execute"), 0.0)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time each call of a function or method from now on."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started

        setattr(owner, name, timed)


def _measure(args: argparse.Namespace, quantization: str, batch: int) -> dict[str, Any]:
    """Load the model, bring `batch` requests to the same context, and time steps."""
    # Here, and not above: torch must load in the child's environment only.
    import numpy as np

    from chatd.engine import model_runner
    from chatd.engine.input_batch import InputBatch
    from chatd.engine.messages import LeaseId, Submit, encode
    from chatd.engine.options import EngineOptions
    from chatd.engine.plan import RequestId
    from chatd.engine.sampler import Sampler
    from chatd.engine.sampling import SamplingParams
    from chatd.engine.startup import build_engine
    from chatd.models import attention, decoder
    from chatd.models import quantization as packing
    from chatd.models.registry import resolve

    files = resolve(args.model)
    options = EngineOptions(
        model_id=files.id,
        model_path=str(files.path),
        model_digest=files.digest,
        quantization=quantization,  # type: ignore[arg-type]
        num_threads=args.threads,
        max_num_seqs=max(64, batch),
        max_num_batched_tokens=max(512, batch),
    )
    core, ready = build_engine(options, time.monotonic, lambda _phase, _progress: None)
    timers = _Timers()
    timers.clear()
    timers.wrap(packing.PackedLinear, "__call__", "linears")
    timers.wrap(attention, "paged_attention", "attention")
    timers.wrap(decoder.Decoder, "forward", "forward")
    timers.wrap(InputBatch, "build", "input batch")
    timers.wrap(Sampler, "sample", "sampling")
    timers.wrap(model_runner.ModelRunner, "execute", "execute")

    rng = np.random.default_rng(0)
    shared = rng.integers(10, ready.vocab_size, args.shared).tolist()
    for i in range(batch):
        ids = shared + rng.integers(10, ready.vocab_size, args.context - args.shared).tolist()
        params = SamplingParams(
            max_tokens=args.steps + _WARM_UP_STEPS + 10 * batch,
            ignore_eos=True,
            temperature=args.temperature,
            top_p=0.9 if args.temperature else 1.0,
            seed=i,
        )
        core.handle(Submit(RequestId(i), LeaseId(i), "bench", 0, ids, params), time.monotonic())
    started = time.perf_counter()
    while any(request.num_remaining_tokens != 1 for request in core.scheduler.requests.values()):
        core.step(time.monotonic())
    prefill_s = time.perf_counter() - started
    rows: list[dict[str, float]] = []
    for _ in range(args.steps + _WARM_UP_STEPS):
        timers.clear()
        started = time.perf_counter()
        said = core.step(time.monotonic())
        stepped = time.perf_counter()
        frames = b"".join([encode(message) for message in said])
        ended = time.perf_counter()
        part = timers.seconds
        rows.append(
            {
                "linears": part["linears"],
                "attention": part["attention"],
                "rest of the model": part["forward"] - part["linears"] - part["attention"],
                "input batch": part["input batch"],
                "sampling": part["sampling"],
                "plan and commit": stepped - started - part["execute"],
                "delivery": ended - stepped,
                "step": ended - started,
                "bytes": float(len(frames)),
            }
        )
    timed = rows[_WARM_UP_STEPS:]
    medians = {name: statistics.median(row[name] for row in timed) for name in timed[0]}
    step_ms = medians["step"] * 1e3
    outside = sum(medians[name] for name in PARTS[3:])
    return {
        "model": files.id,
        "quantization": quantization,
        "batch": batch,
        "context": args.context,
        "shared": args.shared,
        "temperature": args.temperature,
        "threads": args.threads,
        "prefill_tokens_per_s": batch * (args.context - args.shared) / prefill_s,
        "step_ms": step_ms,
        "step_ms_min": min(row["step"] for row in timed) * 1e3,
        "step_ms_p95": sorted(row["step"] for row in timed)[int(0.95 * len(timed))] * 1e3,
        "tokens_per_s": batch / medians["step"],
        "parts_ms": {name: medians[name] * 1e3 for name in PARTS},
        "outside_the_model": outside / medians["step"],
    }


def step_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table, one column for each run."""
    heads = [f"{r['quantization']}, batch {r['batch']}" + (", busy neighbor" if r["neighbor"] else "") for r in results]
    lines = [f"| ms of a decode step, {results[0]['context']} tokens of context | {' | '.join(heads)} |"]
    lines.append("|---" * (len(results) + 1) + "|")

    def row(name: str, values: Sequence[str]) -> None:
        lines.append(f"| {name} | {' | '.join(values)} |")

    for part in PARTS:
        row(part, [f"{r['parts_ms'][part]:.2f}" for r in results])
    row("**step, median**", [f"{r['step_ms']:.1f}" for r in results])
    row("step, fastest", [f"{r['step_ms_min']:.1f}" for r in results])
    row("step, p95", [f"{r['step_ms_p95']:.1f}" for r in results])
    row("tokens per second", [f"{r['tokens_per_s']:.0f}" for r in results])
    row("outside the model", [f"{r['outside_the_model']:.1%}" for r in results])
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
