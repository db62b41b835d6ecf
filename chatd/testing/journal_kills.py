"""Kills a process that commits, again and again, and looks at what is there: `python -m chatd.testing.journal_kills`.

Each round forks a writer, which tells every commit that was acknowledged through a pipe, and kills it with SIGKILL at a
random moment. What was acknowledged in any round must be there, as it was, and no session may be unreadable. The next
writer goes on with the same journal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chatd.journal.directory import DATABASE
from chatd.journal.journal import Journal
from chatd.journal.reader import JournalReader, connect_to_read
from chatd.journal.records import EraseSession, MessageRecord, SaveMessage, SaveSession
from chatd.testing.journal_records import make_answer, make_session, make_user_message

_NUM_WRITERS = 4
_ROUNDS_A_CHECK = 20


def kill_writers(directory: Path, num_kills: int, seed: int, *, longest_s: float = 0.04) -> tuple[int, int]:
    """Kill so many writers, and return how many messages and tokens in flight of theirs were looked at.

    Raises:
        AssertionError: Something that was acknowledged is not there, or something else is.
    """
    rng = random.Random(seed)
    acknowledged: dict[str, set[str]] = {}
    erasing: dict[str, set[str]] = {}
    erased: set[str] = set()
    num_messages = num_tokens = 0
    for kill in range(num_kills):
        for line in _run_one(directory, kill, rng.uniform(0.0, longest_s)):
            verb, session, message = line.split()
            if verb == "said":
                acknowledged.setdefault(session, set()).add(message)
            else:
                # One that is being erased may be there, with all that it had.
                lost = acknowledged.pop(session, set())
                if verb == "erasing":
                    erasing[session] = lost
                else:
                    erased.add(session)
        if kill % _ROUNDS_A_CHECK == 0 or kill == num_kills - 1:
            num_messages, num_tokens = _check(directory, acknowledged, erasing, erased)
    return num_messages, num_tokens


def content_of(message: str) -> str:
    """Return what a writer says in a message."""
    return f"content of {message} " * (1 + sum(map(ord, message)) % 40)


def token_of(message: str, position: int) -> int:
    """Return the token that an answer has at a position."""
    return (sum(map(ord, message)) * 31 + position * 7) % 50000


def _run_one(directory: Path, number: int, after_s: float) -> list[str]:
    """Fork a writer, kill it `after_s` after its journal is open, and return what it acknowledged."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reads)
            asyncio.run(_write(directory, number, writes))
        finally:
            os._exit(1)
    os.close(writes)
    with open(reads, "rb") as pipe:
        first = pipe.readline()
        assert first == b"open\n", f"the journal of writer {number} did not open"
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        # A line is written as a whole, or not at all: the pipe is large, and lines are short.
        return pipe.read().decode().splitlines()


async def _write(directory: Path, number: int, descriptor: int) -> None:
    journal = Journal.open(directory)
    os.write(descriptor, b"open\n")
    await asyncio.gather(*(_talk(journal, f"s{number}-{i}", descriptor) for i in range(_NUM_WRITERS)))


async def _talk(journal: Journal, session: str, descriptor: int) -> None:
    parent: str | None = None
    turn = 0
    while True:
        said, answer = f"{session}-u{turn}", f"{session}-a{turn}"
        await journal.commit(
            [
                SaveSession(make_session(session, updated_at=float(turn))),
                SaveMessage(session, make_user_message(said, content_of(said), parent)),
                SaveMessage(session, make_answer(answer, said, None, [])),
            ]
        )
        os.write(descriptor, f"said {session} {said}\n".encode())
        for start in range(0, 40, 4):
            journal.append_tokens(answer, start, [token_of(answer, start + i) for i in range(4)])
            if start == 4 * (turn % 20):
                await journal.flush()
        ids = [token_of(answer, i) for i in range(40)]
        await journal.commit([SaveMessage(session, make_answer(answer, said, content_of(answer), ids))])
        os.write(descriptor, f"said {session} {answer}\n".encode())
        parent, turn = answer, turn + 1
        if turn % 7 == 0:
            os.write(descriptor, f"erasing {session} -\n".encode())
            await journal.commit([EraseSession(session)])
            os.write(descriptor, f"erased {session} -\n".encode())
            session, parent = f"{session}x", None


def _check(
    directory: Path, acknowledged: dict[str, set[str]], erasing: dict[str, set[str]], erased: set[str]
) -> tuple[int, int]:
    reader = JournalReader(connect_to_read(directory / DATABASE))
    try:
        sessions = {record.id for record in reader.sessions()}
        assert not sessions & erased, "an erased session is back"
        assert sessions >= acknowledged.keys(), "a session with acknowledged messages is missing"
        num_messages = num_tokens = 0
        for session in sessions:
            messages = reader.messages(session)
            num_messages += len(messages)
            num_tokens += sum(_checked(message) for message in messages)
            wanted = acknowledged.get(session) or erasing.get(session, set())
            missing = wanted - {message.id for message in messages}
            assert not missing, f"acknowledged messages are missing: {sorted(missing)}"
        return num_messages, num_tokens
    finally:
        reader.close()


def _checked(message: MessageRecord) -> int:
    """Return how many tokens an answer in flight has."""
    in_flight = message.status == "in_progress"
    assert message.content == ("" if in_flight else content_of(message.id)), f"{message.id} has another content"
    wanted = [token_of(message.id, i) for i in range(len(message.ids))]
    assert message.ids.tolist() == wanted, f"{message.id} has other tokens"
    return len(message.ids) if in_flight else 0


def main(arguments: Sequence[str]) -> int:
    """Kill, check, say what was there, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.testing.journal_kills", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    num_messages, num_tokens = kill_writers(options.directory, options.kills, options.seed)
    sys.stdout.write(f"{options.kills} kills, {num_messages} messages and {num_tokens} tokens in flight are right\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
