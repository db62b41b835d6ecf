"""What type-ahead does to the time to the first token: `python -m chatd.bench typeahead`.

A person types messages of different lengths into one session of a real daemon, and presses Enter a while after the last
key. Each message is typed once with type-ahead and once without, in turn, so that both see the same machine. Beside the
time to the first token stand the rows of the prompt that were left to compute, and what one step of decoding takes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from chatd.bench.chat import text
from chatd.bench.record import write_json
from chatd.client import Client, Session
from chatd.local_daemon import LocalDaemon
from chatd.protocol import OutputTextDelta, Params
from chatd.testing.ports import free_port

KEYS_AT_ONCE = 12
"""Characters between two times that what is typed is told."""


async def type_message(session: Session, content: str, pause_s: float) -> None:
    """Type a message ahead, and return when what can be computed of it is."""
    for end in range(KEYS_AT_ONCE, len(content), KEYS_AT_ONCE):
        await session.prefill(content[:end])
        await asyncio.sleep(pause_s)
    async with asyncio.timeout(60):
        while not (await session.prefill(content)).computed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def ask(session: Session, content: str, num_output: int) -> dict[str, float]:
    """Send a message and return what its first token took, in seconds, and the rows that were computed for it."""
    turn = session.say(content, params=Params(max_tokens=num_output, temperature=0.0, ignore_eos=True))
    started, times = time.perf_counter(), []
    async for event in turn:
        if isinstance(event, OutputTextDelta):
            times.append(time.perf_counter())
    assert turn.usage is not None, "a turn without an end"
    steps = [b - a for a, b in pairwise(times)]
    return {
        "ttft_s": times[0] - started,
        "step_s": statistics.median(steps),
        "rows": turn.usage.input_tokens - turn.usage.cached_tokens,
    }


async def measure(
    url: str, lengths: Sequence[int], repeat: int, num_output: int, pause_s: float
) -> list[dict[str, Any]]:
    """Type and send messages of so many words, with and without type-ahead; return the medians."""
    found = []
    async with Client.connect(url) as client:
        for num_words in lengths:
            taken: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for number in range(repeat):
                for is_ahead in (False, True):
                    session = await client.create_session(system=text(1, 40))
                    await ask(session, text(2 * number + is_ahead, 20), 4)
                    content = text(31 * number + 7 * num_words + is_ahead, num_words)
                    if is_ahead:
                        await type_message(session, content, pause_s)
                    taken[is_ahead].append(await ask(session, content, num_output))
                    await client.close_session(session.id)
            found.append(
                {
                    "words": num_words,
                    **{
                        f"{'ahead' if is_ahead else 'plain'}_{name}": statistics.median(row[name] for row in rows)
                        for is_ahead, rows in taken.items()
                        for name in ("ttft_s", "step_s", "rows")
                    },
                }
            )
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench typeahead", description=__doc__)
    parser.add_argument("--url", help="a daemon that is running already and asks for no key")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--words", type=int, nargs="+", default=[30, 120, 480], help="of the messages")
    parser.add_argument("--output", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two times that typing is told")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--log", default="chatd-bench.log", help="where the daemon's log goes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    url = options.url or f"http://127.0.0.1:{free_port()}"

    def run() -> list[dict[str, Any]]:
        return asyncio.run(measure(url, options.words, options.repeat, options.output, options.pause))

    if options.url:
        rows = run()
    else:
        with LocalDaemon(
            url, [options.model, "--no-auth", "--log-level", "warning"], log_path=Path(options.log)
        ) as daemon:
            daemon.wait_ready(lambda phase, done: None)
            rows = run()
    print(f"{'words':>6} {'':8} {'TTFT':>9} {'one step':>9} {'rows':>6}")
    for row in rows:
        for name in ("plain", "ahead"):
            ttft_ms, step_ms = (1e3 * row[f"{name}_{what}"] for what in ("ttft_s", "step_s"))
            print(f"{row['words']:>6} {name:8} {ttft_ms:>6.0f} ms {step_ms:>6.0f} ms {row[f'{name}_rows']:>6.0f}")
    write_json(options.json, "typeahead", {"output": options.output, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
