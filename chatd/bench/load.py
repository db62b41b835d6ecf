"""Hours of a busy day in minutes: `python -m chatd.bench load --minutes 30`.

Streams go from one resident session to another, a part of the turns is cancelled at random, connections are lost and
come back, and many sockets only sit there. At the end nothing may have failed, and blocks, tasks and descriptors of the
daemon are back where they began; its memory has not grown by more than a twentieth since the warm-up. The exit code
tells. Without `--url` it starts a daemon of its own, with the small model and little KV memory, so that sessions lose
their blocks and get them back all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from chatd.bench.chat import percentile
from chatd.bench.load_traffic import Crowd, Shape
from chatd.bench.record import write_json
from chatd.client import Client
from chatd.config import client_defaults
from chatd.local_daemon import LocalDaemon
from chatd.protocol import Params
from chatd.testing.ports import free_port

MAX_GROWTH = 0.05
"""Of the memory since the warm-up, at most."""

SETTLE_S = 30.0
"""What was used is given back within this, once everybody is gone."""

MAX_WARM_UP_S = 120.0
WARM_UP_SHARE = 0.4
_SAMPLE_S = 1.0
_WINDOW_SHARE = 0.15

_RETURNS = ("blocks", "tasks", "descriptors")
_PROCESSES = ("front", "engine")
_COUNTERS = {
    "chatd_engine_restarts_total": "engine restarts",
    "chatd_engine_failed_steps_total": "failed steps",
    "chatd_engine_integrity_errors_total": "integrity errors",
    "chatd_websocket_overloads_total": "overloads",
    "chatd_request_failure_total": "failed answers",
}


@dataclass(slots=True)
class Watch:
    """What the daemon uses, sample by sample.

    Attributes:
        url: Of the daemon.
        key: For it.
        process: The daemon's own process, where that is known.
        memory: Bytes by process ("front", "engine"), as (seconds, bytes) since the beginning.
    """

    url: str
    key: str | None
    process: psutil.Process | None
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    async def metrics(self, http: httpx.AsyncClient) -> dict[str, float]:
        """Return all samples of `/metrics`, summed over their labels, and active blocks by themselves."""
        answer = await http.get(f"{self.url}/metrics")
        answer.raise_for_status()
        sums: dict[str, float] = {}
        for line in answer.text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                bare = name.partition("{")[0]
                sums[bare] = sums.get(bare, 0.0) + float(value)
                if name == 'chatd_kv_cache_blocks{state="active"}':
                    sums["blocks"] = float(value)
        return sums

    async def usage(self, http: httpx.AsyncClient) -> dict[str, float]:
        """Return what must come back to where it began."""
        found = await self.metrics(http)
        return {
            "blocks": found.get("blocks", 0.0),
            "tasks": found["chatd_asyncio_tasks"],
            "descriptors": found["chatd_open_fds"],
        }

    async def sample_memory(self) -> None:
        """Note the memory of each process once a second, until cancelled."""
        began = time.monotonic()
        while self.process is not None:
            processes = {"front": self.process}
            for child in self.process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "chatd.engine.process" in child.cmdline():
                        processes["engine"] = child
            for name, process in processes.items():
                with contextlib.suppress(psutil.Error):
                    self.memory.setdefault(name, []).append((time.monotonic() - began, process.memory_info().rss))
            await asyncio.sleep(_SAMPLE_S)


def growth(samples: Sequence[tuple[float, int]], seconds: float) -> float:
    """Return by which part memory grew from after the warm-up to the end, as medians over a while."""
    warm = min(MAX_WARM_UP_S, WARM_UP_SHARE * seconds)
    window = _WINDOW_SHARE * seconds
    first = [size for at, size in samples if warm <= at <= warm + window]
    last = [size for at, size in samples if seconds - window <= at <= seconds]
    if not first or not last:
        return 0.0
    return statistics.median(last) / statistics.median(first) - 1.0


async def run_load(shape: Shape, seconds: float, process: psutil.Process | None) -> dict[str, Any]:
    """Put the load on a daemon that is ready; return the figures, with what was wrong as `problems`."""
    headers = {"Authorization": f"Bearer {shape.key}"} if shape.key else {}
    watch = Watch(shape.url, shape.key, process)
    async with httpx.AsyncClient(headers=headers, timeout=30.0, trust_env=False) as http:
        # What is made at the first turn and kept is no leak.
        async with Client(shape.url, key=shape.key, allow_plaintext=True) as client:
            session = await client.create_session()
            async for _ in session.say("hello", params=Params(max_tokens=4)):
                pass
            await client.close_session(session.id)
        began = await _settled(watch, http, None)
        before = await watch.metrics(http)
        crowd = Crowd(shape)
        sampling = asyncio.create_task(watch.sample_memory())
        started = time.monotonic()
        await crowd.run(seconds)
        took_s = time.monotonic() - started
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        ended = await _settled(watch, http, began)
        after = await watch.metrics(http)
    traffic = crowd.traffic
    counters = {label: int(after.get(name, 0) - before.get(name, 0)) for name, label in _COUNTERS.items()}
    grown = {name: growth(samples, took_s) for name, samples in watch.memory.items()}
    errors = {name: number for name, number in traffic.errors.items() if number}
    problems = [f"{name}: {number}" for name, number in [*errors.items(), *counters.items()] if number]
    problems += [
        f"{name} were {began[name]:.0f}, are {ended[name]:.0f}" for name in _RETURNS if ended[name] > began[name]
    ]
    problems += [f"the {name}'s memory grew by {part:.1%}" for name, part in grown.items() if part > MAX_GROWTH]
    if process is not None:
        problems += [f"the {name}'s memory was not seen" for name in _PROCESSES if name not in grown]
    return {
        "seconds": round(took_s, 1),
        "streams": shape.streams,
        "sessions": shape.sessions,
        "idle": shape.idle,
        "counts": dict(sorted(traffic.counts.items())),
        "output_tok_s": round(traffic.counts["output tokens"] / took_s, 1),
        "ttft_p50_s": round(percentile(traffic.ttfts_s, 0.5), 3),
        "ttft_p95_s": round(percentile(traffic.ttfts_s, 0.95), 3),
        "itl_p50_s": round(percentile(traffic.gaps_s, 0.5), 4),
        "itl_p99_s": round(percentile(traffic.gaps_s, 0.99), 4),
        "began": began,
        "ended": ended,
        "memory_growth": {name: round(part, 4) for name, part in grown.items()},
        "counters": counters,
        "problems": problems,
    }


async def _settled(watch: Watch, http: httpx.AsyncClient, wanted: dict[str, float] | None) -> dict[str, float]:
    """Return what is used once that is no more than wanted, or does not change any more."""
    deadline = time.monotonic() + SETTLE_S
    usage = await watch.usage(http)
    while time.monotonic() < deadline:
        await asyncio.sleep(1.5)
        last, usage = usage, await watch.usage(http)
        if usage == last if wanted is None else all(usage[name] <= wanted[name] for name in _RETURNS):
            break
    return usage


def own_settings(folder: Path, num_connections: int) -> Path:
    """Write the settings of a daemon of its own and return where they are."""
    path = folder / "load.toml"
    path.write_text(
        f"[server]\nmax_connections_per_key = {num_connections}\nmax_connections_per_address = {num_connections}\n"
        f'[journal]\ndirectory = "{folder / "journal"}"\n'
    )
    return path


def show(figures: dict[str, Any]) -> None:
    """Print the figures and what was wrong."""
    table = Table("what", "figure", show_header=False)
    for name, value in figures["counts"].items():
        table.add_row(name, f"{value:,}")
    table.add_row("seconds", f"{figures['seconds']}")
    table.add_row("output tok/s", f"{figures['output_tok_s']}")
    table.add_row("TTFT p50, p95", f"{figures['ttft_p50_s']} s, {figures['ttft_p95_s']} s")
    table.add_row("gap p50, p99", f"{figures['itl_p50_s'] * 1e3:.0f} ms, {figures['itl_p99_s'] * 1e3:.0f} ms")
    for name in _RETURNS:
        table.add_row(f"{name} before, after", f"{figures['began'][name]:.0f}, {figures['ended'][name]:.0f}")
    for name, part in figures["memory_growth"].items():
        table.add_row(f"memory growth, {name}", f"{part:+.1%}")
    console = Console()
    console.print(table)
    for problem in figures["problems"]:
        console.print(f"[red]wrong[/red]  {problem}")


def main(arguments: Sequence[str]) -> int:
    """Run the load; return 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench load", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--url", help="a daemon that is running already; nobody else should use it meanwhile")
    parser.add_argument(
        "--key", help="for that daemon, whose metrics are read with it (default: CHATD_KEY, CHATD_KEY_FILE)"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-memory", default="96MiB", help="of the daemon that is started")
    parser.add_argument("--streams", type=int, default=16, help="turns at a time")
    parser.add_argument("--sessions", type=int, default=64, help="resident conversations")
    parser.add_argument("--idle", type=int, default=200, help="connections that do nothing")
    parser.add_argument("--cancel", type=float, default=0.3, help="part of the turns that are cancelled")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", default="chatd-load.log", help="where the daemon's log goes")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args(arguments)
    shape = Shape(
        options.url or f"http://127.0.0.1:{free_port()}",
        options.key or (client_defaults(options.url).key if options.url else None),
        options.streams,
        options.sessions,
        options.idle,
        options.cancel,
        options.max_tokens,
        options.seed,
    )
    seconds = 60 * options.minutes
    if options.url:
        figures = asyncio.run(run_load(shape, seconds, None))
    else:
        with tempfile.TemporaryDirectory(prefix="chatd-load-") as folder:
            settings = own_settings(Path(folder), options.idle + options.streams + 20)
            flags = [options.model, "--no-auth", "--config", str(settings), "--kv-memory", options.kv_memory]
            with LocalDaemon(shape.url, [*flags, "--log-level", "warning"], log_path=Path(options.log)) as daemon:
                daemon.wait_ready(lambda phase, done: None)
                figures = asyncio.run(run_load(shape, seconds, psutil.Process(daemon.pid)))
    show(figures)
    write_json(options.json, "load", figures)
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
