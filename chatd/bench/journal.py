"""What keeping conversations costs: `python -m chatd.bench journal`.

Turns are committed by one, 16 and 64 writers at a time, each waiting for its acknowledgement as sessions do: a user's
message with the answer that begins, then the answer's end. Then a journal of many messages is made, opened, searched
and erased from. Beside each run stands what an fsync of this disk takes, which is the least that a commit can.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from chatd.bench.record import write_json
from chatd.bench.tables import Figures, markdown_table
from chatd.journal.directory import DATABASE
from chatd.journal.journal import Journal
from chatd.journal.records import Change, SaveMessage, SaveSession
from chatd.testing.journal_records import make_answer, make_session, make_user_message

_WRITERS = (1, 16, 64)
_TOKENS = 150
_TOKENS_IN_FLIGHT = 4
_NUM_OWNERS = 20


class _Texts:
    """Texts of about 600 characters, with common and rare words."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        letters = string.ascii_lowercase
        self.words = ["".join(self.rng.choices(letters, k=self.rng.randint(2, 10))) for _ in range(20000)]
        self._weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(self.words))))

    def text(self) -> str:
        return " ".join(self.rng.choices(self.words, cum_weights=self._weights, k=100))


def fsync_us(directory: Path) -> float:
    """Return microseconds of writing a page to a file and having it on the disk."""
    times = []
    with open(directory / "fsync", "wb") as file:
        for _ in range(200):
            file.write(bytes(4096))
            started = time.perf_counter()
            file.flush()
            os.fdatasync(file.fileno())
            times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


