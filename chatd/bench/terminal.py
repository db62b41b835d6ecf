"""How the terminal client feels: `python -m chatd.bench terminal`.

The client runs on a pseudo-terminal of 100×30 against a scripted daemon, beside a process whose event loop has nothing
to do. Measured from outside: the time from a key's byte to the byte that draws it. Measured inside, by
`terminal_child`: how late the event loop is, which is how long the screen stands still. What the machine adds stands
beside that: how late the idle loop is at the same time, and, as "own", each figure without the time that the client's
first thread, which draws, waited for a processor. Never a pass or fail.

Parts: `stream`, 5,000 tokens with one fence of 400 lines; `keys`, typing while an answer streams; `history`, opening a
conversation and scrolling from both of its ends; `paste`, a megabyte of it; `resize`, other sizes while an answer
streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatd import protocol as p
from chatd.bench.record import write_json
from chatd.bench.tables import markdown_table
from chatd.config import child_environment
from chatd.testing.pseudo_terminal import PseudoTerminal
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd.testing.scripted_session import ScriptedSession

COLUMNS, ROWS = 100, 30
KEYS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEY_INTERVAL_S = 0.08
PAGE_INTERVAL_S = 1 / 30
"""How fast a keyboard repeats a key that is held."""
CHOOSE = b"\x1bOR\x1b[B\r"
"""Shows the conversations, goes to the first one of them, and opens it."""
FIRST_KEY = b"\x1b[1;5H"
MOST_PAGES = 150
WARM = "warmanswer"
FIRST, LAST, END = "firstmessage", "lastmessage", "endofanswer"
LARGE_FRAME_BYTES = 1 << 23
PASTE_BYTES = 1 << 20

Samples = list[tuple[float, float, float, float]]
Figures = dict[str, Any]


def prose(words: int) -> list[str]:
    """Return an answer of paragraphs, lists and emphasis, a word a piece; all lower case, unlike the keys."""
    pieces: list[str] = []
    for n in range(words):
        word = ("cache", "**block**", "`token`", "of", "the", "prefix", "is", "held", "by", "a", "session")[n % 11]
        pieces.append("\n\n" if n % 60 == 59 else "\n- " if n % 60 in (30, 36, 42, 48) else f"{word} ")
    return pieces


def code(lines: int) -> list[str]:
    """Return one long code fence, a token a piece."""
    pieces = ["\n\n```", "python\n"]
    for n in range(lines):
        pieces += ["    ", f"value_{n}", " = ", "step", "(", f"{n}", ")", "  # a row\n"]
    return [*pieces, "```\n\n"]


def long_answer(tokens: int, lines: int) -> list[str]:
    """Return prose, one fence and prose again, so many pieces in all."""
    fence = code(lines)
    rest = max(0, tokens - len(fence))
    return [*prose(rest // 2), *fence, *prose(rest - rest // 2)]


def conversation(messages: int, tokens: int) -> list[p.Item]:
    """Return a person's messages and a model's in turn, of about `tokens` pieces each; some answers have code."""
    items: list[p.Item] = []
    for n in range(messages):
        said = n % 2 == 0
        text = "".join(prose(tokens) if said or n % 3 else long_answer(tokens, tokens // 24))
        mark = FIRST if n == 0 else LAST if n == messages - 1 else f"message {n}"
        parent = items[-1].id if items else None
        items.append(
            p.Item(
                id=f"m{n}",
                role="user" if said else "assistant",
                content=f"{mark}\n\n{text}" if n < messages - 1 else f"{text}\n\n{mark}",
                status="completed",
                parent=parent,
            )
        )
    return items


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass
class Run:
    """One client on its terminal, and what is measured of it.

    Attributes:
        terminal: Where it is drawn.
        daemon: Whom it talks to.
        phases: From when to when each scenario went on, with what was measured from outside.
    """

    terminal: PseudoTerminal
    daemon: ScriptedDaemon
    phases: list[tuple[str, float, float, Figures]] = field(default_factory=list)

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[Figures]:
        """Measure what happens meanwhile under this name; figures of one's own go into what it gives."""
        figures: Figures = {}
        started = time.monotonic()
        yield figures
        self.phases.append((name, started, time.monotonic(), figures))

    async def press(self, keys: bytes, then: str, timeout_s: float = 60.0) -> tuple[float, float]:
        """Press keys; return the milliseconds until a text is drawn, and those without waits for a processor."""
        start, pressed, waited_s = len(self.terminal.output), time.monotonic(), self._waited_s()
        self.terminal.write(keys)
        taken_s = await self.terminal.drawn(then.encode(), start=start, timeout_s=timeout_s) - pressed
        return 1000 * taken_s, 1000 * max(0.0, taken_s - (self._waited_s() - waited_s))

    def _waited_s(self) -> float:
        """Return for how long the client's first thread, which draws, has waited for a processor so far."""
        assert self.terminal.process is not None
        return int(Path(f"/proc/{self.terminal.process.pid}/schedstat").read_text().split()[1]) / 1e9

    @property
    def memory_mib(self) -> float:
        """What the client has in memory now."""
        assert self.terminal.process is not None
        pages = int(Path(f"/proc/{self.terminal.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(
    scenario: Callable[[Run], Awaitable[None]],
    scripts: Sequence[Script] = (Script(),),
    sessions: Sequence[ScriptedSession] = (),
    frame_bytes: int = LARGE_FRAME_BYTES,
) -> list[Figures]:
    """Run a scenario with a client of its own; return the figures of its phases in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        lags, idle_lags = Path(folder) / "lags.json", Path(folder) / "idle.json"
        child = [sys.executable, "-m", "chatd.bench.terminal_child"]
        environment = child_environment(TERM="xterm-256color", COLORTERM="truecolor", XDG_STATE_HOME=folder)
        async with ScriptedDaemon(scripts, frame_bytes=frame_bytes) as daemon:
            daemon.sessions |= {session.id: session for session in sessions}
            async with _idle_loop([*child, str(idle_lags)]):
                terminal = PseudoTerminal([*child, str(lags), daemon.url], environment, columns=COLUMNS, rows=ROWS)
                async with terminal:
                    run = Run(terminal, daemon)
                    await terminal.drawn(b"connected")
                    await scenario(run)
                    terminal.write(b"\x11")
                    assert terminal.process is not None
                    async with asyncio.timeout(30):
                        await terminal.process.wait()
        samples: Samples = json.loads(lags.read_text())
        idle_samples: Samples = json.loads(idle_lags.read_text())
    return [
        {
            "scenario": name,
            "seconds": round(end - start, 1),
            **figures,
            **stalls(samples, start, end),
            **{f"idle_{key}": value for key, value in stalls(idle_samples, start, end).items()},
        }
        for name, start, end, figures in run.phases
    ]


@asynccontextmanager
async def _idle_loop(command: Sequence[str]) -> AsyncIterator[None]:
    """Have a process beside that does nothing but watch its loop."""
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def stalls(samples: Samples, start: float, end: float) -> Figures:
    """Return how late a loop was between two moments, by the clock and without its waits for a processor."""
    within = [sample for sample in samples if start <= sample[0] < end]
    late = [1000 * late_s for _, late_s, _, _ in within]
    own = [1000 * max(0.0, late_s - waited_s) for _, late_s, waited_s, _ in within]
    return {
        "stall_p50_ms": round(percentile(late, 0.50), 2),
        "stall_p99_ms": round(percentile(late, 0.99), 1),
        "stall_max_ms": round(max(late, default=0.0), 1),
        "own_p99_ms": round(percentile(own, 0.99), 1),
        "own_max_ms": round(max(own, default=0.0), 1),
        "cpu_share": round(sum(cpu_s for _, _, _, cpu_s in within) / (end - start), 3),
    }


async def stream(run: Run) -> None:
    """Watch an answer without touching anything."""
    await run.press(b"go\r", WARM)
    async with run.phase("5,000 tokens with a fence of 400 lines"):
        await run.press(b"go\r", END, timeout_s=180)


async def keys(run: Run, name: str) -> None:
    """Type capitals, one after another, until the answer has ended."""
    await run.press(b"go\r", WARM)
    terminal = run.terminal
    latencies: list[tuple[float, float]] = []
    begun = len(terminal.output)
    async with run.phase(name) as figures:
        await run.press(b"go\r", "answering")
        while terminal.output.find(END.encode(), begun) < 0:
            key = KEYS[len(latencies) % len(KEYS)]
            latencies.append(await run.press(key.encode(), key))
            if len(latencies) % len(KEYS) == 0:
                terminal.write(b"\x15")
            await asyncio.sleep(KEY_INTERVAL_S)
        figures["keys"] = len(latencies)
        for kind, values in (("key", [by[0] for by in latencies]), ("own_key", [by[1] for by in latencies])):
            figures[f"{kind}_p50_ms"] = round(percentile(values, 0.50), 1)
            figures[f"{kind}_p95_ms"] = round(percentile(values, 0.95), 1)


async def history(run: Run, name: str) -> None:
    """Open the one conversation that there is, scroll up from its end, and down from its beginning."""
    await run.terminal.drawn(name.encode())
    before_mib = run.memory_mib
    async with run.phase(f"{name}: open") as figures:
        figures["open_ms"], figures["own_open_ms"] = map(round, await run.press(CHOOSE, LAST))
    await asyncio.sleep(1)
    opened_mib = run.memory_mib
    async with run.phase(f"{name}: scroll") as figures:
        begun = time.monotonic()
        pages = await _hold(run, b"\x1b[5~", FIRST)
        if pages == MOST_PAGES:
            await run.press(FIRST_KEY, FIRST)
        pages += await _hold(run, b"\x1b[6~", LAST)
        figures["pages"], figures["pages_s"] = pages, round(pages / (time.monotonic() - begun), 1)
    run.phases[-1][3].update(
        opened_mib=round(opened_mib - before_mib, 1), scrolled_mib=round(run.memory_mib - before_mib, 1)
    )


async def _hold(run: Run, key: bytes, then: str) -> int:
    """Hold a key until a text is drawn, or long enough; return how often it was repeated. Each page is waited for."""
    start, pressed = len(run.terminal.output), 0
    while pressed < MOST_PAGES and run.terminal.output.find(then.encode(), start) < 0:
        before = len(run.terminal.output)
        run.terminal.write(key)
        pressed += 1
        await asyncio.sleep(PAGE_INTERVAL_S)
        await run.terminal.drawn(b"", start=before + 1)
    return pressed


async def paste(run: Run) -> None:
    """Paste what no message can hold, and then the longest text that can be sent; send that, and go on typing."""
    line = b"pasted text of a log that somebody wants to ask about, line after line\n"
    for name, size_bytes, then in (
        ("a paste of 1 MiB, refused", PASTE_BYTES, "the limit is"),
        ("a paste of 200 kB", 200_000, "characters in"),
    ):
        async with run.phase(name) as figures:
            await run.terminal.write_all(b"\x1b[200~" + line * (size_bytes // len(line)) + b"\x1b[201~")
            figures["drawn_ms"], figures["own_drawn_ms"] = map(round, await run.press(b"", then))
    async with run.phase("the message with it") as figures:
        figures["drawn_ms"], figures["own_drawn_ms"] = map(round, await run.press(b"\r", WARM))


async def resize(run: Run) -> None:
    """Give the terminal other sizes while an answer streams after a conversation."""
    await run.terminal.drawn(b"conversation of")
    await run.press(CHOOSE, LAST)
    await run.press(b"go\r", WARM)
    begun = len(run.terminal.output)
    async with run.phase("another size five times a second") as figures:
        await run.press(b"go\r", "answering")
        resized = 0
        while run.terminal.output.find(END.encode(), begun) < 0:
            resized += 1
            run.terminal.resize(60 + 37 * resized % 80, 20 + 7 * resized % 30)
            await asyncio.sleep(0.2)
        figures["resized"] = resized


def _session(name: str, messages: int, tokens: int) -> ScriptedSession:
    return ScriptedSession("ses_1", f"a {name}", None, items=conversation(messages, tokens))


HISTORIES = (("short", 10, 400), ("100 long messages", 100, 1000), ("1,000 short messages", 1000, 100))
"""Of the conversations that are scrolled: a name, how many messages, and the tokens of one."""


async def run_part(name: str, tok_s: float) -> list[Figures]:
    """Run one part and return the figures of its scenarios."""

    def answers(pieces: Sequence[str]) -> list[Script]:
        return [Script(deltas=[WARM]), Script(deltas=[*pieces, f"\n\n{END}"], delay_s=1 / tok_s)]

    match name:
        case "stream":
            return await measure(stream, answers(long_answer(5000, 400)))
        case "keys":
            found = []
            for what, pieces in (("prose, 1,000 tokens", prose(1000)), ("code, a fence of 120 lines", code(120))):
                found += await measure(lambda run, what=what: keys(run, what), answers(pieces))  # type: ignore[misc]
            return found
        case "history":
            found = []
            for what, messages, tokens in HISTORIES:
                sessions = [_session(what, messages, tokens)]
                found += await measure(lambda run, what=what: history(run, what), sessions=sessions)  # type: ignore[misc]
            return found
        case "paste":
            return await measure(paste, answers([]), frame_bytes=p.MIN_FRAME_BYTES)
        case _:
            sessions = [_session("conversation of before", 20, 400)]
            return await measure(resize, answers(long_answer(1000, 60)), sessions)


PARTS = ("stream", "keys", "history", "paste", "resize")


def terminal_table(figures: Figures) -> str:
    """Return how late the loop was in each scenario, and what took how long."""
    runs = figures["runs"]
    heads = ["", "the loop is late, p50", "p99", "max", "own p99", "own max", "idle loop, p99", "max", "CPU"]
    names = ("stall_p50_ms", "stall_p99_ms", "stall_max_ms", "own_p99_ms", "own_max_ms", "idle_stall_p99_ms")
    rows = [
        [
            run["scenario"],
            *(f"{run[name]:.1f} ms" for name in (*names, "idle_stall_max_ms")),
            f"{run['cpu_share']:.0%}",
        ]
        for run in runs
    ]
    times = [(what, *found) for run in runs for what, *found in _times(run)]
    return f"{markdown_table(heads, rows)}\n\n{markdown_table(['', 'by the clock', 'own'], times)}"


def _times(run: Figures) -> list[tuple[str, str, str]]:
    """Return what a scenario measured from outside, each with its two times."""
    name, found = run["scenario"], []
    if "keys" in run:
        for share in ("p50", "p95"):
            key, own = (f"{run[f'{kind}_{share}_ms']:.1f} ms" for kind in ("key", "own_key"))
            found.append((f"keypress to paint, {share}: {name}", key, own))
    for kind in ("open", "drawn"):
        if f"{kind}_ms" in run:
            found.append((f"until it is drawn: {name}", f"{run[f'{kind}_ms']} ms", f"{run[f'own_{kind}_ms']} ms"))
    if "pages" in run:
        speed = f"{run['pages']} pages, {run['pages_s']} a second"
        found.append((f"memory, {speed}: {name}", f"{run['scrolled_mib']} MiB", ""))
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the parts and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench terminal", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    parser.add_argument("--tok-s", type=float, default=100.0, help="tokens a second that stream")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    runs: list[Figures] = []
    for part in options.only:
        for figures in asyncio.run(run_part(part, options.tok_s)):
            runs.append({"part": part, **figures})
            print(json.dumps(runs[-1]), flush=True)
    write_json(options.json, "terminal", {"tok_s": options.tok_s, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
