"""How long real conversations are in the small model's tokens: `python -m chatd.bench lengths --data DIR --json PATH`.

Holds the 80 two-turn conversations of MT-bench with a daemon and keeps nothing of them but numbers: the tokens that
each message adds to its prompt, and those of each answer. Other benchmarks read them from docs/figures/lengths.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chatd.bench.record import write_json
from chatd.client import Client
from chatd.local_daemon import LocalDaemon
from chatd.protocol import Params, ResponseCompleted, ResponseIncomplete
from chatd.testing.ports import free_port

QUESTIONS = "mt_bench_questions.jsonl"
LENGTHS = Path(__file__).parent.parent.parent / "docs" / "figures" / "lengths.json"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn in tokens: what the message adds to the context, template included, and the answer to it."""

    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """What was recorded.

    Attributes:
        conversations: The turns of each.
        num_shared: Tokens, in whole blocks of 16, that all of them begin with: the template's own system prompt.
    """

    conversations: Sequence[Sequence[Turn]]
    num_shared: int


def load_lengths(path: Path = LENGTHS) -> Lengths:
    """Return the conversations that this benchmark has recorded."""
    recorded = json.loads(path.read_text())
    conversations = [[Turn(*turn) for turn in turns] for turns in recorded["conversations"]]
    return Lengths(conversations, recorded["num_shared"])


def load_questions(folder: Path) -> list[list[str]]:
    """Return what the user says in each conversation."""
    return [json.loads(line)["turns"] for line in (folder / QUESTIONS).read_text().splitlines()]


async def hold(client: Client, questions: Sequence[str], params: Params) -> tuple[list[Turn], int]:
    """Hold one conversation; return its lengths, and the tokens of its first turn that came from others' blocks."""
    session = await client.create_session()
    turns: list[Turn] = []
    num_cached = 0
    history = 0
    for question in questions:
        async for event in session.say(question, params=params):
            if isinstance(event, ResponseCompleted | ResponseIncomplete):
                usage = event.usage
        if not turns:
            num_cached = usage.cached_tokens
        turns.append(Turn(usage.input_tokens - history, usage.output_tokens))
        history = usage.input_tokens + usage.output_tokens
    await client.close_session(session.id)
    return turns, num_cached


async def hold_all(
    url: str, key: str | None, questions: Sequence[Sequence[str]], params: Params, num_at_once: int
) -> Lengths:
    """Hold all conversations, so many at a time."""
    slots = asyncio.Semaphore(num_at_once)
    async with Client.connect(url, key=key) as client:

        async def one(said: Sequence[str]) -> tuple[list[Turn], int]:
            async with slots:
                return await hold(client, said, params)

        held = await asyncio.gather(*(one(said) for said in questions))
    # The first ones come before there is anything to share.
    return Lengths([turns for turns, _ in held], int(statistics.mode(num_cached for _, num_cached in held)))


def main(arguments: Sequence[str]) -> int:
    """Measure, print a summary, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench lengths", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {QUESTIONS}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of an answer")
    parser.add_argument("--at-once", type=int, default=32, help="conversations that are held side by side")
    parser.add_argument("--first", type=int, help="only so many conversations")
    parser.add_argument("--log", default="chatd-bench.log", help="where the daemon's log goes")
    parser.add_argument("--json", type=Path, help="write the lengths here")
    options = parser.parse_args(arguments)
    questions = load_questions(options.data)[: options.first]
    # Greedy, this small model repeats itself up to the limit in every second answer.
    params = Params(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=1, max_tokens=options.max_tokens)
    url = f"http://127.0.0.1:{free_port()}"
    flags = [options.model, "--no-auth", "--quantization", options.quantization, "--log-level", "warning"]
    with LocalDaemon(url, flags, log_path=Path(options.log)) as daemon:
        daemon.wait_ready(lambda phase, done: None)
        lengths = asyncio.run(hold_all(url, None, questions, params, options.at_once))
    turns = [turn for conversation in lengths.conversations for turn in conversation]
    mean_prompt = sum(turn.num_prompt for turn in turns) / len(turns)
    mean_output = sum(turn.num_output for turn in turns) / len(turns)
    print(f"{len(lengths.conversations)} conversations, {len(turns)} turns")
    print(f"a message adds {mean_prompt:.0f} tokens to the prompt, an answer has {mean_output:.0f}, means")
    figures = {
        "model": options.model,
        "max_tokens": options.max_tokens,
        "num_shared": lengths.num_shared,
        "conversations": [
            [[turn.num_prompt, turn.num_output] for turn in conversation] for conversation in lengths.conversations
        ],
    }
    write_json(options.json, "lengths", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