async def commit_figures(directory: Path, num_writers: int, seconds: float) -> dict[str, float]:
    """Return what committing turns gives, by so many writers at a time."""
    journal, texts = Journal.open(directory), _Texts(num_writers)
    latencies: list[float] = []
    prepared = [texts.text() for _ in range(512)]
    until = time.perf_counter() + seconds

    async def commit(changes: Sequence[Change]) -> None:
        started = time.perf_counter()
        await journal.commit(changes)
        latencies.append(1e3 * (time.perf_counter() - started))

    async def write(number: int) -> None:
        session, parent, turn = f"ses_{number}", None, 0
        while time.perf_counter() < until:
            said, answer = f"msg_{number}_{turn}u", f"msg_{number}_{turn}a"
            text = prepared[(number * 31 + turn) % len(prepared)]
            record = make_session(session, updated_at=float(turn), head=answer)
            asked = make_user_message(said, text[:200], parent)
            begun = make_answer(answer, said, None, [], prompt_ids=range(60))
            await commit([SaveSession(record), SaveMessage(session, asked), SaveMessage(session, begun)])
            journal.append_tokens(answer, 0, range(_TOKENS_IN_FLIGHT))
            ended = make_answer(answer, said, text, range(1000, 1000 + _TOKENS), prompt_ids=range(60))
            await commit([SaveSession(record), SaveMessage(session, ended)])
            parent, turn = answer, turn + 1

    started = time.perf_counter()
    used = time.process_time()
    before = journal.num_transactions
    await asyncio.gather(*map(write, range(num_writers)))
    elapsed = time.perf_counter() - started
    used = time.process_time() - used
    num_transactions = journal.num_transactions - before
    await journal.close()
    latencies.sort()
    return {
        "writers": num_writers,
        "commits_per_s": len(latencies) / elapsed,
        "commits_per_transaction": len(latencies) / num_transactions,
        "p50_ms": latencies[len(latencies) // 2],
        "p99_ms": latencies[int(0.99 * len(latencies))],
        "cpu_us_per_commit": 1e6 * used / len(latencies),
    }


def _conversations(num_sessions: int, num_messages: int, texts: _Texts) -> Iterator[list[Change]]:
    for number in range(num_sessions):
        session = f"ses_{number:012x}"
        record = make_session(
            session,
            user=f"user{number % _NUM_OWNERS}",
            title=" ".join(texts.text().split()[:5]),
            updated_at=float(number),
        )
        changes: list[Change] = [SaveSession(record)]
        parent: str | None = None
        for turn in range(num_messages // num_sessions // 2):
            said, answer = f"msg_{number:012x}{turn:06x}0", f"msg_{number:012x}{turn:06x}1"
            changes.append(SaveMessage(session, make_user_message(said, texts.text()[:200], parent)))
            ids = texts.rng.choices(range(49152), k=_TOKENS)
            changes.append(SaveMessage(session, make_answer(answer, said, texts.text(), ids, prompt_ids=range(60))))
            parent = answer
        yield changes


async def size_figures(directory: Path, num_sessions: int, num_messages: int) -> dict[str, float]:
    """Return what a journal of so many messages takes, on the disk and in time."""
    texts = _Texts(0)
    journal = Journal.open(directory)
    started = time.perf_counter()
    waiting: list[asyncio.Task[None]] = []
    for changes in _conversations(num_sessions, num_messages, texts):
        waiting.append(asyncio.create_task(journal.commit(changes)))
        if len(waiting) == 200:
            await asyncio.gather(*waiting)
            waiting.clear()
    await asyncio.gather(*waiting)
    filled_s = time.perf_counter() - started
    await journal.close()

    started = time.perf_counter()
    journal = Journal.open(directory)
    open_ms = 1e3 * (time.perf_counter() - started)
    started = time.perf_counter()
    num_found = len(await journal.sessions())
    sessions_ms = 1e3 * (time.perf_counter() - started)
    started = time.perf_counter()
    await journal.messages(f"ses_{num_sessions // 2:012x}")
    messages_ms = 1e3 * (time.perf_counter() - started)
    figures = {
        "sessions": float(num_found),
        "messages": float(num_messages),
        "bytes_per_message": (directory / DATABASE).stat().st_size / num_messages,
        "fill_messages_per_s": num_messages / filled_s,
        "open_ms": open_ms,
        "sessions_ms": sessions_ms,
        "messages_ms": messages_ms,
    }
    queries = {
        "common word": texts.words[0],
        # Nowhere, though its threes of characters are common: what the index names is compared in vain.
        "common word and a letter": texts.words[0] + "a",
        "rare word": texts.words[-1],
        "two words": f"{texts.words[40]} {texts.words[60]}",
        "part of a word": max(texts.words[2000:2100], key=len)[1:-1],
        "two letters": texts.words[5][:2],
        "not there": "zzqqzzqq",
    }
    for name, query in queries.items():
        times = []
        for number in range(_NUM_OWNERS):
            started = time.perf_counter()
            await journal.search("acme", f"user{number}", query, 50)
            times.append(1e3 * (time.perf_counter() - started))
        figures[f"search_{name.replace(' ', '_')}_ms"] = statistics.median(times)
    started = time.perf_counter()
    await journal.erase(f"ses_{num_sessions // 3:012x}")
    figures["erase_ms"] = 1e3 * (time.perf_counter() - started)
    started = time.perf_counter()
    await journal.erase(f"ses_{num_sessions // 3 + 1:012x}")
    figures["erase_again_ms"] = 1e3 * (time.perf_counter() - started)
    await journal.close()
    return figures


def journal_table(figures: Figures) -> str:
    """Return what commits give, and what a large journal takes."""
    heads = ["committing at once", "commits a second", "in one transaction", "a commit, median", "p99", "CPU a commit"]
    rows = [
        [
            f"{row['writers']}",
            f"{row['commits_per_s']:,.0f}",
            f"{row['commits_per_transaction']:.1f}",
            f"{row['p50_ms']:.1f} ms",
            f"{row['p99_ms']:.1f} ms",
            f"{row['cpu_us_per_commit']:.0f} µs",
        ]
        for row in figures["commits"]
    ]
    size = figures["size"]
    searches = [
        [name[len("search_") : -len("_ms")].replace("_", " "), f"{value:.1f} ms"]
        for name, value in size.items()
        if name.startswith("search_")
    ]
    return (
        f"{markdown_table(heads, rows)}\n\nOne page written and synced takes {figures['fsync_us']:,.0f} µs here."
        f" {size['messages']:,.0f} messages of {size['sessions']:,.0f} sessions take {size['bytes_per_message']:,.0f}"
        f" bytes each, with {_TOKENS} tokens an answer and the index. That journal opens in {size['open_ms']:.0f} ms,"
        f" lists all sessions in {size['sessions_ms']:.0f} ms and reads one's messages in {size['messages_ms']:.1f} ms;"
        f" an erasure is out of all files after {size['erase_ms']:,.0f} ms."
        f"\n\n{markdown_table(['search for', 'median'], searches)}"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench journal", description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--messages", type=int, default=100_000, help="of all sessions together")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each number of writers")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; a temporary folder where absent")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        fsync = fsync_us(folder)
        commits = [
            asyncio.run(commit_figures(folder / f"commits{writers}", writers, options.seconds)) for writers in _WRITERS
        ]
        size = asyncio.run(size_figures(folder / "size", options.sessions, options.messages))
    print(f"fsync of a page: {fsync:.0f} us")
    print(f"{'writers':>8}{'commits/s':>12}{'a group':>9}{'p50, ms':>9}{'p99, ms':>9}{'CPU, us':>9}")
    for row in commits:
        print(
            f"{row['writers']:>8}{row['commits_per_s']:>12,.0f}{row['commits_per_transaction']:>9.1f}"
            f"{row['p50_ms']:>9.2f}{row['p99_ms']:>9.2f}{row['cpu_us_per_commit']:>9.0f}"
        )
    print(
        f"{size['messages']:,.0f} messages in {size['sessions']:,.0f} sessions: {size['bytes_per_message']:,.0f} bytes"
        f" a message; opened in {size['open_ms']:.0f} ms, all sessions in {size['sessions_ms']:.0f} ms,"
        f" one's messages in {size['messages_ms']:.1f} ms"
    )
    for name, value in size.items():
        if name.startswith("search_"):
            print(f"  search, {name[7:-3].replace('_', ' '):<15}{value:>9.2f} ms")
    print(f"  erasure {size['erase_ms']:,.0f} ms, the next one {size['erase_again_ms']:,.0f} ms")
    write_json(options.json, "journal", {"fsync_us": fsync, "commits": commits, "size": size})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
