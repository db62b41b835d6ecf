"""Multi-turn chat load against a real daemon: sessions over one system prompt, several turns each, streamed.

`python -m chatd.bench chat` starts a daemon for each weight format, measures its cold start to the first token, runs
the same conversations at each number of sessions, and prints output rate, time to first token and gap between tokens,
and how much of each later turn's history came from the cache. `--neighbor` keeps one core busy meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chatd.bench.record import write_json
from chatd.client import Client, Session
from chatd.local_daemon import LocalDaemon
from chatd.protocol import OutputTextDelta, Params, ResponseCompleted, ResponseIncomplete
from chatd.testing.ports import free_port

SYSTEM_WORDS = 400
USER_WORDS = 30
TEXT = (
    "memory that many readers share is counted once and given back once while each of them still sees the same "
    "blocks as before and a turn costs only what is new in it because the rest was kept from the last one"
)
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One turn as its client saw it; times in seconds."""

    turn: int
    ttft_s: float
    gaps_s: Sequence[float]
    num_output: int
    num_input: int
    num_cached: int
    num_history: int


def text(seed: int, num_words: int) -> str:
    """Return words that differ from seed to seed."""
    return " ".join(WORDS[(seed * 7 + i * (1 + seed % 5)) % len(WORDS)] for i in range(num_words))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def run_turn(session: Session, turn: int, content: str, params: Params, num_history: int) -> TurnFigures:
    """Say something and time the answer."""
    started = time.perf_counter()
    stamps: list[float] = []
    async for event in session.say(content, params=params):
        if isinstance(event, OutputTextDelta):
            stamps.append(time.perf_counter())
        elif isinstance(event, ResponseCompleted | ResponseIncomplete):
            usage = event.usage
    return TurnFigures(
        turn=turn,
        ttft_s=(stamps[0] if stamps else time.perf_counter()) - started,
        gaps_s=[later - earlier for earlier, later in itertools.pairwise(stamps)],
        num_output=usage.output_tokens,
        num_input=usage.input_tokens,
        num_cached=usage.cached_tokens,
        num_history=num_history,
    )


async def run_session(client: Client, run: int, number: int, turns: int, params: Params) -> list[TurnFigures]:
    """Hold one conversation; nothing of an earlier run is in its prompt, so nothing of that is in the cache."""
    session = await client.create_session(system=f"Run {run}. {text(0, SYSTEM_WORDS)}")
    figures: list[TurnFigures] = []
    for turn in range(turns):
        history = figures[-1].num_input + figures[-1].num_output if figures else 0
        content = f"Session {number} turn {turn}: " + text(number * 31 + turn, USER_WORDS)
        figures.append(await run_turn(session, turn, content, params, history))
    return figures


async def run_load(url: str, run: int, num_sessions: int, turns: int, max_tokens: int) -> dict[str, Any]:
    """Hold `num_sessions` conversations at once and return their figures."""
    params = Params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    async with Client.connect(url) as client:
        started = time.perf_counter()
        rows = await asyncio.gather(*(run_session(client, run, i, turns, params) for i in range(num_sessions)))
        wall_s = time.perf_counter() - started
    all_turns = [figures for session in rows for figures in session]
    later = [figures for figures in all_turns if figures.turn > 0]
    gaps = [gap for figures in all_turns for gap in figures.gaps_s]
    output = sum(figures.num_output for figures in all_turns)
    return {
        "sessions": num_sessions,
        "turns": turns,
        "wall_s": wall_s,
        "output_tokens": output,
        "output_tok_s": output / wall_s,
        "ttft_first_p50_s": percentile([figures.ttft_s for figures in all_turns if figures.turn == 0], 0.5),
        "ttft_later_p50_s": percentile([figures.ttft_s for figures in later], 0.5),
        "ttft_later_p95_s": percentile([figures.ttft_s for figures in later], 0.95),
        "itl_p50_s": percentile(gaps, 0.5),
        "itl_p99_s": percentile(gaps, 0.99),
        "history_cached": min((figures.num_cached / figures.num_history for figures in later), default=1.0),
    }


async def first_token_s(url: str) -> float:
    """Return the seconds from now until a new session's first token."""
    started = time.perf_counter()
    async with Client.connect(url) as client:
        session = await client.create_session()
        async for _ in session.stream("Hello", params=Params(max_tokens=1, temperature=0.0)):
            break
    return time.perf_counter() - started


@contextmanager
def busy_neighbor(wanted: bool) -> Iterator[None]:
    """Keep one core busy with another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def measure(quantization: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a daemon, run every load on it, and stop it."""
    url = options.url or f"http://127.0.0.1:{free_port()}"
    runs: list[dict[str, Any]] = []

    def loads(start_s: float | None) -> None:
        for num_sessions in options.sessions:
            for _ in range(options.repeat):
                figures = asyncio.run(run_load(url, len(runs), num_sessions, options.turns, options.max_tokens))
                runs.append({"quantization": quantization, "start_to_token_s": start_s, **figures})

    if options.url:
        loads(None)
        return runs
    arguments = [options.model, "--no-auth", "--quantization", quantization, "--log-level", "warning"]
    started = time.perf_counter()
    with LocalDaemon(url, arguments, log_path=Path(options.log)) as daemon:
        daemon.wait_ready(lambda phase, done: None)
        start_s = time.perf_counter() - started
        start_s += asyncio.run(first_token_s(url))
        with busy_neighbor(options.neighbor):
            loads(start_s)
    return runs


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Print a table of medians over the repeats."""
    table = Table("weights", "sessions", "tok/s", "TTFT turn 1", "TTFT later", "ITL p50", "ITL p99", "cached", "start")
    for key in dict.fromkeys((run["quantization"], run["sessions"]) for run in runs):
        same = [run for run in runs if (run["quantization"], run["sessions"]) == key]

        def middle(name: str, of: Sequence[dict[str, Any]] = same) -> float:
            return float(statistics.median(run[name] for run in of))

        table.add_row(
            str(key[0]),
            str(key[1]),
            f"{middle('output_tok_s'):.1f}",
            f"{middle('ttft_first_p50_s'):.2f} s",
            f"{middle('ttft_later_p50_s'):.2f} s",
            f"{middle('itl_p50_s') * 1e3:.0f} ms",
            f"{middle('itl_p99_s') * 1e3:.0f} ms",
            f"{min(run['history_cached'] for run in same):.1%}",
            f"{same[0]['start_to_token_s']:.1f} s" if same[0]["start_to_token_s"] else "–",
        )
    Console().print(table)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench chat", description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a daemon that is running already and asks for no key")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", nargs="+", default=["fp16", "int8"])
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--neighbor", action="store_true", help="keep one core busy with another process")
    parser.add_argument("--log", default="chatd-bench.log", help="where the daemon's log goes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    runs = [run for quantization in options.quantization for run in measure(quantization, options)]
    show(runs)
    write_json(options.json, "chat", {"neighbor": options.neighbor, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
